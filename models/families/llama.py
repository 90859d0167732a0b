"""The Llama family: Llama 2 and 3, SmolLM2 and others of the same architecture.

GGUF files of Mistral and Mixtral carry this name as well.

Source: LLaMA (arXiv:2302.13971, arXiv:2407.21783); grouped-query attention (arXiv:2305.13245).
"""

from __future__ import annotations

from jaxstate.models.config import DtypePolicy, ExpertConfig, LayerConfig, ModelConfig
from jaxstate.models.families import base, rotary
from jaxstate.models.fields import Fields
from jaxstate.models.gguf_file import GgufFile
from jaxstate.models.weights import WeightLayout

_NAME = "llama"
_THETA = 10_000.0

# Set by relatives of this architecture that share its name in GGUF files (scaled residuals,
# clamped values); reading such a file as plain Llama would give wrong numbers silently.
_UNSUPPORTED_GGUF = (
    "attention.clamp_kqv",
    "attention.scale",
    "attention.sliding_window",
    "embedding_scale",
    "logit_scale",
    "residual_scale",
)


def config_from_hf(fields: Fields, dtypes: DtypePolicy) -> ModelConfig:
    """Read a config.json; defaults are those of Hugging Face's LlamaConfig."""
    fields.require("hidden_act", "silu")
    fields.require("sliding_window")
    bias = fields.flag("attention_bias", False)
    return ModelConfig(
        family=_NAME,
        **base.sizes_from_hf(fields, rms_norm_eps=1e-6, max_positions=2048),
        layers=base.same_layers(
            fields.count("num_hidden_layers"), rotary.rope_from_hf(fields, theta=_THETA)
        ),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        dtypes=dtypes,
    )


def config_from_gguf(file: GgufFile, dtypes: DtypePolicy) -> ModelConfig:
    """Read GGUF metadata; biases and experts are there where their tensors are."""
    for key in _UNSUPPORTED_GGUF:
        file.fields.require(f"{_NAME}.{key}", 0)
    experts = _experts(file)
    layer = LayerConfig(
        rope=rotary.rope_from_gguf(file, _NAME, theta=_THETA), routed=experts is not None
    )
    return ModelConfig(
        family=_NAME,
        **base.sizes_from_gguf(file, _NAME),
        layers=(layer,) * file.fields.count(f"{_NAME}.block_count"),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        experts=experts,
        dtypes=dtypes,
    )


def _experts(file: GgufFile) -> ExpertConfig | None:
    if not file.fields.values.get(f"{_NAME}.expert_count"):
        return None
    return ExpertConfig(
        count=file.fields.count(f"{_NAME}.expert_count"),
        per_token=file.fields.count(f"{_NAME}.expert_used_count"),
        width=file.fields.count(f"{_NAME}.feed_forward_length"),
        normalize=True,
    )


FAMILY = base.Family(
    name=_NAME,
    hf=base.HuggingFace(
        architectures=("LlamaForCausalLM",),
        config=config_from_hf,
        # Old checkpoints carry the rotary frequencies.
        layout=WeightLayout(names=base.HF_NAMES, ignored=("*.rotary_emb.inv_freq",)),
    ),
    gguf=base.Gguf(
        architecture=_NAME,
        config=config_from_gguf,
        layout=WeightLayout(
            names=base.GGUF_NAMES, restore=base.INTERLEAVED, ignored=("rope_freqs.weight",)
        ),
    ),
)
