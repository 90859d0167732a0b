"""What this machine can do at best, measured; and the time below which no program can answer."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import time

import jax
import jax.numpy as jnp

from jaxstate.models.config import ModelConfig
from jaxstate.models.params import Params, abstract_params, num_params

_MATRIX_WIDTH = 2048
_READ_ROWS = 32_768  # of _MATRIX_WIDTH f32: 268 MB, far more than caches hold
_REPEATS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Measured limits of the default device.

    Attributes:
      name: kind of device, for a CPU the number of its cores.
      read_bytes_per_s: memory bandwidth of a matrix-vector product, which is what decoding does.
      flops_per_s: rate of a large square f32 matrix product.
    """

    name: str
    read_bytes_per_s: float
    flops_per_s: float

    def floor_s(self, model: ModelConfig, context_len: int, num_tokens: int) -> float:
        """Return the least time to forward `num_tokens` behind `context_len` cells, in seconds.

        The larger of two times: to read weights and cells once, and to do the arithmetic.
        """
        read = weights_read_bytes(model) + context_len * model.bytes_per_cell
        return max(
            read / self.read_bytes_per_s,
            forward_flops(model, context_len, num_tokens) / self.flops_per_s,
        )


def measure() -> Machine:
    """Measure the default device; takes about a second."""
    key = jax.random.key(0)
    square = jax.random.normal(key, (_MATRIX_WIDTH, _MATRIX_WIDTH), jnp.float32)
    tall = jnp.ones((_READ_ROWS, _MATRIX_WIDTH), jnp.float32)
    return Machine(
        name=_device_name(),
        read_bytes_per_s=tall.nbytes / _best_s(square[:1], tall),
        flops_per_s=2 * _MATRIX_WIDTH**3 / _best_s(square, square),
    )


def free_bytes() -> int | None:
    """Return the memory that the first device has left; None where it cannot be told."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    try:
        lines = pathlib.Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = dict(line.split(":") for line in lines)
    return int(sizes["MemAvailable"].split()[0]) * 1024


def weights_bytes(model: ModelConfig) -> int:
    """Return the size of all weights, quantized ones as they are kept."""
    return _bytes_of(abstract_params(model))


def weights_read_bytes(model: ModelConfig) -> int:
    """Return the bytes of weights that a step reads: all, but few rows of an input embedding."""
    weights = abstract_params(model)
    return _bytes_of(weights) - (0 if model.tied_embeddings else _bytes_of(weights["embed"]))


def _bytes_of(weights: Params) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))


def forward_flops(model: ModelConfig, context_len: int, num_tokens: int) -> int:
    """Return the operations to forward tokens and score the vocabulary after the last one."""
    matrices = 1 if model.tied_embeddings else 2
    block_params = num_params(model) - matrices * model.vocab_size * model.hidden_size
    block_params -= _idle_expert_params(model)
    seen = num_tokens * context_len + num_tokens * (num_tokens + 1) // 2
    attention = 4 * seen * model.num_heads * model.head_dim * model.num_layers
    return 2 * block_params * num_tokens + attention + 2 * model.vocab_size * model.hidden_size


def _idle_expert_params(model: ModelConfig) -> int:
    """Count the weights of experts that a token does not go through."""
    if model.experts is None:
        return 0
    routed = sum(layer.routed for layer in model.layers)
    idle = model.experts.count - model.experts.per_token
    return routed * idle * 3 * model.hidden_size * model.experts.width


def _device_name() -> str:
    device = jax.devices()[0]
    if device.platform == "cpu":
        return f"a CPU of {os.cpu_count()} cores"
    return device.device_kind


def _best_s(left: jax.Array, right: jax.Array) -> float:
    """Time the product of [rows, width] and [columns, width] matrices, best of a few, in s."""
    seconds = []
    for _ in range(1 + _REPEATS):  # the first one compiles
        began = time.perf_counter()
        jax.block_until_ready(jnp.einsum("ik,jk->ij", left, right))
        seconds.append(time.perf_counter() - began)
    return min(seconds)
