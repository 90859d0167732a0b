"""Host memory while weights are loaded: no page and no copy stays longer than it is needed."""

from __future__ import annotations

import mmap
from typing import Any

import jax
import numpy as np

_ALIGNMENT = 64  # from which JAX on CPU takes over a buffer instead of copying it
_BLOCK = 1 << 18  # numbers that are looked at at once


def release(content: np.memmap) -> None:
    """Give back the memory of all pages of a mapped file that were touched.

    They would count as this process's memory until the file is unmapped. Views stay valid: what is
    touched again is read again. Systems without madvise reclaim such pages by themselves.
    """
    base = content.base
    if isinstance(base, mmap.mmap) and hasattr(base, "madvise"):
        base.madvise(mmap.MADV_DONTNEED)


def place(
    values: np.ndarray, dtype: Any, *, name: str, sharding: jax.sharding.Sharding | None = None
) -> jax.Array:
    """Put weights on their devices: cast, made contiguous, checked and never held twice.

    Args:
      values: any shape, dtype and strides; copied.
      name: what to call them in messages.
      sharding: which devices; the default one if None.
    Raises:
      ValueError: they are not finite.
    """
    dtype = np.dtype(dtype)
    num_bytes = values.size * dtype.itemsize
    buffer = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    begin = -buffer.ctypes.data % _ALIGNMENT
    out = buffer[begin : begin + num_bytes].view(dtype).reshape(values.shape)
    out[...] = values
    flat = out.reshape(-1)
    for first in range(0, flat.size, _BLOCK):  # flags of all at once would take memory, too
        if not np.isfinite(flat[first : first + _BLOCK]).all():
            raise ValueError(
                f"{name}: expected finite numbers, got NaN or infinity; the weight file is "
                "damaged, fetch it again"
            )
    return jax.device_put(out, sharding)
