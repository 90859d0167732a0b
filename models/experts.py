"""A mixture of experts: every token through the experts its router chose, none dropped.

Source: Mixtral (arXiv:2401.04088), Qwen3 (arXiv:2505.09388); dropless grouped products as in
MegaBlocks (arXiv:2211.15841).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxstate.models import quantized
from jaxstate.models.config import ModelConfig
from jaxstate.models.layers import activate, project
from jaxstate.models.params import Params
from jaxstate.models.products import Products
from jaxstate.models.quantized import QuantizedMatrix


def mix(x: jax.Array, layer: Params, config: ModelConfig, products: Products) -> jax.Array:
    """Send tokens through their experts: [tokens, hidden_size] -> the same.

    A token's result depends on no other token: products are grouped by expert, not padded to a
    capacity. Equal probabilities go to the expert of the lower index.
    """
    experts, dtypes = config.experts, config.dtypes
    assert experts is not None  # ModelConfig has checked it
    tokens = x.shape[0]
    scores = project(x, layer["router"], 1, dtypes, products).astype(dtypes.accum_dtype)
    shares, chosen = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), experts.per_token)
    if experts.normalize:
        shares = shares / shares.sum(axis=-1, keepdims=True)
    # Pairs of (token, expert), brought together by expert and back.
    pairs = chosen.reshape(-1)
    order = jnp.argsort(pairs, stable=True)
    sizes = jnp.bincount(pairs, length=experts.count).astype(jnp.int32)

    def grouped(rows, weight):
        if isinstance(weight, QuantizedMatrix):
            weight = quantized.experts(weight)
        return jax.lax.ragged_dot(
            rows,
            weight.astype(dtypes.compute_dtype),
            sizes,
            precision=dtypes.precision,
            preferred_element_type=dtypes.accum_dtype,
        ).astype(dtypes.compute_dtype)

    rows = x[order // experts.per_token]
    inner = activate(grouped(rows, layer["experts_gate"]), config.activation)
    mixed = grouped(inner * grouped(rows, layer["experts_up"]), layer["experts_down"])
    mixed = mixed[jnp.argsort(order)].reshape(tokens, experts.per_token, -1)
    weighted = mixed.astype(dtypes.accum_dtype) * shares[..., None]
    return weighted.sum(axis=1).astype(dtypes.compute_dtype)
