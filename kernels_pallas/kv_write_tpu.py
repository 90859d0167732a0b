"""Writing new keys and values into pool pages on TPU, through Mosaic: one call for both.

Memory is laid out in tiles of 8 rows (f32) or 16 (bf16) and 128 lanes, and copies move whole tiles.
So a token's heads are put into the tiles that hold its cell, which come to VMEM and go back: bytes
are 2 * tile rows * those of the pages' cells written, shared by tokens of one tile. 64 decoding
sessions with 8 heads of 128 in bf16 move 8 MiB per layer, where 256 KiB are new; a chunk of
neighbouring cells moves about twice its size.

The kernel takes pages as row-major tiles. That is how TPU lays a pool of head_dim 128 or 256 out.
One of another head_dim lies transposed by default, and XLA would copy it whole around each call:
allocate it, and compile the step, with `Format(Layout((0, 1, 2, 3)))` of jax.experimental.layout.
It then pays for whole 128 lanes: twice the memory and the bytes for head_dim 64.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_SUBLANE_BYTES = 32  # rows of a tile times bytes of an element


def kv_write(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cells: jax.Array,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:
    """Return both pages with one token's heads written to each named cell, in place if donated.

    Args:
      k_pages, v_pages: [num_kv_heads, num_pages, page_size, head_dim].
      k, v: [tokens, num_kv_heads, head_dim]; cast to the pages' dtype.
      cells: [tokens] int32, page * page_size + cell; num_pages * page_size or more = write
        nothing. No cell is named twice.
      interpret: run on any device, see pallas_call.
    Raises:
      NotImplementedError: page_size is no multiple of a tile's rows.
    """
    kv_heads, num_pages, page_size, head_dim = k_pages.shape
    tile = _SUBLANE_BYTES // k_pages.dtype.itemsize
    if page_size % tile:
        raise NotImplementedError(
            f"page_size: expected a multiple of {tile} in {k_pages.dtype}, got {page_size}; "
            "use kv_write_xla.kv_write"
        )
    tokens = cells.shape[0]
    # In the order of their cells, so that each tile is visited by one run of tokens: it is then
    # fetched once and written once, and no fetch can overtake a write to the same tile.
    order = jnp.argsort(cells).astype(jnp.int32)
    cells = cells[order]
    real = cells < num_pages * page_size
    # Dropped tokens come last, stay on the last written tile and match no row of it.
    last = jnp.max(jnp.where(real, cells, 0))
    tiles = jnp.where(real, cells, last) // tile
    tile_rows = jnp.where(real, cells % tile, -1)

    def new_spec():
        return pl.BlockSpec(
            (1, kv_heads, 1, head_dim), lambda i, order, tiles, rows: (order[i], 0, 0, 0)
        )

    def pages_spec():
        return pl.BlockSpec(
            (kv_heads, 1, tile, head_dim), lambda i, order, tiles, rows: (0, tiles[i], 0, 0)
        )

    tiled = (kv_heads, num_pages * page_size // tile, tile, head_dim)
    outs = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(tokens,),
            in_specs=(new_spec(), new_spec(), pages_spec(), pages_spec()),
            out_specs=(pages_spec(), pages_spec()),
        ),
        out_shape=tuple(jax.ShapeDtypeStruct(tiled, pages.dtype) for pages in (k_pages, v_pages)),
        input_output_aliases={5: 0, 6: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="kv_write",
    )(
        order, tiles, tile_rows,
        *(new.astype(k_pages.dtype)[:, :, None] for new in (k, v)),
        *(pages.reshape(tiled) for pages in (k_pages, v_pages)),
    )  # fmt: skip
    return outs[0].reshape(k_pages.shape), outs[1].reshape(v_pages.shape)


def _kernel(order, tiles, tile_rows, k_ref, v_ref, old_k, old_v, k_pages_ref, v_pages_ref):
    del order
    token = pl.program_id(0)
    row = tile_rows[token]

    @pl.when((token == 0) | (tiles[token] != tiles[jnp.maximum(token - 1, 0)]))
    def _():
        k_pages_ref[...] = old_k[...]
        v_pages_ref[...] = old_v[...]

    for new_ref, pages_ref in ((k_ref, k_pages_ref), (v_ref, v_pages_ref)):
        old = pages_ref[:, 0]
        here = jax.lax.broadcasted_iota(jnp.int32, old.shape, 1) == row
        pages_ref[:, 0] = jnp.where(here, new_ref[0], old)
