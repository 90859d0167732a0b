"""Choosing the blocks that matter to a step's queries, by bounds of their keys; no training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxstate.kernels_pallas import attention_xla
from jaxstate.kernels_pallas import work as work_columns
from jaxstate.kernels_pallas.key_bounds import KeyBounds
from jaxstate.kernels_pallas.rope import Angles, turn
from jaxstate.kernels_pallas.selection import BLOCK_CELLS, Selection
from jaxstate.kernels_pallas.work import WorkList

_BEHIND_ALL = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSelector:
    """Keep, per layer and key/value head, the blocks whose keys may score highest.

    Attributes:
      kept: share of the blocks seen that are read, in (0, 1]; blocks that are always kept count,
        and are read even if they alone are more.
      sink_tokens: blocks with one of a context's first positions are always kept.
      recent_tokens: so are those with a position this near before the query token.
      dense_layers: the first layers, which read all blocks: their attention is spread out.

    Layers with a sliding window read all of it.

    Source: page bounds of Quest (arXiv:2406.10774).
    """

    kept: float
    sink_tokens: int = 128
    recent_tokens: int = 256
    dense_layers: int = 2

    def __post_init__(self):
        """Check ranges."""
        if not 0 < self.kept <= 1:
            raise ValueError(f"kept: expected a share in (0, 1], got {self.kept}")
        for name in ("sink_tokens", "recent_tokens", "dense_layers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected at least 0, got {getattr(self, name)}")


def select(
    selector: BlockSelector,
    q: jax.Array,
    bounds: KeyBounds,
    positions: jax.Array,
    token_rows: jax.Array,
    selects: jax.Array,
    work: Sequence[WorkList],
    shifts: Sequence[Angles],
) -> Selection:
    """Choose blocks for one layer and step.

    A block's score is the highest that any of its keys could have with any query token and head
    that reads it. The step's rows share one budget: rows that must not influence each other go in
    steps of their own.

    Args:
      q: [tokens, num_heads, head_dim], rotated at `positions`.
      positions, token_rows: [tokens] int32.
      selects: [tokens] bool; of tokens that do not, every block they see is kept.
      work, shifts: as in attention.
    """
    kv_heads, num_blocks, head_dim = bounds.low.shape
    real = token_rows < work_columns.PADDING_ROW
    q = attention_xla.to_blocks(q.astype(jnp.float32), kv_heads, q.shape[0])[0]
    low, high = (jnp.asarray(bound, jnp.float32) for bound in (bounds.low, bounds.high))
    scores = jnp.full((kv_heads, num_blocks), -jnp.inf)
    for one, angles in zip(work, shifts, strict=True):
        count = min(-(-one.cells_per_item // BLOCK_CELLS) + 1, num_blocks)

        def visit(item_idx, scores, one=one, angles=angles, count=count):
            item = one.items[item_idx]
            start = item[work_columns.START]
            begin = jnp.minimum(start // BLOCK_CELLS, num_blocks - count)
            cell = (begin + jnp.arange(count, dtype=jnp.int32)) * BLOCK_CELLS - start
            first = jnp.maximum(cell, item[work_columns.FIRST])
            last = jnp.minimum(cell + BLOCK_CELLS, item[work_columns.FILL]) - 1
            oldest, newest = item[work_columns.BASE] + first, item[work_columns.BASE] + last
            sees = (
                (first <= last)
                & (oldest <= positions[:, None])
                & (token_rows >= item[work_columns.ROW_BEGIN])[:, None]
                & (token_rows < item[work_columns.ROW_END])[:, None]
                & real[:, None]
            )  # [tokens, count]
            distance = jnp.maximum(positions[:, None] - newest, 0)  # of the nearest cell seen
            near = distance < selector.recent_tokens
            always = sees & ((oldest < selector.sink_tokens) | near | ~selects[:, None])

            def of_blocks(bound):
                return jax.lax.dynamic_slice_in_dim(bound, begin, count, axis=1)

            turned = turn(q, angles[item_idx].reversed)  # [kv_heads, tokens * shared, head_dim]
            best = _product(jnp.maximum(turned, 0), of_blocks(high)) + _product(
                jnp.minimum(turned, 0), of_blocks(low)
            )
            best = best.reshape(kv_heads, sees.shape[0], -1, count).max(axis=2)
            best = jnp.where(always, jnp.inf, jnp.where(sees, best, -jnp.inf)).max(axis=1)
            return jax.lax.dynamic_update_slice_in_dim(
                scores, jnp.maximum(of_blocks(scores), best), begin, axis=1
            )

        scores = jax.lax.fori_loop(jnp.int32(0), one.count, visit, scores)
    seen = (scores > -jnp.inf).sum(axis=1, dtype=jnp.int32)
    always = (scores == jnp.inf).sum(axis=1, dtype=jnp.int32)
    budget = jnp.ceil(seen.astype(jnp.float32) * selector.kept).astype(jnp.int32)
    count = jnp.maximum(budget, always)
    falling = jnp.argsort(-scores, axis=1, stable=True).astype(jnp.int32)
    index = jnp.arange(num_blocks, dtype=jnp.int32)
    blocks = jnp.sort(jnp.where(index < count[:, None], falling, _BEHIND_ALL), axis=1)
    return Selection(blocks=blocks, count=count)


def _product(q: jax.Array, bound: jax.Array) -> jax.Array:
    """q [kv_heads, rows, D] on bounds [kv_heads, blocks, D]; bounds of unused blocks may be NaN."""
    return jnp.einsum("GQD,GKD->GQK", q, bound, precision=jax.lax.Precision.HIGHEST)
