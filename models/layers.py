"""The few operations all families share."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxstate.models.config import Activation, DtypePolicy, ModelConfig
from jaxstate.models.params import Params
from jaxstate.models.products import Products
from jaxstate.models.quantized import QuantizedMatrix


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, dtypes: DtypePolicy) -> jax.Array:
    """Normalize by the root mean square in accum_dtype; x is [..., hidden].

    Source: arXiv:1910.07467.
    """
    wide = x.astype(dtypes.accum_dtype)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse * scale.astype(dtypes.accum_dtype)).astype(dtypes.compute_dtype)


def project(
    x: jax.Array,
    weight: jax.Array | QuantizedMatrix,
    num_inputs: int,
    dtypes: DtypePolicy,
    products: Products,
) -> jax.Array:
    """Contract x's last `num_inputs` dimensions with the weight's first ones.

    One two-dimensional product whatever the head layout: reshapes of row-major arrays are free,
    and XLA's CPU backend is fastest on a plain matrix product.
    """
    lead = x.shape[: x.ndim - num_inputs]
    outputs = weight.shape[num_inputs:]
    rows = x.reshape(-1, math.prod(x.shape[x.ndim - num_inputs :]))
    if not isinstance(weight, QuantizedMatrix):
        weight = weight.reshape(rows.shape[1], math.prod(outputs))
    result = products.multiply(rows, weight, dtypes, outputs_first=False)
    return result.astype(dtypes.compute_dtype).reshape(*lead, *outputs)


def add_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Add a vector over x's last dimensions, where there is one."""
    return x if bias is None else x + bias.astype(x.dtype)


def activate(gate: jax.Array, activation: Activation) -> jax.Array:
    """Apply the gate's activation elementwise.

    Source: SwiGLU and GEGLU, arXiv:2002.05202; the tanh form of GELU, arXiv:1606.08415.
    """
    return jax.nn.silu(gate) if activation == "silu" else jax.nn.gelu(gate, approximate=True)


def mlp(x: jax.Array, layer: Params, config: ModelConfig, products: Products) -> jax.Array:
    """Apply the gated MLP of a layer: [tokens, hidden_size] -> the same."""
    dtypes = config.dtypes
    gate = add_bias(project(x, layer["w_gate"], 1, dtypes, products), layer.get("b_gate"))
    up = add_bias(project(x, layer["w_up"], 1, dtypes, products), layer.get("b_up"))
    inner = activate(gate, config.activation) * up
    return add_bias(project(inner, layer["w_down"], 1, dtypes, products), layer.get("b_down"))


def rotate(x: jax.Array, positions: jax.Array, inverse_frequencies: jax.Array) -> jax.Array:
    """Apply rotary embedding in f32.

    Args:
      x: [tokens, heads, head_dim]; element i is paired with element i + head_dim / 2.
      positions: [tokens] int32; may be negative (relocated cells turn backwards).
      inverse_frequencies: [head_dim / 2] f32, radians per position.

    Source: RoFormer (arXiv:2104.09864).
    """
    angles = positions.astype(jnp.float32)[:, None, None] * inverse_frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)
