"""The decoder without any cache: one dense pass, to hold everything else against."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxstate.models import decoder, layers
from jaxstate.models.config import ModelConfig
from jaxstate.models.params import Params


def last_logits(params: Params, config: ModelConfig, token_ids: np.ndarray) -> np.ndarray:
    """Return the logits after the last of some tokens by plain causal attention, [vocab] f32.

    Every operation is dispatched by itself, so nothing is compiled as one program.

    Args:
      token_ids: [tokens] int32; scores take memory quadratic in their number.
    """
    positions = jnp.arange(len(token_ids), dtype=jnp.int32)
    precision = config.dtypes.precision

    def attend(layer_idx, q, k, v, state):
        layer = config.layers[layer_idx]
        frequencies = jnp.asarray(layer.rope.inverse_frequencies(config.head_dim))
        q = layers.rotate(q, positions, frequencies)
        k = layers.rotate(k, positions, frequencies)
        k, v = (jnp.repeat(x, config.heads_per_kv_head, axis=1) for x in (k, v))
        scores = jnp.einsum(
            "QND,KND->NQK", q, k, precision=precision, preferred_element_type=jnp.float32
        )
        distance = positions[:, None] - positions
        visible = (distance >= 0) & (distance < (layer.window or config.max_positions))
        scores = jnp.where(visible, scores * config.head_dim**-0.5, -jnp.inf)
        shares = jax.nn.softmax(scores).astype(v.dtype)
        mixed = jnp.einsum(
            "NQK,KND->QND", shares, v, precision=precision, preferred_element_type=jnp.float32
        )
        return mixed.astype(v.dtype), state

    states = (None,) * config.num_layers
    hidden, _ = decoder.forward(params, config, jnp.asarray(token_ids), attend, states)
    return np.asarray(decoder.logits(params, config, hidden[-1:])[0], np.float32)
