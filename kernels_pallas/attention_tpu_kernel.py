"""The Mosaic kernel of attention_tpu: tiles of the pool come to VMEM ahead of time, in a ring.

Words: a *list* says which blocks some heads read, one for all heads of a program without a
selection, one for each with it. A *place* is a block of the pool, or with a selection a place in
the head's list of blocks. A *tile* is a run of places of one item (see tiles.py).

Signed `//` and `%` of traced numbers ask which TPU they are for: shifts, masks, lax.div and lax.rem
do not.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxstate.kernels_pallas import tiles as tile_columns
from jaxstate.kernels_pallas import work as work_columns
from jaxstate.kernels_pallas.attention_xla import MASKED
from jaxstate.kernels_pallas.selection import BLOCK_CELLS

LANES = 128
BUFFERS = 4
"""Tiles in VMEM: one attended, three on their way, since a copy takes longer than a tile."""
SPAN = 4
"""Numbers in front of a list's row of visits: its span, see tiles.py."""

_FAR = 2**30  # behind every position


class _Tile(NamedTuple):
    """A tile: its item, its first place, and 1 where the item's shift is not that before it."""

    item: jax.Array
    place: jax.Array
    turns: jax.Array


@dataclasses.dataclass(frozen=True)
class _Tables:
    """What lies in SMEM.

    Attributes:
      blocks: [lists, capacity] int32, blocks of each list; None = all blocks.
      visits: [lists, 4 + 2 * items] int32, span, first place and end place of each item.
      items: [items * 8] int32.
      num_places: of a whole tile.
    """

    blocks: Any
    visits: Any
    items: Any
    num_places: int

    @property
    def _capacity(self) -> int:
        return self.items.shape[0] // work_columns.NUM_COLUMNS

    def column(self, item, column):
        return self.items[item * work_columns.NUM_COLUMNS + column]

    def _first_place(self, one, item):
        return self.visits[one, SPAN + item]

    def _end_place(self, one, item):
        return self.visits[one, SPAN + self._capacity + item]

    def first(self, one) -> _Tile:
        """The list's first tile, one without places where it has none."""
        item = jnp.minimum(self.visits[one, tile_columns.ITEM_BEGIN], self._capacity - 1)
        return _Tile(item, self._first_place(one, item), jnp.int32(1))

    def after(self, one, tile: _Tile) -> _Tile:
        """The list's next tile, one without places behind the last."""
        item_end = self.visits[one, tile_columns.ITEM_END]

        def is_empty(at):
            item, place, end_place = at
            return (place >= end_place) & (item + 1 < item_end)

        def next_item(at):
            item = at[0] + 1
            return item, self._first_place(one, item), self._end_place(one, item)

        item, place, _ = jax.lax.while_loop(
            is_empty,
            next_item,
            (tile.item, tile.place + self.num_places, self._end_place(one, tile.item)),
        )
        shift, before = (self.column(each, work_columns.SHIFT) for each in (item, tile.item))
        return _Tile(item, place, (shift != before).astype(jnp.int32))

    def count(self, one, tile: _Tile):
        """Places of the tile."""
        return jnp.clip(self._end_place(one, tile.item) - tile.place, 0, self.num_places)

    def cell(self, one, tile: _Tile, offset):
        """Number within the item of the first cell of a place of the tile, at most its last."""
        place = tile.place + jnp.minimum(offset, jnp.maximum(self.count(one, tile) - 1, 0))
        if self.blocks is None:
            block = place
        else:  # A tile without places may stand behind the list.
            block = self.blocks[one, jnp.minimum(place, self.blocks.shape[1] - 1)]
        return block * BLOCK_CELLS - self.column(tile.item, work_columns.START)


