"""Attention over paged context and over a step's own tokens, in plain XLA."""

from __future__ import annotations

import math

import flax.struct
import jax
import jax.numpy as jnp

from jaxstate.kernels_pallas import work as work_columns
from jaxstate.kernels_pallas.rope import Angles, turn
from jaxstate.kernels_pallas.selection import BLOCK_CELLS, Selection, num_blocks
from jaxstate.kernels_pallas.work import WorkList

_FAR = 2**30  # behind every position
MASKED = -1e30  # finite: exp(MASKED - MASKED) stays a number where nothing is visible yet


@flax.struct.dataclass
class Partial:
    """Softmax attention over part of what a token sees, not yet normalized.

    Attributes:
      peak: [blocks, num_kv_heads, rows] f32, largest score so far.
      total: like peak, sum of exp(score - peak).
      mixed: [blocks, num_kv_heads, rows, head_dim] f32, sum of exp(score - peak) * v.
    """

    peak: jax.Array
    total: jax.Array
    mixed: jax.Array


def to_blocks(x: jax.Array, num_kv_heads: int, block_tokens: int) -> jax.Array:
    """[tokens, num_heads, D] -> [blocks, num_kv_heads, block_tokens * heads_per_kv_head, D]."""
    tokens, heads, head_dim = x.shape
    shared = heads // num_kv_heads
    x = x.reshape(tokens // block_tokens, block_tokens, num_kv_heads, shared, head_dim)
    return x.swapaxes(1, 2).reshape(-1, num_kv_heads, block_tokens * shared, head_dim)


def from_blocks(x: jax.Array, block_tokens: int) -> jax.Array:
    """Undo to_blocks: [blocks, num_kv_heads, rows, D] -> [tokens, num_heads, D]."""
    blocks, kv_heads, rows, head_dim = x.shape
    shared = rows // block_tokens
    x = x.reshape(blocks, kv_heads, block_tokens, shared, head_dim).swapaxes(1, 2)
    return x.reshape(blocks * block_tokens, kv_heads * shared, head_dim)


def tail_visible(positions: jax.Array, tail_mask: jax.Array, window: int | None) -> jax.Array:
    """AND the tail mask with the position rule: [tokens, tokens] bool, row = query token."""
    distance = positions[:, None] - positions[None, :]
    visible = tail_mask & (distance >= 0)
    return visible if window is None else visible & (distance < window)


def tail_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array,
    *,
    block_tokens: int,
    precision: jax.lax.Precision,
) -> Partial:
    """Attend the step's tokens to each other.

    Args:
      q: [tokens, num_heads, head_dim], rotated at the tokens' positions.
      k, v: [tokens, num_kv_heads, head_dim], k rotated likewise.
      visible: [tokens, tokens] bool from `tail_visible`.
      block_tokens: query tokens per block of the result.
    """
    kv_heads, head_dim = k.shape[1:]
    scaled = to_blocks(q * jnp.asarray(1 / math.sqrt(head_dim), q.dtype), kv_heads, block_tokens)
    shared = scaled.shape[2] // block_tokens
    visible = visible.reshape(-1, 1, block_tokens, 1, q.shape[0])
    scores = _scores(scaled, k.swapaxes(0, 1), precision)
    scores = jnp.where(
        visible, scores.reshape(*scores.shape[:2], block_tokens, shared, -1), MASKED
    ).reshape(scores.shape)
    peak = scores.max(axis=-1)
    weights = _weights(scores, peak)
    mixed = _mix(weights, v.swapaxes(0, 1), precision)
    return Partial(peak=peak, total=weights.sum(axis=-1), mixed=mixed)


