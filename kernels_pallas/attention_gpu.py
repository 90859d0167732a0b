"""Attention over paged context on GPUs: a Pallas kernel for Triton, and merging what it returns.

A program is (chunk of query tokens, KV head, share of the context). A block's tokens are cut into
chunks of at most 64 query rows; what a chunk sees of the work items is cut into tiles of cells, in
the items' order, and each share takes an equal run of the tiles, so that few rows at a long context
fill the chip. Where a chunk's tiles begin depends on nothing but its items: a row decodes to the
same bits alone and in a batch of the same step shape. Nothing is added atomically.

Offsets into the pool are safe: Pallas computes them in 64 bits for arrays of more than 2^32 bytes,
factors included, and a cell's number stays below 2^31.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxstate.kernels_pallas import attention_xla
from jaxstate.kernels_pallas import work as work_columns
from jaxstate.kernels_pallas.attention_xla import MASKED, Partial
from jaxstate.kernels_pallas.rope import Angles
from jaxstate.kernels_pallas.work import WorkList, used_items

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
# Query rows of a chunk: their sums stay in the registers of eight warps, no spills at head_dim 128.
_MAX_ROWS = 64
_MAX_SUMS = 8192  # query rows * head_dim
_MIN_ROWS = 16  # Triton's smallest product
_TILE_BYTES = 16384  # keys of a tile; three stages of keys and values are 96 KiB
_MAX_TILE_CELLS = 128
_PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
_FAR = 2**30  # behind every position


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
    most_tokens = max(most_rows * k.shape[1] // q.shape[1], 1)
    chunk_tokens = max(n for n in range(1, most_tokens + 1) if block_tokens % n == 0)
    partial = attention_xla.tail_attention(
        q, k, v, visible, block_tokens=chunk_tokens, precision=precision
    )
    shares = _context(
        q, positions, token_rows, k_pages, v_pages, work, shifts,
        chunk_tokens=chunk_tokens, block_tokens=block_tokens, window=window, precision=precision,
        interpret=interpret,
    )  # fmt: skip
    return attention_xla.normalize(_merge(partial, shares), chunk_tokens)


def _merge(partial: Partial, shares: Partial) -> Partial:
    """Merge with shares, whose arrays have one more axis in front."""
    peak = jnp.maximum(partial.peak, shares.peak.max(axis=0))
    kept, kept_shares = jnp.exp(partial.peak - peak), jnp.exp(shares.peak - peak)
    return Partial(
        peak=peak,
        total=partial.total * kept + (shares.total * kept_shares).sum(axis=0),
        mixed=partial.mixed * kept[..., None] + (shares.mixed * kept_shares[..., None]).sum(axis=0),
    )


def _context(
    q, positions, token_rows, k_pages, v_pages, work, shifts, *,
    chunk_tokens, block_tokens, window, precision, interpret,
) -> Partial:  # fmt: skip
    """Attend chunks of tokens to the cells: a Partial of [shares, chunks, kv_heads, rows, …]."""
    kv_heads, num_pages, page_size, head_dim = k_pages.shape
    cells = num_pages * page_size
    tile_cells = min(
        _TILE_BYTES // (head_dim * k_pages.dtype.itemsize),
        _MAX_TILE_CELLS,
        max(_MIN_ROWS, pl.next_power_of_2(cells)),
    )
    scaled = attention_xla.to_blocks(
        q * jnp.asarray(1 / math.sqrt(head_dim), q.dtype), kv_heads, chunk_tokens
    )
    chunks, _, num_rows, _ = scaled.shape
    padded_rows = max(_MIN_ROWS, pl.next_power_of_2(num_rows))
    shares = min(-(-_PROGRAMS // (chunks * kv_heads)), -(-cells // tile_cells))

    padding = (0, padded_rows - num_rows)
    # Blocks are read whole, padding too.
    scaled = jnp.pad(scaled, ((0, 0), (0, 0), padding, (0, 0)))

    def by_row(x, value):
        x = jnp.repeat(x.reshape(chunks, chunk_tokens), num_rows // chunk_tokens, axis=1)
        return jnp.pad(x, ((0, 0), padding), constant_values=value)

    positions = by_row(positions, 0)
    token_rows = by_row(token_rows, work_columns.PADDING_ROW)
    items = jnp.concatenate([used_items(one) for one in work])
    spans, visits = _plan(
        items, positions, token_rows,
        chunks_per_block=block_tokens // chunk_tokens, shares=shares, tile_cells=tile_cells,
        window=window,
    )  # fmt: skip
    # A turn of pairs (i, i + half) is x * cos + partner * sin: Triton cannot join two halves.
    left, right = jnp.split(scaled, 2, axis=-1)
    partner = jnp.concatenate([right, -left], axis=-1)
    cos = jnp.concatenate([angles.cos for angles in shifts])
    sin = jnp.concatenate([angles.sin for angles in shifts])

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

    def whole(*shape):
        return pl.BlockSpec(shape, lambda chunk, head, share: (0,) * len(shape))

    sums = jax.ShapeDtypeStruct((shares, chunks, kv_heads, padded_rows), jnp.float32)
    peak, total, mixed = pl.pallas_call(
        functools.partial(
            _kernel, tile_cells=tile_cells, window=window, precision=precision
        ),
        grid=(chunks, kv_heads, shares),
        in_specs=[
            pl.BlockSpec((None, None, 4), lambda chunk, head, share: (chunk, share, 0)),
            pl.BlockSpec((None, capacity, 3), lambda chunk, head, share: (chunk, 0, 0)),
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
        spans, visits, items,
        jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([sin, sin], axis=-1),
        positions, token_rows, scaled, partner,
        k_pages.reshape(kv_heads, cells, head_dim), v_pages.reshape(kv_heads, cells, head_dim),
    )  # fmt: skip
    return Partial(
        peak=peak[..., :num_rows], total=total[..., :num_rows], mixed=mixed[..., :num_rows, :]
    )


def _plan(
    items: jax.Array,
    positions: jax.Array,
    token_rows: jax.Array,
    *,
    chunks_per_block: int,
    shares: int,
    tile_cells: int,
    window: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Cut what each chunk sees into tiles and these into shares; the same for all layers of a kind.

    Args:
      items: [items, 8] int32, empty ones where a list is not full.
      positions, token_rows: [chunks, rows] int32.
    Returns:
      spans: [chunks, shares, 4] int32, the share's items (begin, end) and tiles (begin, end).
      visits: [chunks, items, 3] int32, each item's first cell that the chunk may see, counted from
        the item's start, and its tiles among the chunk's (begin, end).
    """
    real = token_rows < work_columns.PADDING_ROW
    lowest_row = jnp.where(real, token_rows, work_columns.PADDING_ROW).min(axis=1, keepdims=True)
    highest_row = jnp.where(real, token_rows, -1).max(axis=1, keepdims=True)
    newest = jnp.where(real, positions, -_FAR).max(axis=1, keepdims=True)
    oldest = jnp.where(real, positions, _FAR).min(axis=1, keepdims=True) - (window or _FAR) + 1
    block = jnp.arange(positions.shape[0], dtype=jnp.int32)[:, None] // chunks_per_block
    base = items[:, work_columns.BASE]
    first = jnp.maximum(items[:, work_columns.FIRST], oldest - base)
    fill = jnp.minimum(items[:, work_columns.FILL], newest - base + 1)
    seen = (
        (items[:, work_columns.BLOCK] == block)
        & (items[:, work_columns.ROW_BEGIN] <= highest_row)
        & (items[:, work_columns.ROW_END] > lowest_row)
    )
    tiles = jnp.where(seen, -(-jnp.maximum(fill - first, 0) // tile_cells), 0)
    ends = jnp.cumsum(tiles, axis=1, dtype=jnp.int32)
    begins = ends - tiles
    share = jnp.arange(shares, dtype=jnp.int32)
    tiles_per_share = -(-ends[:, -1:] // shares)
    share_begin = tiles_per_share * share
    share_end = jnp.minimum(share_begin + tiles_per_share, ends[:, -1:])
    # Items that end before the share begins, items that begin before the share ends.
    item_begin = (ends[:, None] <= share_begin[..., None]).sum(axis=-1, dtype=jnp.int32)
    item_end = (begins[:, None] < share_end[..., None]).sum(axis=-1, dtype=jnp.int32)
    spans = jnp.stack([item_begin, item_end, share_begin, share_end], axis=-1)
    return spans, jnp.stack([first, begins, ends], axis=-1)


def _kernel(
    spans_ref, visits_ref, items_ref, cos_ref, sin_ref, positions_ref, token_rows_ref,
    q_ref, partner_ref, k_ref, v_ref, peak_ref, total_ref, mixed_ref, *,
    tile_cells, window, precision,
):  # fmt: skip
    """Attend one chunk to one share of its tiles; shapes as in `_context`, heads taken out."""
    dtype = q_ref.dtype
    positions, token_rows = positions_ref[...], token_rows_ref[...]  # [rows]
    item_begin, item_end, tile_begin, tile_end = (spans_ref[column] for column in range(4))
    lanes = jnp.arange(tile_cells, dtype=jnp.int32)

    def visit_item(item_idx, sums):
        start, base, fill, row_begin, row_end = (
            items_ref[item_idx, column]
            for column in (
                work_columns.START,
                work_columns.BASE,
                work_columns.FILL,
                work_columns.ROW_BEGIN,
                work_columns.ROW_END,
            )
        )
        first, begin, end = (visits_ref[item_idx, column] for column in range(3))
        turned = (
            q_ref[...].astype(jnp.float32) * cos_ref[item_idx, :]
            + partner_ref[...].astype(jnp.float32) * sin_ref[item_idx, :]
        ).astype(dtype)
        of_row = (token_rows >= row_begin) & (token_rows < row_end)

        def visit_tile(tile_idx, sums):
            peak_before, total, mixed = sums
            tile_first = first + (tile_idx - begin) * tile_cells
            cell = tile_first + lanes
            used = cell < fill

            def load(ref):
                # Cells behind the last may hold anything, or lie outside the pool: not read.
                tile = ref.at[pl.ds(start + tile_first, tile_cells), :]
                return plgpu.load(tile, mask=used[:, None], other=0).astype(dtype)

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

    rows, head_dim = q_ref.shape
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