@dataclasses.dataclass(frozen=True)
class _Copies:
    """Copies of tiles from HBM to the ring in VMEM: of their own blocks and no other cell.

    Attributes:
      angles, k, v: pairs of where it lies and the ring, see `attend`.
      arrived: [BUFFERS, lists] semaphores.
      heads: of a list.
      first_head: of this program, among the pool's.
    """

    tables: _Tables
    angles: tuple[Any, Any]
    k: tuple[Any, Any]
    v: tuple[Any, Any]
    arrived: Any
    heads: int
    first_head: Any

    def start(self, slot, tiles):
        """Start the copies of a tile of each list."""
        blocks = self.tables.blocks
        for one, tile in enumerate(tiles):
            count = self.tables.count(one, tile)

            @pl.when((tile.turns != 0) & (count > 0))
            def _(one=one, tile=tile):
                self._copy_of_angles(one, slot, tile).start()

            def start(block, offset, size, one=one):
                for copy in self._copies_of_blocks(one, slot, block, offset, size):
                    copy.start()

            if blocks is None:

                def start_neighbours(offset, size, tile=tile, start=start):
                    start(tile.place + offset, offset, size)

                _in_powers_of_two(count, self.tables.num_places, start_neighbours)
            else:

                @pl.loop(0, count)
                def _(offset, one=one, tile=tile, start=start):
                    start(blocks[one, tile.place + offset], offset, 1)

    def wait(self, slot, tiles):
        """Wait for the copies of a tile of each list."""
        for one, tile in enumerate(tiles):
            count = self.tables.count(one, tile)

            @pl.when((tile.turns != 0) & (count > 0))
            def _(one=one, tile=tile):
                self._copy_of_angles(one, slot, tile).wait()

            def wait(offset, size, one=one):
                # Semaphores count bytes, of whichever blocks.
                for copy in self._copies_of_blocks(one, slot, 0, offset, size):
                    copy.wait()

            _in_powers_of_two(count, self.tables.num_places, wait)

    def _copy_of_angles(self, one, slot, tile):
        there, ring = self.angles
        return pltpu.make_async_copy(
            there.at[tile.item], ring.at[slot, one], self.arrived.at[slot, one]
        )

    def _copies_of_blocks(self, one, slot, block, offset, size):
        """Keys and values of `size` neighbouring blocks, to the tile's places from `offset` on."""
        cells, cells_of_tile = (
            pl.ds(pl.multiple_of(first * BLOCK_CELLS, BLOCK_CELLS), size * BLOCK_CELLS)
            for first in (block, offset)
        )
        heads_of_pool = pl.ds(self.first_head + one * self.heads, self.heads)
        heads = pl.ds(one * self.heads, self.heads)
        return [
            pltpu.make_async_copy(
                pool.at[heads_of_pool, cells],
                ring.at[slot, heads, cells_of_tile],
                self.arrived.at[slot, one],
            )
            for pool, ring in (self.k, self.v)
        ]


