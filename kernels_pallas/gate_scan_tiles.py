"""The gate summary in pieces: one tile of the vocabulary at a time, merged without the logits.

`summarize` runs inside the kernels, so it keeps to operations that Mosaic and Triton both have;
`merge` is plain XLA over a few numbers per tile.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxstate.kernels_pallas import gate_scan_xla
from jaxstate.kernels_pallas.gate_scan_xla import GateSummary

NUM_VALUES = 6
"""Numbers of a tile and row: two best logits, two best allowed ones, and, relative to the best,
the sum of exp(logit) and of exp(logit) * logit."""
NUM_IDS = 4
"""Ids of a tile and row: of the two best logits and of the two best allowed ones."""

_PAST_ALL = 2**31 - 1


def summarize(
    logits: jax.Array, ids: jax.Array, allowed: jax.Array, axis: int
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Summarize one tile, logits capped and -inf past the vocabulary's end.

    Args:
      logits: f32 with the tile's tokens along `axis` and rows along the other.
      ids: int32 token ids, like logits.
      allowed: bool, like logits.
    Returns:
      NUM_VALUES f32 and NUM_IDS int32 arrays, like logits with 1 along `axis`.
    """
    best, best_id, second, second_id = _top_two(logits, ids, axis)
    shifted = logits - gate_scan_xla.finite_peak(best)
    weights = jnp.exp(shifted)
    total = jnp.sum(weights, axis=axis, keepdims=True)
    moments = jnp.where(weights > 0, weights * shifted, 0.0)
    moment = jnp.sum(moments, axis=axis, keepdims=True)
    among = _top_two(jnp.where(allowed, logits, -jnp.inf), ids, axis)
    return (
        [best, second, among[0], among[2], total, moment],
        [best_id, second_id, among[1], among[3]],
    )


def _top_two(logits, ids, axis):
    """Best and second, each with its id, ties to the lowest id."""
    best, best_id = _top(logits, ids, axis)
    return best, best_id, *_top(jnp.where(ids == best_id, -jnp.inf, logits), ids, axis)


def _top(logits, ids, axis):
    # argmax promises no order among equals on every backend; the least id among the best does.
    best = jnp.max(logits, axis=axis, keepdims=True)
    ids_of_best = jnp.where(logits == best, ids, _PAST_ALL)
    return best, jnp.min(ids_of_best, axis=axis, keepdims=True)


def merge(values: jax.Array, ids: jax.Array) -> GateSummary:
    """Merge the summaries of all tiles.

    Args:
      values: [tiles, NUM_VALUES, rows] f32, tiles in the order of their ids.
      ids: [tiles, NUM_IDS, rows] int32.
    """
    top_ids, top_logits = _merge_top_two(values[:, :2], ids[:, :2])
    allowed_ids, allowed_logits = _merge_top_two(values[:, 2:4], ids[:, 2:4])
    peak = gate_scan_xla.finite_peak(top_logits[:, 0])  # [rows]
    shifts = gate_scan_xla.finite_peak(values[:, 0]) - peak  # [tiles, rows]
    # A tile of nothing possible has a total of 0, but a peak of 0 may be far above the others'.
    shares = jnp.where(values[:, 0] == -jnp.inf, 0.0, jnp.exp(shifts))
    total = (shares * values[:, 4]).sum(axis=0)
    moment = jnp.where(shares > 0, shares * (values[:, 5] + shifts * values[:, 4]), 0).sum(axis=0)
    return GateSummary(
        top_ids=top_ids,
        top_logits=top_logits,
        lse=peak + jnp.log(total),
        entropy=jnp.where(total == 0, 0, jnp.log(total) - moment / total),
        allowed_ids=allowed_ids,
        allowed_logits=allowed_logits,
    )


def _merge_top_two(values, ids):
    """Two best of [tiles, 2, rows]; equal values stand in the order of their ids."""
    rows = values.shape[2]
    columns, best = gate_scan_xla.top_two(values.transpose(2, 0, 1).reshape(rows, -1))
    best_ids = jnp.take_along_axis(ids.transpose(2, 0, 1).reshape(rows, -1), columns, axis=-1)
    return jnp.where(best > -jnp.inf, best_ids, 0), best
