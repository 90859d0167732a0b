"""From a row of logits to a token id."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxstate.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn.

    Filters apply in the order bias, temperature, top-k, top-p, min-p. The random key of a token
    is fold_in(key(seed), its absolute index in the context), so a draw does not depend on what
    else the step computes.

    Attributes:
      temperature: 0 = greedy, ties to the lowest id.
      top_k: keep this many most likely tokens; 0 = all.
      top_p: keep the most likely tokens until their probability reaches this; 1 = all.
      min_p: drop tokens less likely than this times the most likely one; 0 = none.
      seed: of the random draws.
      logit_bias: token id to a number added to its logit.

    Source: top-p (arXiv:1904.09751), min-p (arXiv:2407.01082).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        """Check ranges."""
        for name, value in (("top_k", self.top_k), ("seed", self.seed)):
            if not isinstance(value, int | np.integer):
                raise InputError(f"{name}: expected an integer, got {value}")
        for name, ok, expected in (
            ("temperature", 0 <= self.temperature < float("inf"), "a number >= 0"),
            ("top_k", 0 <= self.top_k < 2**31, "an integer >= 0 (0 = all)"),
            ("top_p", 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("min_p", 0 <= self.min_p < 1, "a number in [0, 1)"),
            (
                "logit_bias",
                all(value < math.inf for value in self.logit_bias.values()),
                "numbers, -inf to ban a token",
            ),
            ("seed", 0 <= self.seed < 2**32, "an integer in [0, 2**32)"),
        ):
            if not ok:
                raise InputError(f"{name}: expected {expected}, got {getattr(self, name)}")

    @property
    def is_plain_greedy(self) -> bool:
        """The largest raw logit wins: the gate summary already holds the answer."""
        return self.temperature == 0 and not self.logit_bias


def draw(
    logits: jax.Array,
    bias: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    seed: jax.Array,
    token_index: jax.Array,
) -> jax.Array:
    """Draw one token id, [] int32, as `Sampling` describes.

    Args:
      logits, bias: [vocab] f32.
      temperature, top_p, min_p: [] f32.  top_k, token_index: [] int32.  seed: [] uint32.
    """
    logits = logits + bias
    order = jnp.argsort(-logits, stable=True)
    ranked = logits[order] / jnp.where(temperature > 0, temperature, 1)
    rank = jnp.arange(logits.shape[0], dtype=jnp.int32)
    kept = jnp.where(top_k > 0, rank < top_k, True)
    ranked = jnp.where(kept, ranked, -jnp.inf)
    probs = jax.nn.softmax(ranked)
    before = jnp.cumsum(probs) - probs
    kept &= (before < top_p) & (probs >= min_p * probs[0])
    kept |= rank == 0
    key = jax.random.fold_in(jax.random.key(seed), token_index)
    drawn = jax.random.categorical(key, jnp.where(kept, ranked, -jnp.inf))
    return order[jnp.where(temperature > 0, drawn, 0)].astype(jnp.int32)


def restrict(
    logits: jax.Array, allowed_bits: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Make tokens impossible that are not allowed.

    Args:
      logits: [vocab] f32.
      allowed_bits: [ceil(vocab / 32)] uint32; bit j of word w is token 32 * w + j. At least one.
    Returns:
      logits: [vocab] f32, -inf where not allowed.  ids, best: [2], the two largest of them, ties to
      the lowest id.  lse: [] f32.
    """
    ids = jnp.arange(logits.shape[0], dtype=jnp.uint32)
    allowed = ((allowed_bits[ids // 32] >> (ids % 32)) & 1) == 1
    logits = jnp.where(allowed, logits, -jnp.inf)
    best, top_ids = jax.lax.top_k(logits, 2)  # on CPUs in half the time of two argmax
    return logits, top_ids, best, jax.nn.logsumexp(logits)


def take_row(logits: jax.Array, row: jax.Array) -> jax.Array:
    """Return one row of logits [rows, vocab]: [vocab]."""
    return logits[row]


def take_logits(logits: jax.Array, rows: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Return the logits of (row, token id) pairs: [pairs] f32."""
    return logits[rows, token_ids]


def top_logits(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the `count` largest logits of [vocab] and their ids, largest first."""
    return jax.lax.top_k(logits, count)