def attend(
    blocks_ref, visits_ref, items_ref, rows_ref, q_ref, angles_hbm, k_hbm, v_hbm,
    stats_ref, mixed_ref, turned, angles, k_tiles, v_tiles, rows, peaks, totals, arrived, *,
    chunks, window, precision,
):  # fmt: skip
    """Attend one chunk of query tokens to the context, for a run of heads.

    Args:
      blocks_ref, visits_ref, items_ref: see _Tables.
      rows_ref: [rows, 2] int32, position and row of each query row.
      q_ref: [heads, rows, head_dim].
      angles_hbm: [items, 2, head_dim] f32, factors of a query and of its halves exchanged.
      k_hbm, v_hbm: [kv_heads, cells, head_dim].
      stats_ref: [heads, 2, rows] f32, peak and total, see attention_xla.Partial.
      mixed_ref: [heads, rows, head_dim] f32.
      turned: like q_ref, queries rotated for the tile.
      angles, k_tiles, v_tiles: rings, [BUFFERS, lists, 2, head_dim] f32 and
        [BUFFERS, heads, cells of a tile, head_dim].
      rows: [2, rows, LANES] int32, and peaks, totals: [heads, rows, LANES] f32, the same in all
        lanes: spreading a column over lanes is what costs most here.
      arrived: [BUFFERS, lists] semaphores.
    """
    heads, num_rows, head_dim = q_ref.shape
    lists = visits_ref.shape[0]
    heads_per_list = heads // lists
    tile_cells = k_tiles.shape[2]
    tables = _Tables(blocks_ref, visits_ref, items_ref, tile_cells // BLOCK_CELLS)
    copies = _Copies(
        tables, (angles_hbm, angles), (k_hbm, k_tiles), (v_hbm, v_tiles), arrived,
        heads=heads_per_list, first_head=jax.lax.div(pl.program_id(0), chunks) * heads,
    )  # fmt: skip

    def heads_of(one):
        return range(one * heads_per_list, (one + 1) * heads_per_list)

    def after(tiles):
        return [tables.after(one, tile) for one, tile in enumerate(tiles)]

    def start_next(tile_idx, tiles):
        copies.start(tile_idx, tiles)
        return after(tiles)

    def visit(tile_idx, carried):
        tiles, ahead = carried
        slot = jax.lax.rem(tile_idx, BUFFERS)
        # The slot that the tile before has left.
        copies.start(jax.lax.rem(tile_idx + BUFFERS - 1, BUFFERS), ahead)
        copies.wait(slot, tiles)
        for one, tile in enumerate(tiles):

            @pl.when((tile.turns != 0) & (tables.count(one, tile) > 0))
            def _(one=one):
                for head in heads_of(one):
                    turned[head] = _turn(q_ref[head], angles[slot, one])

            _zero_unused(tables, one, tile, v_tiles.at[slot], heads_of(one))
        # One straight line of code: what one head waits for is filled with the others' work.
        for one, tile in enumerate(tiles):
            visible = _visible(tables, one, tile, rows, tile_cells, window)
            for head in heads_of(one):
                scores = _product(turned[head], k_tiles[slot, head], 1, precision)
                scores = jnp.where(visible, scores, MASKED)  # [rows, cells]
                peak = jnp.maximum(peaks[head], scores.max(axis=1, keepdims=True))
                kept = jnp.exp(peaks[head] - peak)
                weights = jnp.exp(scores - _lanes(peak, tile_cells))
                peaks[head] = peak
                totals[head] = totals[head] * kept + weights.sum(axis=1, keepdims=True)
                mixed_ref[head] = mixed_ref[head] * _lanes(kept, head_dim) + _product(
                    weights.astype(turned.dtype), v_tiles[slot, head], 0, precision
                )
        return after(tiles), after(ahead)

    for column in range(2):
        rows[column] = jnp.broadcast_to(rows_ref[:, column : column + 1], (num_rows, LANES))
    # Above what is masked, so that this weighs 0 even where all so far is.
    peaks[...] = jnp.full_like(peaks, MASKED / 2)
    totals[...] = jnp.zeros_like(totals)
    mixed_ref[...] = jnp.zeros_like(mixed_ref)
    tiles = [tables.first(one) for one in range(lists)]
    ahead = jax.lax.fori_loop(0, BUFFERS - 1, start_next, tiles)
    num_tiles = visits_ref[0, tile_columns.TILE_END]
    for one in range(1, lists):
        num_tiles = jnp.maximum(num_tiles, visits_ref[one, tile_columns.TILE_END])
    jax.lax.fori_loop(0, num_tiles, visit, (tiles, ahead))
    lane = jax.lax.broadcasted_iota(jnp.int32, (num_rows, LANES), 1)
    for head in range(heads):
        stats_ref[head] = jnp.where(lane == 0, peaks[head], totals[head]).T[:2]


def _turn(q, angles):
    """Rotate q [rows, head_dim] by angles [2, head_dim], in f32."""
    x = q.astype(jnp.float32)
    left, right = jnp.split(x, 2, axis=1)
    turned = x * angles[:1] + jnp.concatenate([right, left], axis=1) * angles[1:]
    return turned.astype(q.dtype)


def _zero_unused(tables: _Tables, one, tile: _Tile, values, heads):
    """Zero values that are not used: their weights are 0, but 0 times no number is no number.

    Args:
      values: [all heads, cells, head_dim], a slot of the ring.
      heads: those of the list.
    """
    count = tables.count(one, tile)
    first, fill = (
        tables.column(tile.item, column) for column in (work_columns.FIRST, work_columns.FILL)
    )
    lowest, highest = (tables.cell(one, tile, offset) for offset in (0, tables.num_places - 1))

    @pl.when((count < tables.num_places) | (lowest < first) | (highest + BLOCK_CELLS > fill))
    def _():
        @pl.loop(0, tables.num_places)
        def _(offset):
            there = pl.ds(pl.multiple_of(offset * BLOCK_CELLS, BLOCK_CELLS), BLOCK_CELLS)
            for head in heads:
                block = values[head, there].astype(jnp.float32)
                cell = tables.cell(one, tile, offset)
                cell += jax.lax.broadcasted_iota(jnp.int32, block.shape, 0)
                used = (offset < count) & (cell >= first) & (cell < fill)
                values[head, there] = jnp.where(used, block, 0).astype(values.dtype)


def _visible(tables: _Tables, one, tile: _Tile, rows, tile_cells, window):
    """Which rows see which cells of the tile: [rows, cells] bool, for all heads of a list."""
    first, fill, base, row_begin, row_end = (
        tables.column(tile.item, column)
        for column in (
            work_columns.FIRST,
            work_columns.FILL,
            work_columns.BASE,
            work_columns.ROW_BEGIN,
            work_columns.ROW_END,
        )
    )
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, tile_cells), 1)
    if tables.blocks is None:
        cell = tables.cell(one, tile, 0) + lane
    else:
        cell = jnp.zeros_like(lane)
        for offset in range(tables.num_places):
            of_block = tables.cell(one, tile, offset) + lane - offset * BLOCK_CELLS
            cell = jnp.where(lane >= offset * BLOCK_CELLS, of_block, cell)
    used = (lane < tables.count(one, tile) * BLOCK_CELLS) & (cell >= first) & (cell < fill)
    position = jnp.where((rows[1] >= row_begin) & (rows[1] < row_end), rows[0], -_FAR)
    distance = _lanes(position, tile_cells) - jnp.where(used, base + cell, _FAR)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _in_powers_of_two(count, most, do):
    """Cut `count` (traced, at most `most`) into powers of two: do(offset, size), sizes static."""
    size = 1 << (most.bit_length() - 1)

    @pl.when((count & size) != 0)
    def _():
        do(count & -(2 * size), size)

    # Most tiles are whole: they pass over the rest at once.
    if size > 1:

        @pl.when((count & (size - 1)) != 0)
        def _():
            _in_powers_of_two(count, size - 1, do)


def _lanes(x, count):
    """Give x [rows, LANES], the same in all lanes, another count of them."""
    return jnp.concatenate([x] * pl.cdiv(count, LANES), axis=1)[:, :count]  # no broadcast


def _product(x, y, contracted, precision):
    """x [rows, n] on y, contracted with the given axis of y, summed in f32."""
    return jax.lax.dot_general(
        x, y.astype(x.dtype), (((1,), (contracted,)), ((), ())), precision=precision,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
