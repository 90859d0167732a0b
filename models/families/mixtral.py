"""Mixtral: Mistral with a mixture of experts on every layer.

Its GGUF files are called "llama".

Source: arXiv:2401.04088.
"""

from __future__ import annotations

import dataclasses

from jaxstate.models.config import DtypePolicy, ExpertConfig, ModelConfig
from jaxstate.models.families import base, rotary
from jaxstate.models.fields import Fields
from jaxstate.models.weights import WeightLayout

_MOE = "model.layers.{layer}.block_sparse_moe."


def config_from_hf(fields: Fields, dtypes: DtypePolicy) -> ModelConfig:
    """Read a config.json; defaults are those of Hugging Face's MixtralConfig."""
    fields.require("hidden_act", "silu")
    rope = rotary.rope_from_hf(fields, theta=1e6)
    layers = base.layers_from_hf(fields, rope, window=fields.optional_count("sliding_window", None))
    sizes = base.sizes_from_hf(fields, rms_norm_eps=1e-5, max_positions=131_072)
    return ModelConfig(
        family="mixtral",
        **sizes,
        layers=tuple(dataclasses.replace(layer, routed=True) for layer in layers),
        experts=ExpertConfig(
            count=fields.count("num_local_experts", 8),
            per_token=fields.count("num_experts_per_tok", 2),
            width=sizes["mlp_width"],
            normalize=True,
        ),
        dtypes=dtypes,
    )


FAMILY = base.Family(
    name="mixtral",
    hf=base.HuggingFace(
        architectures=("MixtralForCausalLM",),
        config=config_from_hf,
        layout=WeightLayout(
            names=base.HF_NAMES
            | dict(
                router=_MOE + "gate.weight",
                experts_gate=_MOE + "experts.{expert}.w1.weight",
                experts_up=_MOE + "experts.{expert}.w3.weight",
                experts_down=_MOE + "experts.{expert}.w2.weight",
            ),
        ),
    ),
)
