"""How things are timed on a device, and what the device can do at best."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np

ROUNDS = 5
LEAST_ROUND_S = 0.005  # of back-to-back dispatches: far above a clock's or a launch's jitter
_MOST_DISPATCHES = 200
_LONG_S = 0.3  # calls that take longer are repeated twice only


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds per call, one sample a round."""

    samples_ms: tuple[float, ...]
    dispatches: int

    @property
    def ms(self) -> float:
        """Median over the rounds."""
        return common.median(self.samples_ms)

    def shared_by(self, layers: int) -> Timing:
        """Return the time of one of equal layers."""
        return Timing(
            samples_ms=tuple(sample / layers for sample in self.samples_ms),
            dispatches=self.dispatches,
        )


def measure(call: Callable[[], Any], *, dispatches: int | None = None) -> Timing:
    """Time a compiled call, warm: rounds of back-to-back dispatches, each ended by a wait.

    Args:
      call: dispatches and returns arrays to wait for; rebinds what it donates.
      dispatches: per round; None = as many as last LEAST_ROUND_S.
    """
    jax.block_until_ready(call())
    began = time.perf_counter()
    jax.block_until_ready(call())
    once_s = time.perf_counter() - began
    count = dispatches or min(max(math.ceil(LEAST_ROUND_S / once_s), 1), _MOST_DISPATCHES)
    samples = []
    for _ in range(2 if once_s > _LONG_S else ROUNDS):
        began = time.perf_counter()
        out = None
        for _ in range(count):
            out = call()
        jax.block_until_ready(out)
        samples.append((time.perf_counter() - began) * 1e3 / count)
    return Timing(samples_ms=tuple(samples), dispatches=count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Floors:
    """What the device can do at best, measured in the same run.

    Attributes:
      copy_bytes_per_s: of a large array, bytes read plus bytes written.
      flops_per_s: of a large square product in bf16.
    """

    copy_bytes_per_s: float
    flops_per_s: float

    def ms(self, num_bytes: float, flops: float = 0.0) -> float:
        """Return the least time for moving these bytes while computing this."""
        return 1e3 * max(num_bytes / self.copy_bytes_per_s, flops / self.flops_per_s)


def measure_floors(copy_bytes: int, square: int) -> tuple[Floors, dict[str, Any]]:
    """Measure copying and multiplying.

    Args:
      copy_bytes: of the array that is copied; far more than caches hold.
      square: side of the matrices.
    Returns:
      floors.  detail: what they were made of, and what a dispatch costs.
    """
    large = noise(np.uint32(1), np.float32(1), shape=(copy_bytes // 4096, 2048), dtype="bfloat16")
    copy = measure(functools.partial(jax.jit(jnp.negative), large))
    sides = [
        noise(np.uint32(seed), np.float32(1), shape=(square, square), dtype="bfloat16")
        for seed in (2, 3)
    ]
    product = measure(functools.partial(jax.jit(jnp.matmul), *sides))
    dispatch = measure(functools.partial(jax.jit(jnp.negative), sides[0][0, :8]))
    floors = Floors(
        copy_bytes_per_s=2 * large.nbytes / (copy.ms / 1e3),
        flops_per_s=2 * square**3 / (product.ms / 1e3),
    )
    detail = {
        "copied_bytes": large.nbytes, "copy_ms": copy.ms, "copy_samples_ms": copy.samples_ms,
        "square": square, "product_ms": product.ms, "product_samples_ms": product.samples_ms,
        "dispatch_ms": dispatch.ms,
    }  # fmt: skip
    return floors, detail


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def noise(seed: jax.Array, scale: jax.Array, *, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Draw uniform numbers of mean 0 and standard deviation `scale`, hashed from their indices.

    One fused pass without temporaries, so that an array may fill most of the device's memory.

    Args:
      seed: [] uint32.
      scale: [] f32.
    Source: the finalizer of MurmurHash3.
    """
    mixed = jnp.full(shape, seed * np.uint32(0x9E3779B1), jnp.uint32)
    for axis in range(len(shape)):
        mixed = (mixed ^ jax.lax.broadcasted_iota(jnp.uint32, shape, axis)) * np.uint32(0x85EBCA6B)
        mixed ^= mixed >> np.uint32(15)
    mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    # 24 bits of signed integer: exact in f32.
    centred = (mixed >> np.uint32(8)).astype(jnp.int32) - np.int32(2**23)
    spread = np.float32(math.sqrt(3) / 2**23) * scale
    return (centred.astype(jnp.float32) * spread).astype(dtype)


def free_bytes() -> int | None:
    """Return how much of the device's memory can still be allocated, None if it does not tell."""
    stats = jax.devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def require_bytes(needed: float, what: str) -> None:
    """Raise MemoryError where something certainly does not fit beside what is there."""
    free = free_bytes()
    if free is not None and needed > free:
        raise MemoryError(
            f"{what} needs {needed / 1e9:.1f} GB of device memory, {free / 1e9:.1f} GB are free"
        )
