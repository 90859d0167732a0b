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


def gate_scan(
    logits: jax.Array,
    allowed_bits: jax.Array,
    allowed_idx: jax.Array,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> GateSummary:
    """Summarize logits.

    A logit of -inf is impossible: it counts for nothing, and where one of the two best is -inf its
    id is 0. A row of nothing else has lse -inf and entropy 0.

    Args:
      logits: [rows, vocab] f32 or bf16.
      allowed_bits: [sets, ceil(vocab / 32)] uint32; bit j of word w is token 32 * w + j.
      allowed_idx: [rows] int32, each row's set.
      scale: multiplies logits, > 0.
      softcap: c turns scaled logits x into c * tanh(x / c), > 0; None = as they are.
    """
    logits = cap(logits.astype(jnp.float32), scale, softcap)
    top_ids, top_logits = top_two(logits)
    peak = finite_peak(top_logits[:, :1])
    weights = jnp.exp(logits - peak)
    total = weights.sum(axis=-1)
    mean = jnp.where(weights > 0, weights * (logits - peak), 0).sum(axis=-1) / total
    ids = jnp.arange(logits.shape[1], dtype=jnp.uint32)
    words = allowed_bits[allowed_idx][:, ids // 32]
    allowed = ((words >> (ids % 32)) & 1) == 1
    allowed_ids, allowed_logits = top_two(jnp.where(allowed, logits, -jnp.inf))
    return GateSummary(
        top_ids=top_ids,
        top_logits=top_logits,
        lse=peak[:, 0] + jnp.log(total),
        entropy=jnp.where(total == 0, 0, jnp.log(total) - mean),
        allowed_ids=allowed_ids,
        allowed_logits=allowed_logits,
    )


def gate_scan_hidden(
    hidden: jax.Array,
    matrix: jax.Array,
    allowed_bits: jax.Array,
    allowed_idx: jax.Array,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> GateSummary:
    """Summarize the logits of final hidden states; the rest as in `gate_scan`.

    Args:
      hidden: [rows, hidden_size] f32 or bf16, after the final norm.
      matrix: [vocab, hidden_size], the output matrix; multiplied in the dtype of `hidden`,
        accumulated in f32.
    """
    logits = jnp.einsum(
        "RE,VE->RV",
        hidden,
        matrix.astype(hidden.dtype),
        precision=precision_of(hidden.dtype),
        preferred_element_type=jnp.float32,
    )
    return gate_scan(logits, allowed_bits, allowed_idx, scale=scale, softcap=softcap)


def precision_of(dtype) -> jax.lax.Precision:
    """Return how products are taken: f32 without any shortcut, bf16 as it is."""
    wide = dtype == jnp.float32
    return jax.lax.Precision.HIGHEST if wide else jax.lax.Precision.DEFAULT


def cap(logits: jax.Array, scale: float, softcap: float | None) -> jax.Array:
    """Scale f32 logits, then press them into (-softcap, softcap); -inf stays what it is."""
    if scale != 1.0:
        logits = logits * scale
    if softcap is None:
        return logits
    return jnp.where(logits == -jnp.inf, logits, softcap * jnp.tanh(logits / softcap))


def finite_peak(peak: jax.Array) -> jax.Array:
    """Return what to subtract before exp(): the largest logit, 0 where all are -inf."""
    return jnp.where(peak == -jnp.inf, 0.0, peak)


def top_two(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (columns, values), each [rows, 2], of the two largest; ties to the lowest column."""
    first = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    rest = jnp.where(ids == first[:, None], -jnp.inf, logits)
    second = jnp.argmax(rest, axis=-1).astype(jnp.int32)
    values = [
        jnp.take_along_axis(row, best[:, None], axis=-1)
        for row, best in ((logits, first), (rest, second))
    ]
    return jnp.stack([first, second], axis=-1), jnp.concatenate(values, axis=-1)
