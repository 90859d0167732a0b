"""Work items cut into tiles of whole blocks: what a chunk of query tokens reads, in which order."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from jaxstate.kernels_pallas import work as work_columns
from jaxstate.kernels_pallas.selection import BLOCK_CELLS, Selection

ITEM_BEGIN, ITEM_END, TILE_BEGIN, TILE_END = range(4)
"""Columns of Tiles.spans."""
FIRST_PLACE, END_PLACE, BEGIN, END = range(4)
"""Columns of Tiles.visits."""

_FAR = 2**30  # behind every position


@flax.struct.dataclass
class Tiles:
    """Tiles in the items' order, cut into shares of equally many; the same for a kind of layers.

    A tile is a run of places. Without a selection a place is a block of the pool; with one it is
    a place in the head's list, so that both forms read the same cells in the same order when the
    list names all blocks. A tile never spans two items; the last one of an item may be short.

    Attributes:
      spans: [chunks, lists, shares, 4] int32, a share's items (begin, end) and tiles (begin, end).
      visits: [chunks, lists, items, 4] int32, an item's places (first, end) that the chunk may see
        and its tiles among the chunk's (begin, end).

    `lists` is num_kv_heads with a selection, else 1.
    """

    spans: jax.Array
    visits: jax.Array


def plan(
    items: jax.Array,
    positions: jax.Array,
    token_rows: jax.Array,
    *,
    chunks_per_block: int,
    shares: int,
    tile_cells: int,
    window: int | None,
    selection: Selection | None,
) -> Tiles:
    """Cut what each chunk sees into tiles and these into shares.

    Where a chunk's tiles begin depends on nothing but its own items: a row comes to the same bits
    alone and in a batch of the same step shape.

    Args:
      items: [items, 8] int32, empty ones where a list is not full.
      positions, token_rows: [chunks, rows] int32.
      chunks_per_block: chunks of one block of query tokens.
      tile_cells: a multiple of BLOCK_CELLS.
      window: as in LayerConfig, in positions.
    """
    real = token_rows < work_columns.PADDING_ROW
    lowest_row = jnp.where(real, token_rows, work_columns.PADDING_ROW).min(axis=1, keepdims=True)
    highest_row = jnp.where(real, token_rows, -1).max(axis=1, keepdims=True)
    newest = jnp.where(real, positions, -_FAR).max(axis=1, keepdims=True)
    oldest = jnp.where(real, positions, _FAR).min(axis=1, keepdims=True) - (window or _FAR) + 1
    block = jnp.arange(positions.shape[0], dtype=jnp.int32)[:, None] // chunks_per_block
    start, base = items[:, work_columns.START], items[:, work_columns.BASE]
    first = start + jnp.maximum(items[:, work_columns.FIRST], oldest - base)
    fill = start + jnp.minimum(items[:, work_columns.FILL], newest - base + 1)
    seen = (
        (items[:, work_columns.BLOCK] == block)
        & (items[:, work_columns.ROW_BEGIN] <= highest_row)
        & (items[:, work_columns.ROW_END] > lowest_row)
        & (fill > first)
    )
    first_place = jnp.where(seen, first // BLOCK_CELLS, 0)[:, None]  # [chunks, 1, items]
    end_place = jnp.where(seen, -(-fill // BLOCK_CELLS), 0)[:, None]
    if selection is not None:
        first_place, end_place = (
            _places(selection.sorted_blocks, blocks) for blocks in (first_place, end_place)
        )
    tiles = -(-(end_place - first_place) // (tile_cells // BLOCK_CELLS))
    ends = jnp.cumsum(tiles, axis=-1, dtype=jnp.int32)
    begins = ends - tiles
    all_tiles = ends[..., -1:]
    tiles_per_share = -(-all_tiles // shares)
    share_begin = tiles_per_share * jnp.arange(shares, dtype=jnp.int32)
    share_end = jnp.minimum(share_begin + tiles_per_share, all_tiles)
    # Items that end before the share begins, items that begin before the share ends.
    item_begin = (ends[..., None, :] <= share_begin[..., None]).sum(axis=-1, dtype=jnp.int32)
    item_end = (begins[..., None, :] < share_end[..., None]).sum(axis=-1, dtype=jnp.int32)
    return Tiles(
        spans=jnp.stack([item_begin, item_end, share_begin, share_end], axis=-1),
        visits=jnp.stack([first_place, end_place, begins, ends], axis=-1),
    )


def _places(lists: jax.Array, blocks: jax.Array) -> jax.Array:
    """Where blocks [chunks, 1, items] (would) stand in each list: [chunks, lists, items]."""
    flat = blocks.reshape(-1)
    found = jax.vmap(lambda one: jnp.searchsorted(one, flat).astype(jnp.int32))(lists)
    return found.reshape(lists.shape[0], blocks.shape[0], -1).swapaxes(0, 1)
