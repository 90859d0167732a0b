"""The shared decoder: cache-blind, a pure function of (params, inputs, attention)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jaxstate.models.config import ModelConfig
from jaxstate.models.layers import project, rms_norm
from jaxstate.models.params import Params

Attend = Callable[[int, jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""attend(layer_idx, q, k, v, state) -> (out, state).

q [tokens, num_heads, head_dim], k and v [tokens, num_kv_heads, head_dim], none of them rotated:
where a key stands is the business of whoever keeps it. out is like q.
"""


def forward(
    params: Params, config: ModelConfig, token_ids: jax.Array, attend: Attend, layer_states
) -> tuple[jax.Array, tuple]:
    """Run the decoder over a flat list of tokens.

    Args:
      token_ids: [tokens] int32.
      attend: mixes tokens; the only part that knows of positions, caches and masks.
      layer_states: one pytree per layer, handed to `attend` and returned as it left them.
    Returns:
      hidden: [tokens, hidden_size], after the final norm.  layer_states: tuple, one per layer.
    """
    chex.assert_rank(token_ids, 1)
    chex.assert_type(token_ids, jnp.int32)
    x = params["embed"][token_ids].astype(config.dtypes.compute_dtype)
    new_states = []
    for layer_idx, (layer, state) in enumerate(zip(params["layers"], layer_states, strict=True)):
        with jax.named_scope(f"layer_{layer_idx}"):
            x, state = _block(layer, config, layer_idx, x, attend, state)
        new_states.append(state)
    hidden = rms_norm(x, params["final_norm"], config.rms_norm_eps, config.dtypes)
    return hidden, tuple(new_states)


def _block(layer: Params, config: ModelConfig, layer_idx: int, x, attend: Attend, state):
    """One pre-norm block; x is [tokens, hidden_size]."""
    dtypes = config.dtypes
    normed = rms_norm(x, layer["attn_norm"], config.rms_norm_eps, dtypes)
    q = project(normed, layer["wq"], 1, dtypes)
    k = project(normed, layer["wk"], 1, dtypes)
    v = project(normed, layer["wv"], 1, dtypes)
    with jax.named_scope("attention"):
        mixed, state = attend(layer_idx, q, k, v, state)
    x = x + project(mixed, layer["wo"], 2, dtypes)
    normed = rms_norm(x, layer["mlp_norm"], config.rms_norm_eps, dtypes)
    gate = project(normed, layer["w_gate"], 1, dtypes)
    up = project(normed, layer["w_up"], 1, dtypes)
    return x + project(jax.nn.silu(gate) * up, layer["w_down"], 1, dtypes), state


def logits(params: Params, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Multiply final hidden states [rows, hidden_size] by the output matrix: [rows, vocab] f32."""
    matrix = params["embed"] if config.tied_embeddings else params["lm_head"]
    dtypes = config.dtypes
    return jnp.einsum(
        "RE,VE->RV",
        hidden,
        matrix.astype(dtypes.compute_dtype),
        precision=dtypes.precision,
        preferred_element_type=dtypes.accum_dtype,
    )
