"""Attention over paged context on TPUs, through Mosaic, and merging it with the step's own tokens.

A program is (chunk of query tokens, run of KV heads) with as many heads as a tile has room for. A
copy from HBM has to be large to be fast, and heads make it so without making short items dearer;
they also fill the gaps that a few query rows leave on the chip. A tile is one strided copy of
neighbouring blocks; one of fewer blocks is cut into powers of two, so that nothing but an item's
blocks is read, at the pool's end too. With a selection each head has its own tiles and each block
is a copy, of 4 KiB at head_dim 128 in bf16.

There are two programs at least, for chips of two cores, and no shares of a context. A tile never
spans two items: pages that lie apart cost a tile's arithmetic each, neighbouring pages do not. A
program's first tiles are not on their way while the program before it computes.

Compiled ahead of time for v4, v5e, v5p, v6e and TPU7x, never run. For v5e a tile of 8 heads x 256
cells x 128 in bf16, 1 MiB with its values, comes to about 600 instructions with 4 query rows a head
and 2,600 with 256; reading it takes 1,900 cycles at 819 GB/s, the products of 256 rows 2,048.

Memory is laid out in tiles of 8 rows (f32) or 16 (bf16) and 128 lanes, and the pool is taken so.
That is how TPU lays a pool of head_dim 128 or 256 out; for one of 64 see kv_write_tpu.py: unless it
is allocated as row-major tiles XLA copies it whole around each call, and with them it takes twice
the bytes, to keep and to read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxstate.kernels_pallas import attention_tpu_kernel, attention_xla, chunks, tiles
from jaxstate.kernels_pallas.attention_tpu_kernel import BUFFERS, LANES, SPAN
from jaxstate.kernels_pallas.attention_xla import Partial
from jaxstate.kernels_pallas.rope import Angles
from jaxstate.kernels_pallas.selection import BLOCK_CELLS, Selection
from jaxstate.kernels_pallas.work import NUM_COLUMNS, WorkList

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
_TILE_BYTES = 2**19  # keys of a tile, all heads; the ring has four of keys and four of values
_MIN_TILE_CELLS, _MAX_TILE_CELLS = 256, 512
_MAX_ROWS = 256  # query rows of a chunk: arithmetic then takes longer than reading
_MAX_SUMS = 2**18  # heads * query rows * head_dim; what has that shape takes 6 MiB of VMEM's 16
_SMEM_BYTES = 7 * 2**17  # of 1 MiB
_SUBLANE_BYTES = 32


def unsupported(
    head_dim: int,
    dtype,
    page_size: int,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> str | None:
    """Say why this kernel cannot run here, None if it can.

    Args:
      dtype: of keys and values in the pool.
      page_size: in cells.
      interpret: how an interpreter is to run it, which needs no TPU.
    """
    if head_dim % 16 or not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        return (
            f"head_dim must be a multiple of 16 from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, "
            f"got {head_dim}"
        )
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"keys and values must be float32 or bfloat16, got {jnp.dtype(dtype).name}"
    if page_size % BLOCK_CELLS:
        return f"pages must be whole blocks of {BLOCK_CELLS} cells, got page_size {page_size}"
    if not interpret and jax.default_backend() != "tpu":
        return f"it runs on the TPU backend, this is {jax.default_backend()}"
    return None


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    token_rows: jax.Array,
    visible: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    work: Sequence[WorkList],
    shifts: Sequence[Angles],
    *,
    block_tokens: int,
    window: int | None,
    precision: jax.lax.Precision,
    selection: Selection | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Attend the step's tokens to each other (plain XLA) and to the work list's cells (the kernel).

    Arguments as in `attention_xla.tail_attention` and `context_attention`; stretches may be of any
    length, and all lists are read in one pass. The pool's cells must be whole blocks.

    Args:
      precision: of products in f32, DEFAULT or HIGHEST; products in bf16 are exact, sums f32.
      interpret: run on any device, see pallas_call.
    Returns:
      [tokens, num_heads, head_dim] f32; 0 where nothing is visible.
    Raises:
      NotImplementedError: the tables of items and blocks do not fit into SMEM.

    Source: online softmax as in FlashAttention-2 (arXiv:2307.08691), paged layout as in
    PagedAttention (arXiv:2309.06180).
    """
    kv_heads = k.shape[1]
    most_rows = min(_MAX_ROWS, _MAX_SUMS // (_tile_heads(k_pages) * _lanes(q.shape[2])))
    chunk_tokens = chunks.largest_divisor(block_tokens, most_rows * kv_heads // q.shape[1])
    partial = attention_xla.tail_attention(
        q, k, v, visible, block_tokens=chunk_tokens, precision=precision
    )
    context = _context(
        q, positions, token_rows, k_pages, v_pages, work, shifts,
        chunk_tokens=chunk_tokens, block_tokens=block_tokens, window=window, precision=precision,
        selection=selection, interpret=interpret,
    )  # fmt: skip
    context = jax.tree.map(lambda x: x[None], context)
    return attention_xla.normalize(attention_xla.merge(partial, context), chunk_tokens)


def _lanes(head_dim: int) -> int:
    """Lanes that a head takes."""
    return -(-head_dim // LANES) * LANES


def _tile_heads(k_pages: jax.Array) -> int:
    """KV heads that a tile has room for."""
    kv_heads, _, _, head_dim = k_pages.shape
    head_bytes = _MIN_TILE_CELLS * _lanes(head_dim) * k_pages.dtype.itemsize
    return chunks.largest_divisor(kv_heads, min(_TILE_BYTES // head_bytes, kv_heads))


def _context(
    q, positions, token_rows, k_pages, v_pages, work, shifts, *,
    chunk_tokens, block_tokens, window, precision, selection, interpret,
) -> Partial:  # fmt: skip
    """Attend chunks of tokens to the cells: a Partial of [chunks, kv_heads, rows, …]."""
    kv_heads, num_pages, page_size, head_dim = k_pages.shape
    cells = num_pages * page_size
    sublanes = _SUBLANE_BYTES // q.dtype.itemsize
    cut = chunks.cut(
        q, positions, token_rows, kv_heads=kv_heads, chunk_tokens=chunk_tokens,
        padded_rows=lambda rows: -(-rows // sublanes) * sublanes,
    )  # fmt: skip
    num_chunks, _, padded_rows, _ = cut.q.shape
    heads = _tile_heads(k_pages)
    if num_chunks == 1 and heads == kv_heads:
        heads = chunks.largest_divisor(kv_heads, kv_heads - 1)
    cell_bytes = heads * _lanes(head_dim) * k_pages.dtype.itemsize
    tile_cells = _MIN_TILE_CELLS
    while tile_cells < _MAX_TILE_CELLS and 2 * tile_cells * cell_bytes <= _TILE_BYTES:
        tile_cells *= 2
    tile_cells = min(tile_cells, cells)

    items, cos, sin = chunks.all_items(work, shifts)
    plan = tiles.plan(
        items, cut.positions, cut.token_rows,
        chunks_per_block=block_tokens // chunk_tokens, shares=1, tile_cells=tile_cells,
        window=window, selection=selection,
    )  # fmt: skip
    visits = jnp.concatenate(
        [
            plan.spans[:, :, 0],
            plan.visits[..., tiles.FIRST_PLACE],
            plan.visits[..., tiles.END_PLACE],
        ],
        axis=-1,
    )
    lists = 1
    if selection is not None:
        heads = lists = _lists_in_smem(heads, items.shape[0], selection)
    elif _smem_bytes(1, items.shape[0], 0) > _SMEM_BYTES:
        raise NotImplementedError(_too_many(items.shape[0], 0))
    runs = kv_heads // heads
    visits = visits.reshape(num_chunks, -1, lists, visits.shape[2])
    # A turn back of pairs (i, i + half): left * cos + right * sin, right * cos - left * sin.
    angles = jnp.stack(
        [jnp.concatenate([cos, cos], axis=1), jnp.concatenate([sin, -sin], axis=1)], axis=1
    )

    # One dimension, so that cores share what there is; the chunk runs fastest.
    def chunk_of(program):
        return jax.lax.rem(program, num_chunks)

    def run_of(program):
        return jax.lax.div(program, num_chunks)

    def by_both(*shape):
        return pl.BlockSpec(
            (None, heads, *shape), lambda program: (chunk_of(program), run_of(program), 0, 0)
        )

    chosen, of_blocks = [], []
    if selection is not None:
        chosen = [selection.blocks.reshape(runs, lists, -1)]
        of_blocks = [
            pl.BlockSpec(
                (None, *chosen[0].shape[1:]),
                lambda program: (run_of(program), 0, 0),
                memory_space=pltpu.SMEM,
            )
        ]
    kernel = attention_tpu_kernel.attend
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    stats, mixed = pl.pallas_call(
        functools.partial(
            kernel if chosen else functools.partial(kernel, None),
            chunks=num_chunks, window=window,
            precision=precision if q.dtype == jnp.float32 else None,
        ),
        grid=(num_chunks * runs,),
        in_specs=[
            *of_blocks,
            pl.BlockSpec(
                (None, None, lists, visits.shape[3]),
                lambda program: (chunk_of(program), run_of(program) if chosen else 0, 0, 0),
                memory_space=pltpu.SMEM,
            ),
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((None, padded_rows, 2), lambda program: (chunk_of(program), 0, 0)),
            by_both(padded_rows, head_dim),
            anywhere, anywhere, anywhere,
        ],
        out_specs=[by_both(2, padded_rows), by_both(padded_rows, head_dim)],
        out_shape=[
            jax.ShapeDtypeStruct((num_chunks, kv_heads, 2, padded_rows), jnp.float32),
            jax.ShapeDtypeStruct((num_chunks, kv_heads, padded_rows, head_dim), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((heads, padded_rows, head_dim), q.dtype),
            pltpu.VMEM((BUFFERS, lists, 2, head_dim), jnp.float32),
            pltpu.VMEM((BUFFERS, heads, tile_cells, head_dim), k_pages.dtype),
            pltpu.VMEM((BUFFERS, heads, tile_cells, head_dim), v_pages.dtype),
            pltpu.VMEM((2, padded_rows, LANES), jnp.int32),
            pltpu.VMEM((heads, padded_rows, LANES), jnp.float32),
            pltpu.VMEM((heads, padded_rows, LANES), jnp.float32),
            pltpu.SemaphoreType.DMA((BUFFERS, lists)),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="context_attention",
    )(
        *chosen, visits, items.reshape(-1), jnp.stack([cut.positions, cut.token_rows], axis=-1),
        cut.q, angles,
        k_pages.reshape(kv_heads, cells, head_dim), v_pages.reshape(kv_heads, cells, head_dim),
    )  # fmt: skip
    rows = cut.num_rows
    return Partial(
        peak=stats[:, :, 0, :rows], total=stats[:, :, 1, :rows], mixed=mixed[:, :, :rows]
    )


def _smem_bytes(lists: int, num_items: int, num_blocks: int) -> int:
    """Bytes of a program's tables: one of items, two of what changes from program to program."""
    return 4 * (NUM_COLUMNS * num_items + 2 * lists * (SPAN + 2 * num_items + num_blocks))


def _lists_in_smem(most: int, num_items: int, selection: Selection) -> int:
    """Heads whose lists fit; tables of all heads at once where they do."""
    num_blocks = selection.blocks.shape[1]
    fitting = [
        n
        for n in range(1, most + 1)
        if most % n == 0 and _smem_bytes(n, num_items, num_blocks) <= _SMEM_BYTES
    ]
    if not fitting:
        raise NotImplementedError(_too_many(num_items, num_blocks))
    return max(fitting)


def _too_many(num_items: int, num_blocks: int) -> str:
    return (
        f"tables of {num_items} items and {num_blocks} blocks a head: expected at most "
        f"{_SMEM_BYTES} bytes of SMEM, got {_smem_bytes(1, num_items, num_blocks)}; lower "
        "table_capacity or the selection's capacity"
    )
