"""What a family file fills in, and the parts that most families share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import numpy as np

from jaxstate.models.config import DtypePolicy, ModelConfig, RopeConfig
from jaxstate.models.fields import Fields
from jaxstate.models.params import ParamSpec
from jaxstate.models.weights import WeightLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How to read the models of one architecture.

    Attributes:
      name: `general.architecture` in GGUF, and ModelConfig.family.
      hf_architectures: names in `architectures` of config.json.
      config_from_hf: (fields of config.json, dtypes) -> ModelConfig.
      config_from_gguf: (fields of the metadata, names of the tensors, dtypes) -> ModelConfig.
      hf: names and layout of the tensors in safetensors files.
      gguf: the same in GGUF files.
    """

    name: str
    hf_architectures: tuple[str, ...]
    config_from_hf: Callable[[Fields, DtypePolicy], ModelConfig]
    config_from_gguf: Callable[[Fields, Collection[str], DtypePolicy], ModelConfig]
    hf: WeightLayout
    gguf: WeightLayout


HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "attn_norm": "model.layers.{layer}.input_layernorm.weight",
    "wq": "model.layers.{layer}.self_attn.q_proj.weight",
    "wk": "model.layers.{layer}.self_attn.k_proj.weight",
    "wv": "model.layers.{layer}.self_attn.v_proj.weight",
    "wo": "model.layers.{layer}.self_attn.o_proj.weight",
    "mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "w_gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "w_up": "model.layers.{layer}.mlp.up_proj.weight",
    "w_down": "model.layers.{layer}.mlp.down_proj.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}

GGUF_NAMES = {
    "embed": "token_embd.weight",
    "attn_norm": "blk.{layer}.attn_norm.weight",
    "wq": "blk.{layer}.attn_q.weight",
    "wk": "blk.{layer}.attn_k.weight",
    "wv": "blk.{layer}.attn_v.weight",
    "wo": "blk.{layer}.attn_output.weight",
    "mlp_norm": "blk.{layer}.ffn_norm.weight",
    "w_gate": "blk.{layer}.ffn_gate.weight",
    "w_up": "blk.{layer}.ffn_up.weight",
    "w_down": "blk.{layer}.ffn_down.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
}


def half_split_rows(stored: np.ndarray, spec: ParamSpec) -> np.ndarray:
    """Reorder rows of q or k from interleaved rotary pairs (2i, 2i + 1) to (i, i + head_dim / 2).

    Args:
      stored: [heads * head_dim, hidden_size].
      spec: of the parameter, whose shape is (hidden_size, heads, head_dim).
    """
    _, heads, head_dim = spec.shape
    pairs = stored.reshape(heads, head_dim // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(stored.shape)


def rope_from_hf(fields: Fields, default_theta: float) -> RopeConfig:
    """Read rotary settings, both as `rope_theta` + `rope_scaling` and as `rope_parameters`.

    Raises:
      ValueError: a scaling other than none and linear, or rotation of a part of the head.
    """
    newer = fields.group("rope_parameters")
    scaling = newer if newer.values else fields.group("rope_scaling")
    fields.require("partial_rotary_factor", 1)
    scaling.require("partial_rotary_factor", 1)
    kind_key = "rope_type" if "rope_type" in scaling.values else "type"
    scaling.require(kind_key, "default", "linear")
    theta = scaling.number("rope_theta", fields.number("rope_theta", default_theta))
    kind = scaling.text(kind_key, None if "factor" in scaling.values else "default")
    if kind == "linear":
        return RopeConfig(theta=theta, linear_factor=scaling.number("factor"))
    return RopeConfig(theta=theta)


def rope_from_gguf(fields: Fields, architecture: str, default_theta: float) -> RopeConfig:
    """Read rotary settings of GGUF metadata; a factor without a type means linear scaling.

    Raises:
      ValueError: a scaling other than none and linear.
    """
    prefix = f"{architecture}.rope."
    theta = fields.number(prefix + "freq_base", default_theta)
    fields.require(prefix + "scaling.type", "none", "linear")
    kind = fields.text(prefix + "scaling.type", "linear")
    legacy_factor = fields.number(prefix + "scale_linear", 1.0)
    factor = fields.number(prefix + "scaling.factor", legacy_factor)
    return RopeConfig(theta=theta, linear_factor=factor if kind == "linear" else 1.0)