def context_attention(
    partial: Partial,
    q: jax.Array,
    positions: jax.Array,
    token_rows: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    work: WorkList,
    shifts: Angles,
    *,
    block_tokens: int,
    window: int | None,
    precision: jax.lax.Precision,
    selection: Selection | None = None,
) -> Partial:
    """Attend the step's tokens to the work list's cells and merge with `partial`.

    A token sees cell i of an item when first <= i < fill, base + i is at most its position (and
    within the window), and its row is one of the item's rows. Each item is one contiguous copy
    out of the pool and two matrix products over a whole block of query tokens.

    Args:
      partial: what is already attended, from `tail_attention`.
      q: [tokens, num_heads, head_dim], rotated at `positions`.
      positions, token_rows: [tokens] int32.
      k_pages, v_pages: [num_kv_heads, num_pages, page_size, head_dim].
      work: the cells to read.
      shifts: angles of each item's shift, [capacity, head_dim / 2].
      block_tokens: query tokens per block.
      window: as in LayerConfig, in positions.
      selection: see Selection; hides cells here, which saves no time.

    Source: online softmax as in FlashAttention-2 (arXiv:2307.08691).
    """
    kv_heads, num_pages, page_size, head_dim = k_pages.shape
    k_cells = k_pages.reshape(kv_heads, num_pages * page_size, head_dim)
    v_cells = v_pages.reshape(kv_heads, num_pages * page_size, head_dim)
    scaled = to_blocks(q * jnp.asarray(1 / math.sqrt(head_dim), q.dtype), kv_heads, block_tokens)
    shared = scaled.shape[2] // block_tokens
    positions = positions.reshape(-1, block_tokens)
    token_rows = token_rows.reshape(-1, block_tokens)
    cell_idx = jnp.arange(work.cells_per_item, dtype=jnp.int32)
    single = scaled.shape[0] == 1
    selected = None if selection is None else selection.mask(num_blocks(num_pages * page_size))

    def visit(item_idx, partial: Partial) -> Partial:
        item = work.items[item_idx]
        start, block = item[work_columns.START], item[work_columns.BLOCK]

        def cells_of(cells):
            size = (kv_heads, work.cells_per_item, head_dim)
            return jax.lax.dynamic_slice(cells, (jnp.int32(0), start, jnp.int32(0)), size)

        def of_block(x):
            return x if single else jax.lax.dynamic_slice_in_dim(x, block, 1, axis=0)

        q_block = turn(of_block(scaled), shifts[item_idx].reversed)
        scores = _scores(q_block, cells_of(k_cells), precision)
        distance = of_block(positions)[0][:, None] - (item[work_columns.BASE] + cell_idx)
        rows = of_block(token_rows)[0][:, None]
        visible = (
            (distance >= 0)
            & (rows >= item[work_columns.ROW_BEGIN])
            & (rows < item[work_columns.ROW_END])
        )
        if window is not None:
            visible &= distance < window
        used = (cell_idx >= item[work_columns.FIRST]) & (cell_idx < item[work_columns.FILL])
        used = used[None]  # [1 or kv_heads, cells]
        if selected is not None:
            used &= selected[:, (start + cell_idx) // BLOCK_CELLS]
        visible = visible & used[:, None]  # [1 or kv_heads, block_tokens, cells]
        scores = jnp.where(
            visible[:, :, None], scores.reshape(1, kv_heads, block_tokens, shared, -1), MASKED
        ).reshape(scores.shape)
        before = jax.tree.map(of_block, partial)
        peak = jnp.maximum(before.peak, scores.max(axis=-1))
        weights = _weights(scores, peak)
        kept = jnp.exp(before.peak - peak)
        # Weights of unused cells are 0, but 0 times what lies there may be no number.
        values = jnp.where(used[..., None], cells_of(v_cells), 0)
        after = Partial(
            peak=peak,
            total=before.total * kept + weights.sum(axis=-1),
            mixed=before.mixed * kept[..., None] + _mix(weights, values, precision),
        )
        if single:
            return after
        return jax.tree.map(
            lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, block, axis=0),
            partial,
            after,
        )

    def visit_in_window(item_idx, partial: Partial) -> Partial:
        """Pass over items that no token's window reaches: most of a long context."""
        assert window is not None
        item = work.items[item_idx]
        begin = jnp.where(token_rows < work_columns.PADDING_ROW, positions, _FAR).min() - window
        last = item[work_columns.BASE] + item[work_columns.FILL] - 1
        return jax.lax.cond(
            last > begin, lambda partial: visit(item_idx, partial), lambda partial: partial, partial
        )

    body = visit if window is None else visit_in_window
    return jax.lax.fori_loop(jnp.int32(0), work.count, body, partial)


def merge(partial: Partial, others: Partial) -> Partial:
    """Merge attention over parts of what tokens see; `others` has one more axis in front."""
    peak = jnp.maximum(partial.peak, others.peak.max(axis=0))
    kept, kept_others = jnp.exp(partial.peak - peak), jnp.exp(others.peak - peak)
    return Partial(
        peak=peak,
        total=partial.total * kept + (others.total * kept_others).sum(axis=0),
        mixed=partial.mixed * kept[..., None] + (others.mixed * kept_others[..., None]).sum(axis=0),
    )


def normalize(partial: Partial, block_tokens: int) -> jax.Array:
    """Divide by the total: [tokens, num_heads, head_dim] f32; 0 where nothing was visible."""
    total = partial.total[..., None]
    return from_blocks(
        jnp.where(total > 0, partial.mixed / jnp.where(total > 0, total, 1), 0), block_tokens
    )


def _scores(q: jax.Array, k: jax.Array, precision) -> jax.Array:
    """q [blocks, kv_heads, rows, D] on k [kv_heads, cells, D]: [blocks, kv_heads, rows, cells]."""
    equation = "BGQD,GKD->BGQK"
    if q.shape[0] == 1:
        return jnp.einsum(
            "GQD,GKD->GQK", q[0], k, precision=precision, preferred_element_type=jnp.float32
        )[None]
    return jnp.einsum(equation, q, k, precision=precision, preferred_element_type=jnp.float32)


def _weights(scores: jax.Array, peak: jax.Array) -> jax.Array:
    """exp(score - peak), 0 where masked, also where everything so far is masked."""
    floor = jnp.where(peak > MASKED / 2, peak, 0)
    return jnp.exp(scores - floor[..., None])


def _mix(weights: jax.Array, v: jax.Array, precision) -> jax.Array:
    """weights [blocks, kv_heads, rows, cells] on v [kv_heads, cells, D]."""
    weights = weights.astype(v.dtype)
    if weights.shape[0] == 1:
        return jnp.einsum(
            "GQK,GKD->GQD", weights[0], v, precision=precision, preferred_element_type=jnp.float32
        )[None]
    return jnp.einsum(
        "BGQK,GKD->BGQD", weights, v, precision=precision, preferred_element_type=jnp.float32
    )
