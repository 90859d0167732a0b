"""Attention on CPUs by our own compiled kernel, called from XLA: building it and calling it."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxstate.kernels_pallas import cpu_library
from jaxstate.kernels_pallas.rope import Angles
from jaxstate.kernels_pallas.work import WorkList, used_items

SOURCE = pathlib.Path(__file__).with_name("attention_cpu.cc")
TARGET = "jaxstate_attention_cpu"
HEAD_DIM_MULTIPLE = 16
MAX_HEAD_DIM = 256


def unsupported(head_dim: int, dtype) -> str | None:
    """Say why this kernel cannot run here, None if it can."""
    if reason := cpu_library.unsupported():
        return reason
    if dtype != jnp.float32:
        return f"it computes in float32, keys and values are {jnp.dtype(dtype).name}"
    if head_dim % HEAD_DIM_MULTIPLE or head_dim > MAX_HEAD_DIM:
        return f"head_dim must be a multiple of 16 up to 256, got {head_dim}"
    return None


def build(cache_dir: pathlib.Path) -> None:
    """Compile the kernel once per machine and source, and register it with JAX.

    Raises:
      RuntimeError: the compiler failed; carries its message.
    """
    cpu_library.build(SOURCE, "JaxstateAttention", TARGET, cache_dir)


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
) -> jax.Array:
    """Attend the step's tokens to each other and to the work list's cells.

    Arguments as in `attention_xla.tail_attention` and `context_attention`, all f32; stretches
    may be of any length, and all lists are read in one pass.

    Args:
      visible: from `attention_xla.tail_visible`.
    Returns:
      [tokens, num_heads, head_dim] f32; 0 where nothing is visible.
    """
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(q.shape, jnp.float32))
    items = jnp.concatenate([used_items(one) for one in work])
    cos = jnp.concatenate([angles.cos for angles in shifts])
    sin = jnp.concatenate([angles.sin for angles in shifts])
    count = jnp.full(1, items.shape[0], jnp.int32) if len(work) > 1 else work[0].count.reshape(1)
    return call(
        q, k, v, positions, token_rows, visible, k_pages, v_pages, items, count, cos, sin,
        block_tokens=np.int32(block_tokens), window=np.int32(window or 0),
    )  # fmt: skip
