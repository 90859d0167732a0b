"""Attention over paged context on GPUs: a Pallas kernel for Triton, and merging what it returns.

A program is (chunk of query tokens, KV head, share of the context). A block's tokens are cut into
chunks of at most 64 query rows; what a chunk sees is cut into tiles (see tiles.py), and each share
takes an equal run of them, so that few rows at a long context fill the chip. Nothing is added
atomically: a row decodes to the same bits alone and in a batch of the same step shape.

Offsets into the pool are safe: Pallas computes them in 64 bits for arrays of more than 2^32 bytes,
factors included, and a cell's number stays below 2^31.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxstate.kernels_pallas import attention_xla, chunks, tiles
from jaxstate.kernels_pallas import work as work_columns
from jaxstate.kernels_pallas.attention_xla import MASKED, Partial
from jaxstate.kernels_pallas.rope import Angles
from jaxstate.kernels_pallas.selection import BLOCK_CELLS, Selection
from jaxstate.kernels_pallas.work import WorkList

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
# Query rows of a chunk: their sums stay in the registers of eight warps, no spills at head_dim 128.
_MAX_ROWS = 64
_MAX_SUMS = 8192  # query rows * head_dim
_MIN_ROWS = 16  # Triton's smallest product
_TILE_BYTES = 16384  # keys of a tile; three stages of keys and values are 96 KiB
_MAX_TILE_CELLS = 128
_PROGRAMS = 264  # two for each multiprocessor of an H100 or H200


def unsupported(head_dim: int, dtype, *, interpret: bool = False) -> str | None:
    """Say why this kernel cannot run here, None if it can.

    Args:
      dtype: of keys and values in the pool.
      interpret: whether the interpreter is to run it, which needs no GPU.
    """
    if head_dim & (head_dim - 1) or not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        return (
            f"Triton's tiles are powers of two, head_dim must be one from {MIN_HEAD_DIM} to "
            f"{MAX_HEAD_DIM}, got {head_dim}"
        )
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"keys and values must be float32 or bfloat16, got {jnp.dtype(dtype).name}"
    if interpret:
        return None
    if jax.default_backend() != "gpu":
        return f"it runs on the GPU backend, this is {jax.default_backend()}"
    capability = str(getattr(jax.devices()[0], "compute_capability", "none"))
    if not capability[:1].isdigit() or float(capability) < 8:
        return f"it needs CUDA's compute capability 8.0 or more, the device has {capability}"
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
    interpret: bool = False,
) -> jax.Array:
    """Attend the step's tokens to each other (plain XLA) and to the work list's cells (the kernel).

    Arguments as in `attention_xla.tail_attention` and `context_attention`; stretches may be of any
    length, and all lists are read in one pass.

    Args:
      interpret: run the kernel in Pallas' interpreter, on any device.
    Returns:
      [tokens, num_heads, head_dim] f32; 0 where nothing is visible.

    Source: online softmax as in FlashAttention-2 (arXiv:2307.08691), the split over the context as
    in Flash-Decoding, the division by tiles as in FlashInfer (arXiv:2501.01005).
    """
    most_rows = min(_MAX_ROWS, _MAX_SUMS // q.shape[2])
    chunk_tokens = chunks.largest_divisor(block_tokens, most_rows * k.shape[1] // q.shape[1])
    partial = attention_xla.tail_attention(
        q, k, v, visible, block_tokens=chunk_tokens, precision=precision
    )
    shares = _context(
        q, positions, token_rows, k_pages, v_pages, work, shifts,
        chunk_tokens=chunk_tokens, block_tokens=block_tokens, window=window, precision=precision,
        selection=selection, interpret=interpret,
    )  # fmt: skip
    return attention_xla.normalize(attention_xla.merge(partial, shares), chunk_tokens)


def _context(
    q, positions, token_rows, k_pages, v_pages, work, shifts, *,
    chunk_tokens, block_tokens, window, precision, selection, interpret,
) -> Partial:  # fmt: skip
    """Attend chunks of tokens to the cells: a Partial of [shares, chunks, kv_heads, rows, …]."""
    kv_heads, num_pages, page_size, head_dim = k_pages.shape
    cells = num_pages * page_size
    tile_cells = min(
        _TILE_BYTES // (head_dim * k_pages.dtype.itemsize),
        _MAX_TILE_CELLS,
        max(_MIN_ROWS, pl.next_power_of_2(cells)),
    )
    cut = chunks.cut(
        q, positions, token_rows, kv_heads=kv_heads, chunk_tokens=chunk_tokens,
        # Blocks are read whole, padding too.
        padded_rows=lambda rows: max(_MIN_ROWS, pl.next_power_of_2(rows)),
    )  # fmt: skip
    num_chunks, _, padded_rows, _ = cut.q.shape
    shares = min(-(-_PROGRAMS // (num_chunks * kv_heads)), -(-cells // tile_cells))
    items, cos, sin = chunks.all_items(work, shifts)
    plan = tiles.plan(
        items, cut.positions, cut.token_rows,
        chunks_per_block=block_tokens // chunk_tokens, shares=shares, tile_cells=tile_cells,
        window=window, selection=selection,
    )  # fmt: skip
    lists = plan.spans.shape[1]
    # A turn of pairs (i, i + half) is x * cos + partner * sin: Triton cannot join two halves.
    left, right = jnp.split(cut.q, 2, axis=-1)
    partner = jnp.concatenate([right, -left], axis=-1)

    capacity = items.shape[0]
    of_rows = pl.BlockSpec((None, padded_rows), lambda chunk, head, share: (chunk, 0))
    of_q = pl.BlockSpec(
        (None, None, padded_rows, head_dim), lambda chunk, head, share: (chunk, head, 0, 0)
    )
    of_cells = pl.BlockSpec((None, cells, head_dim), lambda chunk, head, share: (head, 0, 0))
    of_sums = pl.BlockSpec(
        (None, None, None, padded_rows), lambda chunk, head, share: (share, chunk, head, 0)
    )
    of_mixed = pl.BlockSpec(
        (None, None, None, padded_rows, head_dim),
        lambda chunk, head, share: (share, chunk, head, 0, 0),
    )

    chosen, of_lists = [], []
    if selection is not None:
        chosen = [selection.blocks]
        of_list = pl.BlockSpec(
            (None, selection.blocks.shape[1]), lambda chunk, head, share: (head, 0)
        )
        of_lists = [of_list]

    def whole(*shape):
        return pl.BlockSpec(shape, lambda chunk, head, share: (0,) * len(shape))

    sums = jax.ShapeDtypeStruct((shares, num_chunks, kv_heads, padded_rows), jnp.float32)
    peak, total, mixed = pl.pallas_call(
        functools.partial(
            _kernel if chosen else functools.partial(_kernel, None),
            tile_cells=tile_cells, window=window, precision=precision,
        ),
        grid=(num_chunks, kv_heads, shares),
        in_specs=[
            *of_lists,
            pl.BlockSpec(
                (None, None, None, 4), lambda chunk, head, share: (chunk, head % lists, share, 0)
            ),
            pl.BlockSpec(
                (None, None, capacity, 4), lambda chunk, head, share: (chunk, head % lists, 0, 0)
            ),
            whole(capacity, work_columns.NUM_COLUMNS),
            whole(capacity, head_dim),
            whole(capacity, head_dim),
            of_rows, of_rows, of_q, of_q, of_cells, of_cells,
        ],
        out_specs=[of_sums, of_sums, of_mixed],
        out_shape=[sums, sums, jax.ShapeDtypeStruct((*sums.shape, head_dim), jnp.float32)],
        compiler_params=plgpu.CompilerParams(
            num_warps=4 if padded_rows == _MIN_ROWS else 8, num_stages=3
        ),
        interpret=interpret,
        name="context_attention",
    )(
        *chosen, plan.spans, plan.visits, items,
        jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([sin, sin], axis=-1),
        cut.positions, cut.token_rows, cut.q, partner,
        k_pages.reshape(kv_heads, cells, head_dim), v_pages.reshape(kv_heads, cells, head_dim),
    )  # fmt: skip
    rows = cut.num_rows
    return Partial(peak=peak[..., :rows], total=total[..., :rows], mixed=mixed[..., :rows, :])


def _kernel(
    blocks_ref, spans_ref, visits_ref, items_ref, cos_ref, sin_ref, positions_ref, token_rows_ref,
    q_ref, partner_ref, k_ref, v_ref, peak_ref, total_ref, mixed_ref, *,
    tile_cells, window, precision,
):  # fmt: skip
    """Attend one chunk to one share of its tiles; shapes as in `_context`, heads taken out."""
    dtype = q_ref.dtype
    positions, token_rows = positions_ref[...], token_rows_ref[...]  # [rows]
    item_begin, item_end, tile_begin, tile_end = (spans_ref[column] for column in range(4))
    lanes = jnp.arange(tile_cells, dtype=jnp.int32)
    head_dim = q_ref.shape[1]

    def visit_item(item_idx, sums):
        start, first, fill, base, row_begin, row_end = (
            items_ref[item_idx, column]
            for column in (
                work_columns.START,
                work_columns.FIRST,
                work_columns.FILL,
                work_columns.BASE,
                work_columns.ROW_BEGIN,
                work_columns.ROW_END,
            )
        )
        first_place, end_place, begin, end = (visits_ref[item_idx, column] for column in range(4))
        turned = (
            q_ref[...].astype(jnp.float32) * cos_ref[item_idx, :]
            + partner_ref[...].astype(jnp.float32) * sin_ref[item_idx, :]
        ).astype(dtype)
        of_row = (token_rows >= row_begin) & (token_rows < row_end)

        def visit_tile(tile_idx, sums):
            peak_before, total, mixed = sums
            place = first_place + (tile_idx - begin) * (tile_cells // BLOCK_CELLS)
            if blocks_ref is None:
                where = (pl.ds(place * BLOCK_CELLS, tile_cells), pl.ds(0, head_dim))
                cell = place * BLOCK_CELLS + lanes - start
                used = (cell >= first) & (cell < fill)
            else:
                places = place + lanes // BLOCK_CELLS
                listed = places < end_place
                blocks = plgpu.load(blocks_ref.at[places], mask=listed, other=0)
                cell = blocks * BLOCK_CELLS + lanes % BLOCK_CELLS
                where = jnp.broadcast_arrays(
                    cell[:, None], jnp.arange(head_dim, dtype=jnp.int32)[None]
                )
                cell -= start
                used = listed & (cell >= first) & (cell < fill)

            def load(ref):
                # Cells behind the last may hold anything, or lie outside the pool: not read.
                return plgpu.load(ref.at[*where], mask=used[:, None], other=0).astype(dtype)

            scores = _product(turned, load(k_ref), 1, precision)  # [rows, cells]
            distance = positions[:, None] - (base + cell)
            visible = used & of_row[:, None] & (distance >= 0)
            if window is not None:
                visible &= distance < window
            scores = jnp.where(visible, scores, MASKED)
            peak = jnp.maximum(peak_before, scores.max(axis=1))
            kept = jnp.exp(peak_before - peak)
            weights = jnp.where(visible, jnp.exp(scores - peak[:, None]), 0)
            total = total * kept + weights.sum(axis=1)
            mixed = mixed * kept[:, None] + _product(
                weights.astype(dtype), load(v_ref), 0, precision
            )
            return peak, total, mixed

        return jax.lax.fori_loop(
            jnp.maximum(tile_begin, begin), jnp.minimum(tile_end, end), visit_tile, sums
        )

    rows = q_ref.shape[0]
    zeros = jnp.zeros(rows, jnp.float32)
    sums = (zeros + MASKED, zeros, jnp.zeros((rows, head_dim), jnp.float32))
    peak_ref[...], total_ref[...], mixed_ref[...] = jax.lax.fori_loop(
        item_begin, item_end, visit_item, sums
    )


def _product(x: jax.Array, y: jax.Array, contracted: int, precision) -> jax.Array:
    """x [rows, n] on y, contracted with the given axis of y, summed in f32."""
    return jax.lax.dot_general(
        x, y, (((1,), (contracted,)), ((), ())), precision=precision,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
