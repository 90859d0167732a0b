"""Mistral: Llama with a sliding window on every layer, or none in later versions.

Its GGUF files are called "llama".

Source: arXiv:2310.06825.
"""

from __future__ import annotations

from jaxstate.models.config import DtypePolicy, ModelConfig
from jaxstate.models.families import base, rotary
from jaxstate.models.fields import Fields
from jaxstate.models.weights import WeightLayout


def config_from_hf(fields: Fields, dtypes: DtypePolicy) -> ModelConfig:
    """Read a config.json; defaults are those of Hugging Face's MistralConfig."""
    fields.require("hidden_act", "silu")
    window = fields.optional_count("sliding_window", 4096)
    rope = rotary.rope_from_hf(fields, theta=10_000.0)
    return ModelConfig(
        family="mistral",
        **base.sizes_from_hf(fields, rms_norm_eps=1e-6, max_positions=131_072),
        layers=base.layers_from_hf(fields, rope, window=window),
        dtypes=dtypes,
    )


FAMILY = base.Family(
    name="mistral",
    hf=base.HuggingFace(
        architectures=("MistralForCausalLM",),
        config=config_from_hf,
        layout=WeightLayout(names=base.HF_NAMES, ignored=("*.rotary_emb.inv_freq",)),
    ),
)
