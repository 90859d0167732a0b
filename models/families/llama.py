"""The Llama family: Llama, SmolLM2 and others of the same architecture.

Source: LLaMA (arXiv:2302.13971); grouped-query attention (arXiv:2305.13245).
"""

from __future__ import annotations

from collections.abc import Collection

from jaxstate.models.config import DtypePolicy, LayerConfig, ModelConfig
from jaxstate.models.families import base
from jaxstate.models.fields import Fields
from jaxstate.models.weights import WeightLayout

_NAME = "llama"

# Set by relatives of this architecture that share its name in GGUF files (experts, scaled
# residuals, windows); reading such a file as plain Llama would give wrong numbers silently.
_UNSUPPORTED_GGUF = (
    "attention.clamp_kqv",
    "attention.scale",
    "attention.sliding_window",
    "embedding_scale",
    "expert_count",
    "logit_scale",
    "residual_scale",
    "rope.scaling.attn_factor",
)


def config_from_hf(fields: Fields, dtypes: DtypePolicy) -> ModelConfig:
    """Read a config.json; defaults are those of Hugging Face's LlamaConfig.

    Raises:
      ValueError: a size is missing or impossible, or a feature is not supported (biases, another
        activation, quantized weights, windows, a rope scaling other than linear).
    """
    fields.require("hidden_act", "silu")
    fields.require("attention_bias", False)
    fields.require("mlp_bias", False)
    fields.require("quantization_config")
    fields.require("sliding_window")
    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    return ModelConfig(
        family=_NAME,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        mlp_width=fields.count("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", num_heads),
        head_dim=fields.count("head_dim", hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_positions=fields.count("max_position_embeddings", 2048),
        layers=_layers(fields.count("num_hidden_layers"), base.rope_from_hf(fields, 10_000.0)),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        dtypes=dtypes,
    )


def config_from_gguf(
    fields: Fields, tensor_names: Collection[str], dtypes: DtypePolicy
) -> ModelConfig:
    """Read GGUF metadata; the embedding is tied where the file has no output matrix.

    Raises:
      ValueError: a size is missing or impossible, or a feature is not supported (experts, scaled
        residuals, windows, a rope scaling other than linear).
    """
    for key in _UNSUPPORTED_GGUF:
        fields.require(f"{_NAME}.{key}", 0)
    fields.require(f"{_NAME}.attention.causal", True)
    if "rope_freqs.weight" in tensor_names:
        raise ValueError(
            f"{fields.origin}: expected no tensor rope_freqs.weight, got one: rope scaling of "
            "Llama 3.1 and later is not supported; use another model"
        )

    def count(key, default=None):
        return fields.count(f"{_NAME}.{key}", default)

    hidden_size, num_heads = count("embedding_length"), count("attention.head_count")
    head_dim = count("attention.key_length", hidden_size // num_heads)
    fields.require(f"{_NAME}.attention.value_length", head_dim)
    fields.require(f"{_NAME}.rope.dimension_count", head_dim)
    tokens = fields.values.get("tokenizer.ggml.tokens")
    return ModelConfig(
        family=_NAME,
        vocab_size=count("vocab_size", len(tokens) if isinstance(tokens, list) else None),
        hidden_size=hidden_size,
        mlp_width=count("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=count("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number(f"{_NAME}.attention.layer_norm_rms_epsilon"),
        max_positions=count("context_length"),
        layers=_layers(count("block_count"), base.rope_from_gguf(fields, _NAME, 10_000.0)),
        tied_embeddings=base.GGUF_NAMES["lm_head"] not in tensor_names,
        dtypes=dtypes,
    )


def _layers(num_layers: int, rope) -> tuple[LayerConfig, ...]:
    return (LayerConfig(rope=rope),) * num_layers


FAMILY = base.Family(
    name=_NAME,
    hf_architectures=("LlamaForCausalLM",),
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    # Old checkpoints carry the rotary frequencies.
    hf=WeightLayout(names=base.HF_NAMES, ignored=("*.rotary_emb.inv_freq",)),
    gguf=WeightLayout(
        names=base.GGUF_NAMES,
        restore={"wq": base.half_split_rows, "wk": base.half_split_rows},
    ),
)
