"""The decoder without any cache: one dense pass, to hold everything else against."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxstate.models import decoder, layers
from jaxstate.models.config import ModelConfig
from jaxstate.models.params import Params
from jaxstate.models.products import PLAIN, Products


def logits(
    params: Params,
    config: ModelConfig,
    token_ids: jax.Array,
    *,
    products: Products = PLAIN,
) -> jax.Array:
    """Return the logits after every token of one sequence, by plain causal attention.

    Args:
      token_ids: [tokens] int32; scores take memory quadratic in their number.
      products: kernels for products.
    Returns:
      [tokens, vocab_size] f32.
    """
    positions = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    distance = positions[:, None] - positions

    def attend(layer_idx, q, k, v, state):
        layer = config.layers[layer_idx]
        frequencies = jnp.asarray(layer.rope.inverse_frequencies(config.head_dim))
        q = layers.rotate(q, positions, frequencies).astype(jnp.float32)
        k = layers.rotate(k, positions, frequencies).astype(jnp.float32)
        k, wide_v = (jnp.repeat(x, config.heads_per_kv_head, axis=1) for x in (k, v))
        scores = jnp.einsum("QND,KND->NQK", q, k, precision="highest") * config.head_dim**-0.5
        visible = (distance >= 0) & (distance < (layer.window or config.max_positions))
        shares = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
        wide_v = wide_v.astype(jnp.float32)
        mixed = jnp.einsum("NQK,KND->QND", shares, wide_v, precision="highest")
        return mixed.astype(v.dtype), state

    states = (None,) * config.num_layers
    hidden, _ = decoder.forward(params, config, token_ids, attend, states, products)
    return decoder.logits(params, config, hidden, products)
