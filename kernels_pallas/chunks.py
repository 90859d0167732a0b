"""Query tokens and work items as the Pallas kernels for attention take them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxstate.kernels_pallas import attention_xla
from jaxstate.kernels_pallas import work as work_columns
from jaxstate.kernels_pallas.rope import Angles
from jaxstate.kernels_pallas.work import WorkList, used_items


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A step's tokens, cut into chunks that a program attends at a time.

    Attributes:
      num_rows: query rows of a chunk and key/value head; what is behind them is padding.
      q: [chunks, num_kv_heads, rows, head_dim], divided by sqrt(head_dim).
      positions, token_rows: [chunks, rows] int32; padding belongs to no row.
    """

    num_rows: int
    q: jax.Array
    positions: jax.Array
    token_rows: jax.Array


def cut(
    q: jax.Array,
    positions: jax.Array,
    token_rows: jax.Array,
    *,
    kv_heads: int,
    chunk_tokens: int,
    padded_rows: Callable[[int], int],
) -> Chunks:
    """Cut tokens into chunks.

    Args:
      q: [tokens, num_heads, head_dim].
      positions, token_rows: [tokens] int32.
      padded_rows: rows to have for that many query rows.
    """
    scale = jnp.asarray(1 / math.sqrt(q.shape[2]), q.dtype)
    scaled = attention_xla.to_blocks(q * scale, kv_heads, chunk_tokens)
    chunks, _, num_rows, _ = scaled.shape
    padding = (0, padded_rows(num_rows) - num_rows)

    def by_row(x, value):
        x = jnp.repeat(x.reshape(chunks, chunk_tokens), num_rows // chunk_tokens, axis=1)
        return jnp.pad(x, ((0, 0), padding), constant_values=value)

    return Chunks(
        num_rows=num_rows,
        q=jnp.pad(scaled, ((0, 0), (0, 0), padding, (0, 0))),
        positions=by_row(positions, 0),
        token_rows=by_row(token_rows, work_columns.PADDING_ROW),
    )


def all_items(
    work: Sequence[WorkList], shifts: Sequence[Angles]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the items of all lists, and cosines and sines of their shifts, item by item."""
    return (
        jnp.concatenate([used_items(one) for one in work]),
        jnp.concatenate([angles.cos for angles in shifts]),
        jnp.concatenate([angles.sin for angles in shifts]),
    )


def largest_divisor(count: int, most: int) -> int:
    """Return the largest divisor of `count` that is at most `most`, 1 at least."""
    return max(n for n in range(1, max(most, 1) + 1) if count % n == 0)
