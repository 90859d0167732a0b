"""SmolLM3: Llama of which every fourth layer does not encode positions.

Source: NoPE (arXiv:2305.19466) in some layers (arXiv:2501.18795).
"""

from __future__ import annotations

import dataclasses

from jaxstate.models.config import DtypePolicy, LayerConfig, ModelConfig
from jaxstate.models.families import base, rotary
from jaxstate.models.fields import Fields
from jaxstate.models.gguf_file import GgufFile
from jaxstate.models.rope import RopeConfig
from jaxstate.models.weights import WeightLayout

_NAME = "smollm3"
_INTERVAL = 4
_THETA = 2e6


def config_from_hf(fields: Fields, dtypes: DtypePolicy) -> ModelConfig:
    """Read a config.json; defaults are those of Hugging Face's SmolLM3Config."""
    fields.require("hidden_act", "silu")
    num_layers = fields.count("num_hidden_layers")
    turning = fields.values.get("no_rope_layers")  # 1 where a layer does encode them
    if turning is None:
        interval = fields.count("no_rope_layer_interval", _INTERVAL)
        turning = _turning(num_layers, interval)
    if not isinstance(turning, list) or len(turning) != num_layers:
        raise ValueError(
            f"{fields.origin}: no_rope_layers: expected {num_layers} of 0 and 1, got {turning!r}; "
            "the file is damaged, fetch it again"
        )
    window = fields.optional_count("sliding_window", None)
    if not fields.flag("use_sliding_window", False):
        window = None
    layers = base.layers_from_hf(
        fields,
        rotary.rope_from_hf(fields, theta=_THETA),
        window=window,
        sliding=[not turns for turns in turning],
    )
    bias = fields.flag("attention_bias", False)
    return ModelConfig(
        family=_NAME,
        **base.sizes_from_hf(fields, rms_norm_eps=1e-6, max_positions=32_768, tied=True),
        layers=_with_still_layers(layers, turning),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        dtypes=dtypes,
    )


def config_from_gguf(file: GgufFile, dtypes: DtypePolicy) -> ModelConfig:
    """Read GGUF metadata, which leave out which layers encode positions."""
    num_layers = file.fields.count(f"{_NAME}.block_count")
    rope = rotary.rope_from_gguf(file, _NAME, theta=_THETA)
    layers = base.same_layers(num_layers, rope)
    return ModelConfig(
        family=_NAME,
        **base.sizes_from_gguf(file, _NAME),
        layers=_with_still_layers(layers, _turning(num_layers, _INTERVAL)),
        dtypes=dtypes,
    )


def _turning(num_layers: int, interval: int) -> list[int]:
    return [int((index + 1) % interval != 0) for index in range(num_layers)]


def _with_still_layers(
    layers: tuple[LayerConfig, ...], turning: list[int]
) -> tuple[LayerConfig, ...]:
    still = RopeConfig(theta=_THETA, rotary_dim=0)
    return tuple(
        layer if turns else dataclasses.replace(layer, rope=still)
        for layer, turns in zip(layers, turning, strict=True)
    )


FAMILY = base.Family(
    name=_NAME,
    hf=base.HuggingFace(
        architectures=("SmolLM3ForCausalLM",),
        config=config_from_hf,
        layout=WeightLayout(names=base.HF_NAMES),
    ),
    gguf=base.Gguf(
        architecture=_NAME,
        config=config_from_gguf,
        layout=WeightLayout(names=base.GGUF_NAMES, restore=base.INTERLEAVED),
    ),
)
