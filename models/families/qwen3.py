"""Qwen3, dense and with experts: queries and keys are normalized per head.

Source: arXiv:2505.09388.
"""

from __future__ import annotations

import dataclasses

from jaxstate.models.config import DtypePolicy, ExpertConfig, LayerConfig, ModelConfig
from jaxstate.models.families import base, rotary
from jaxstate.models.fields import Fields
from jaxstate.models.gguf_file import GgufFile
from jaxstate.models.weights import WeightLayout

_DENSE, _ROUTED = "qwen3", "qwen3moe"
_THETA = 10_000.0


def config_from_hf(fields: Fields, dtypes: DtypePolicy) -> ModelConfig:
    """Read a config.json; defaults are those of Hugging Face's Qwen3Config."""
    fields.require("hidden_act", "silu")
    bias = fields.flag("attention_bias", False)
    return ModelConfig(
        family=_DENSE,
        **_sizes_from_hf(fields),
        layers=base.late_windows_from_hf(fields, rotary.rope_from_hf(fields, theta=_THETA)),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        dtypes=dtypes,
    )


def config_with_experts_from_hf(fields: Fields, dtypes: DtypePolicy) -> ModelConfig:
    """Read a config.json; defaults are those of Hugging Face's Qwen3MoeConfig."""
    fields.require("use_sliding_window", False)
    step = fields.count("decoder_sparse_step", 1)
    dense = fields.values.get("mlp_only_layers") or []
    config = config_from_hf(fields, dtypes)
    return dataclasses.replace(
        config,
        family=_ROUTED,
        layers=tuple(
            dataclasses.replace(layer, routed=index not in dense and (index + 1) % step == 0)
            for index, layer in enumerate(config.layers)
        ),
        experts=ExpertConfig(
            count=fields.count("num_experts", 128),
            per_token=fields.count("num_experts_per_tok", 8),
            width=fields.count("moe_intermediate_size", 768),
            normalize=fields.flag("norm_topk_prob", False),
        ),
    )


def _sizes_from_hf(fields: Fields):
    sizes = base.sizes_from_hf(fields, rms_norm_eps=1e-6, max_positions=32_768)
    return {**sizes, "head_dim": fields.count("head_dim", 128)}


def config_from_gguf(file: GgufFile, dtypes: DtypePolicy) -> ModelConfig:
    """Read GGUF metadata of a dense model."""
    rope = rotary.rope_from_gguf(file, _DENSE, theta=_THETA)
    return ModelConfig(
        family=_DENSE,
        **base.sizes_from_gguf(file, _DENSE),
        layers=base.same_layers(file.fields.count(f"{_DENSE}.block_count"), rope),
        qk_norm=True,
        dtypes=dtypes,
    )


def config_with_experts_from_gguf(file: GgufFile, dtypes: DtypePolicy) -> ModelConfig:
    """Read GGUF metadata of a model with experts on every layer."""
    layer = LayerConfig(rope=rotary.rope_from_gguf(file, _ROUTED, theta=_THETA), routed=True)
    return ModelConfig(
        family=_ROUTED,
        **base.sizes_from_gguf(file, _ROUTED),
        layers=(layer,) * file.fields.count(f"{_ROUTED}.block_count"),
        qk_norm=True,
        experts=ExpertConfig(
            count=file.fields.count(f"{_ROUTED}.expert_count"),
            per_token=file.fields.count(f"{_ROUTED}.expert_used_count"),
            width=file.fields.count(f"{_ROUTED}.expert_feed_forward_length"),
            normalize=True,  # as every published model; the metadata do not say
        ),
        dtypes=dtypes,
    )


DENSE = base.Family(
    name=_DENSE,
    hf=base.HuggingFace(
        architectures=("Qwen3ForCausalLM",),
        config=config_from_hf,
        layout=WeightLayout(names=base.HF_NAMES),
    ),
    gguf=base.Gguf(
        architecture=_DENSE, config=config_from_gguf, layout=WeightLayout(names=base.GGUF_NAMES)
    ),
)
ROUTED = base.Family(
    name=_ROUTED,
    hf=base.HuggingFace(
        architectures=("Qwen3MoeForCausalLM",),
        config=config_with_experts_from_hf,
        layout=WeightLayout(names=base.HF_NAMES),
    ),
    gguf=base.Gguf(
        architecture=_ROUTED,
        config=config_with_experts_from_gguf,
        layout=WeightLayout(names=base.GGUF_NAMES),
    ),
)
