"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values.

Source: arXiv:2407.10671, arXiv:2412.15115.
"""

from __future__ import annotations

from jaxstate.models.config import DtypePolicy, ModelConfig
from jaxstate.models.families import base, rotary
from jaxstate.models.fields import Fields
from jaxstate.models.gguf_file import GgufFile
from jaxstate.models.weights import WeightLayout

_NAME = "qwen2"


def config_from_hf(fields: Fields, dtypes: DtypePolicy) -> ModelConfig:
    """Read a config.json; defaults are those of Hugging Face's Qwen2Config."""
    fields.require("hidden_act", "silu")
    return ModelConfig(
        family=_NAME,
        **base.sizes_from_hf(fields, rms_norm_eps=1e-6, max_positions=32_768),
        layers=base.late_windows_from_hf(fields, rotary.rope_from_hf(fields, theta=10_000.0)),
        qkv_bias=True,
        dtypes=dtypes,
    )


def config_from_gguf(file: GgufFile, dtypes: DtypePolicy) -> ModelConfig:
    """Read GGUF metadata."""
    rope = rotary.rope_from_gguf(file, _NAME, theta=10_000.0)
    return ModelConfig(
        family=_NAME,
        **base.sizes_from_gguf(file, _NAME),
        layers=base.same_layers(file.fields.count(f"{_NAME}.block_count"), rope),
        qkv_bias=True,
        dtypes=dtypes,
    )


FAMILY = base.Family(
    name=_NAME,
    hf=base.HuggingFace(
        architectures=("Qwen2ForCausalLM",),
        config=config_from_hf,
        layout=WeightLayout(names=base.HF_NAMES),
    ),
    gguf=base.Gguf(
        architecture=_NAME,
        config=config_from_gguf,
        layout=WeightLayout(names=base.GGUF_NAMES),
    ),
)
