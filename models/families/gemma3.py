"""Gemma 3, text only: norms on both sides, five sliding layers to a global one.

Source: arXiv:2503.19786.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxstate.models.config import DtypePolicy, LayerConfig, ModelConfig
from jaxstate.models.families import base, rotary
from jaxstate.models.fields import Fields
from jaxstate.models.gguf_file import GgufFile
from jaxstate.models.params import ParamSpec
from jaxstate.models.rope import RopeConfig
from jaxstate.models.weights import WeightLayout

_NAME = "gemma3"
_THETA, _LOCAL_THETA = 1e6, 10_000.0
_PATTERN = 6
_WINDOW = 512
_LAYERS_27B = 62
_NORMS = ("attn_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm", "q_norm", "k_norm")
_LAYER = "model.layers.{layer}."


def config_from_hf(fields: Fields, dtypes: DtypePolicy) -> ModelConfig:
    """Read a config.json; defaults are those of Hugging Face's Gemma3TextConfig."""
    fields.require("hidden_activation", "gelu_pytorch_tanh")
    fields.require("final_logit_softcapping")
    fields.require("attn_logit_softcapping")
    fields.require("use_bidirectional_attention", False)
    sizes = base.sizes_from_hf(fields, rms_norm_eps=1e-6, max_positions=131_072, tied=True)
    sizes["head_dim"] = fields.count("head_dim", 256)
    num_layers = fields.count("num_hidden_layers")
    pattern = fields.count("sliding_window_pattern", _PATTERN)
    shape = base.layers_from_hf(
        fields,
        rotary.rope_from_hf(fields, theta=_THETA, layer_type="full_attention"),
        window=fields.count("sliding_window", 4096),
        sliding=[bool((index + 1) % pattern) for index in range(num_layers)],
    )
    bias = fields.flag("attention_bias", False)
    return _config(
        sizes,
        _with_local_rope(shape, _local_rope(fields)),
        scalar=fields.number("query_pre_attn_scalar", 256),
        bias=bias,
        dtypes=dtypes,
    )


def _local_rope(fields: Fields) -> RopeConfig:
    if "sliding_attention" in fields.group("rope_parameters").values:
        return rotary.rope_from_hf(fields, theta=_LOCAL_THETA, layer_type="sliding_attention")
    return RopeConfig(theta=fields.number("rope_local_base_freq", _LOCAL_THETA))


def config_from_gguf(file: GgufFile, dtypes: DtypePolicy) -> ModelConfig:
    """Read GGUF metadata, which leave out the pattern of layers and the local rotary base."""
    fields = file.fields
    sizes = base.sizes_from_gguf(file, _NAME)
    num_layers = fields.count(f"{_NAME}.block_count")
    window = fields.count(f"{_NAME}.attention.sliding_window", _WINDOW)
    rope = rotary.rope_from_gguf(file, _NAME, theta=_THETA)
    shape = [
        LayerConfig(rope=rope, window=window if (index + 1) % _PATTERN else None)
        for index in range(num_layers)
    ]
    local = RopeConfig(theta=fields.number(f"{_NAME}.rope.freq_base_swa", _LOCAL_THETA))
    # The largest model alone divides by the residual stream's share of a head.
    largest = num_layers == _LAYERS_27B
    scalar = sizes["hidden_size"] / sizes["num_heads"] if largest else sizes["head_dim"]
    return _config(sizes, _with_local_rope(shape, local), scalar=scalar, bias=False, dtypes=dtypes)


def _with_local_rope(shape: Sequence[LayerConfig], local: RopeConfig) -> tuple[LayerConfig, ...]:
    return tuple(
        layer if layer.window is None else LayerConfig(rope=local, window=layer.window)
        for layer in shape
    )


def _config(
    sizes: dict[str, Any],
    layers: tuple[LayerConfig, ...],
    *,
    scalar: float,
    bias: bool,
    dtypes: DtypePolicy,
) -> ModelConfig:
    return ModelConfig(
        family=_NAME,
        **sizes,
        layers=layers,
        activation="gelu_tanh",
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        post_norms=True,
        embed_scale=math.sqrt(sizes["hidden_size"]),
        query_scale=math.sqrt(sizes["head_dim"] / scalar),
        dtypes=dtypes,
    )


def _one_more(stored: np.ndarray, _spec: ParamSpec, _config: ModelConfig) -> np.ndarray:
    """Hugging Face stores a norm's scale less one."""
    return stored.astype(np.float32) + 1


FAMILY = base.Family(
    name=_NAME,
    hf=base.HuggingFace(
        architectures=("Gemma3ForCausalLM",),
        config=config_from_hf,
        layout=WeightLayout(
            names=base.HF_NAMES
            | dict(
                post_attn_norm=_LAYER + "post_attention_layernorm.weight",
                mlp_norm=_LAYER + "pre_feedforward_layernorm.weight",
                post_mlp_norm=_LAYER + "post_feedforward_layernorm.weight",
            ),
            restore=dict.fromkeys((*_NORMS, "final_norm"), _one_more),
        ),
    ),
    gguf=base.Gguf(
        architecture=_NAME, config=config_from_gguf, layout=WeightLayout(names=base.GGUF_NAMES)
    ),
)
