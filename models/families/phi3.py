"""Phi-3 and Phi-4: fused projections, rotation of a part of the head in some.

Source: arXiv:2404.14219, arXiv:2412.08905; LongRoPE (arXiv:2402.13753).
"""

from __future__ import annotations

from jaxstate.models.config import DtypePolicy, LayerConfig, ModelConfig
from jaxstate.models.families import base, rotary
from jaxstate.models.fields import Fields
from jaxstate.models.gguf_file import GgufFile
from jaxstate.models.weights import WeightLayout

_NAME = "phi3"
_HF_LAYER = "model.layers.{layer}."
_RESTORE = {"wq": rotary.turning_first, "wk": rotary.turning_first}


def config_from_hf(fields: Fields, dtypes: DtypePolicy) -> ModelConfig:
    """Read a config.json; defaults are those of Hugging Face's Phi3Config."""
    fields.require("hidden_act", "silu")
    fields.require("attention_bias", False)
    rope = rotary.rope_from_hf(fields, theta=10_000.0, partial=True)
    window = fields.optional_count("sliding_window", None)
    return ModelConfig(
        family=_NAME,
        **base.sizes_from_hf(fields, rms_norm_eps=1e-5, max_positions=4096),
        layers=base.layers_from_hf(fields, rope, window=window),
        dtypes=dtypes,
    )


def config_from_gguf(file: GgufFile, dtypes: DtypePolicy) -> ModelConfig:
    """Read GGUF metadata."""
    fields = file.fields
    window = f"{_NAME}.attention.sliding_window"
    layer = LayerConfig(
        rope=rotary.rope_from_gguf(file, _NAME, theta=10_000.0, partial=True),
        # Phi-4 has 0 there, which tells it from Phi-3.
        window=fields.count(window) if fields.values.get(window) else None,
    )
    return ModelConfig(
        family=_NAME,
        **base.sizes_from_gguf(file, _NAME),
        layers=(layer,) * fields.count(f"{_NAME}.block_count"),
        dtypes=dtypes,
    )


FAMILY = base.Family(
    name=_NAME,
    hf=base.HuggingFace(
        architectures=("Phi3ForCausalLM",),
        config=config_from_hf,
        layout=WeightLayout(
            names=base.HF_NAMES
            | dict(
                **dict.fromkeys(("wq", "wk", "wv"), _HF_LAYER + "self_attn.qkv_proj.weight"),
                **dict.fromkeys(("w_gate", "w_up"), _HF_LAYER + "mlp.gate_up_proj.weight"),
            ),
            restore=_RESTORE,
        ),
    ),
    gguf=base.Gguf(
        architecture=_NAME,
        config=config_from_gguf,
        layout=WeightLayout(
            names=base.GGUF_NAMES
            | dict(
                **dict.fromkeys(("wq", "wk", "wv"), "blk.{layer}.attn_qkv.weight"),
                **dict.fromkeys(("w_gate", "w_up"), "blk.{layer}.ffn_up.weight"),
            ),
            restore=_RESTORE,
            ignored=("rope_factors_*.weight",),
        ),
    ),
)
