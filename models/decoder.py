"""The shared decoder: cache-blind, a pure function of (params, inputs, attention)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jaxstate.models import experts, quantized
from jaxstate.models.config import ModelConfig
from jaxstate.models.layers import add_bias, mlp, project, rms_norm
from jaxstate.models.params import Params
from jaxstate.models.products import PLAIN, Products
from jaxstate.models.quantized import QuantizedMatrix

Attend = Callable[[int, jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""attend(layer_idx, q, k, v, state) -> (out, state).

q [tokens, num_heads, head_dim], k and v [tokens, num_kv_heads, head_dim], none of them rotated:
where a key stands is the business of whoever keeps it. Scores are divided by sqrt(head_dim). out
is like q.
"""


def forward(
    params: Params,
    config: ModelConfig,
    token_ids: jax.Array,
    attend: Attend,
    layer_states,
    products: Products = PLAIN,
) -> tuple[jax.Array, tuple]:
    """Run the decoder over a flat list of tokens.

    Args:
      token_ids: [tokens] int32.
      attend: mixes tokens; the only part that knows of positions, caches and masks.
      layer_states: one pytree per layer, handed to `attend` and returned as it left them.
      products: kernels for products; plain XLA unless said otherwise.
    Returns:
      hidden: [tokens, hidden_size], after the final norm.  layer_states: tuple, one per layer.
    """
    chex.assert_rank(token_ids, 1)
    chex.assert_type(token_ids, jnp.int32)
    embed = params["embed"]
    if isinstance(embed, QuantizedMatrix):
        x = quantized.look_up(embed, token_ids)
    else:
        x = embed[token_ids]
    x = x.astype(config.dtypes.compute_dtype)
    if config.embed_scale != 1.0:
        x = x * jnp.asarray(config.embed_scale, x.dtype)
    new_states = []
    for layer_idx, (layer, state) in enumerate(zip(params["layers"], layer_states, strict=True)):
        with jax.named_scope(f"layer_{layer_idx}"):
            x, state = _block(layer, config, layer_idx, x, attend, state, products)
        new_states.append(state)
    hidden = rms_norm(x, params["final_norm"], config.rms_norm_eps, config.dtypes)
    return hidden, tuple(new_states)


def _block(
    layer: Params,
    config: ModelConfig,
    layer_idx: int,
    x: jax.Array,
    attend: Attend,
    state,
    products: Products,
):
    """One block; x is [tokens, hidden_size]."""
    dtypes, eps = config.dtypes, config.rms_norm_eps
    normed = rms_norm(x, layer["attn_norm"], eps, dtypes)
    q = add_bias(project(normed, layer["wq"], 1, dtypes, products), layer.get("bq"))
    k = add_bias(project(normed, layer["wk"], 1, dtypes, products), layer.get("bk"))
    v = add_bias(project(normed, layer["wv"], 1, dtypes, products), layer.get("bv"))
    if config.qk_norm:
        q = rms_norm(q, layer["q_norm"], eps, dtypes)
        k = rms_norm(k, layer["k_norm"], eps, dtypes)
    if config.query_scale != 1.0:
        q = q * jnp.asarray(config.query_scale, q.dtype)
    factors = config.layers[layer_idx].rope.query_factors(config.head_dim)
    if factors is not None:
        q = q * jnp.asarray(factors, q.dtype)
    with jax.named_scope("attention"):
        mixed, state = attend(layer_idx, q, k, v, state)
    mixed = add_bias(project(mixed, layer["wo"], 2, dtypes, products), layer.get("bo"))
    if config.post_norms:
        mixed = rms_norm(mixed, layer["post_attn_norm"], eps, dtypes)
    x = x + mixed
    normed = rms_norm(x, layer["mlp_norm"], eps, dtypes)
    with jax.named_scope("mlp"):
        if config.layers[layer_idx].routed:
            mixed = experts.mix(normed, layer, config, products)
        else:
            mixed = mlp(normed, layer, config, products)
    if config.post_norms:
        mixed = rms_norm(mixed, layer["post_mlp_norm"], eps, dtypes)
    return x + mixed, state


def output_matrix(params: Params, config: ModelConfig) -> jax.Array | QuantizedMatrix:
    """Return the output matrix, [vocab, hidden_size]."""
    return params["embed"] if config.tied_embeddings else params["lm_head"]


def logits(
    params: Params,
    config: ModelConfig,
    hidden: jax.Array,
    products: Products = PLAIN,
) -> jax.Array:
    """Multiply final hidden states [rows, hidden_size] by the output matrix: [rows, vocab] f32."""
    matrix = output_matrix(params, config)
    return products.multiply(hidden, matrix, config.dtypes, outputs_first=True)
