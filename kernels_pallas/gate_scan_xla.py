"""The gate summary of a row of logits, in plain XLA."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class GateSummary:
    """What one pass over the vocabulary tells of a next-token distribution.

    Ties go to the lowest id, always.

    Attributes:
      top_ids: [rows, 2] int32, the two largest logits' ids.
      top_logits: [rows, 2] f32, their logits; the gap is their difference.
      lse: [rows] f32, natural log of the sum of exp(logit).
      entropy: [rows] f32, nats.
      allowed_ids: [rows, 2] int32, the two best within the row's allowed set.
      allowed_logits: [rows, 2] f32; -inf where the set has fewer members.

    Source: confidence gate of arXiv:2606.29565.
    """

    top_ids: jax.Array
    top_logits: jax.Array
    lse: jax.Array
    entropy: jax.Array
    allowed_ids: jax.Array
    allowed_logits: jax.Array


def gate_scan(logits: jax.Array, allowed_bits: jax.Array, allowed_idx: jax.Array) -> GateSummary:
    """Summarize logits.

    Args:
      logits: [rows, vocab] f32.
      allowed_bits: [sets, ceil(vocab / 32)] uint32; bit j of word w is token 32 * w + j.
      allowed_idx: [rows] int32, each row's set.
    """
    top_ids, top_logits = _top_two(logits)
    peak = top_logits[:, :1]
    weights = jnp.exp(logits - peak)
    total = weights.sum(axis=-1)
    mean = jnp.where(weights > 0, weights * (logits - peak), 0).sum(axis=-1) / total
    ids = jnp.arange(logits.shape[1], dtype=jnp.uint32)
    words = allowed_bits[allowed_idx][:, ids // 32]
    allowed = ((words >> (ids % 32)) & 1) == 1
    allowed_ids, allowed_logits = _top_two(jnp.where(allowed, logits, -jnp.inf))
    return GateSummary(
        top_ids=top_ids,
        top_logits=top_logits,
        lse=peak[:, 0] + jnp.log(total),
        entropy=jnp.log(total) - mean,
        allowed_ids=allowed_ids,
        allowed_logits=allowed_logits,
    )


def _top_two(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    first = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    rest = jnp.where(ids == first[:, None], -jnp.inf, logits)
    second = jnp.argmax(rest, axis=-1).astype(jnp.int32)
    values = [
        jnp.take_along_axis(row, best[:, None], axis=-1)
        for row, best in ((logits, first), (rest, second))
    ]
    return jnp.stack([first, second], axis=-1), jnp.concatenate(values, axis=-1)
