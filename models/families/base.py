"""What a family file fills in, and the parts that most families share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxstate.models.config import DtypePolicy, LayerConfig, ModelConfig
from jaxstate.models.fields import Fields
from jaxstate.models.gguf_file import GgufFile
from jaxstate.models.params import ParamSpec
from jaxstate.models.rope import RopeConfig
from jaxstate.models.weights import WeightLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """How to read the directories of one architecture.

    Attributes:
      architectures: names in `architectures` of config.json.
      config: (fields of config.json, dtypes) -> ModelConfig; raises ValueError where a size is
        missing or impossible or a feature is not supported.
      layout: names and layout of the tensors in safetensors files.
    """

    architectures: tuple[str, ...]
    config: Callable[[Fields, DtypePolicy], ModelConfig]
    layout: WeightLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gguf:
    """How to read the GGUF files of one architecture.

    Attributes:
      architecture: `general.architecture`.
      config: (file, dtypes) -> ModelConfig; raises ValueError like HuggingFace.config.
      layout: names and layout of the tensors.
    """

    architecture: str
    config: Callable[[GgufFile, DtypePolicy], ModelConfig]
    layout: WeightLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How to read the models of one architecture.

    Attributes:
      name: ModelConfig.family.
      hf: Hugging Face directories.
      gguf: GGUF files; None where they carry another family's name.
    """

    name: str
    hf: HuggingFace
    gguf: Gguf | None = None


_HF_LAYER = "model.layers.{layer}."
_HF_ATTENTION = _HF_LAYER + "self_attn."
_HF_MLP = _HF_LAYER + "mlp."

HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "attn_norm": _HF_LAYER + "input_layernorm.weight",
    "wq": _HF_ATTENTION + "q_proj.weight",
    "wk": _HF_ATTENTION + "k_proj.weight",
    "wv": _HF_ATTENTION + "v_proj.weight",
    "wo": _HF_ATTENTION + "o_proj.weight",
    "bq": _HF_ATTENTION + "q_proj.bias",
    "bk": _HF_ATTENTION + "k_proj.bias",
    "bv": _HF_ATTENTION + "v_proj.bias",
    "bo": _HF_ATTENTION + "o_proj.bias",
    "q_norm": _HF_ATTENTION + "q_norm.weight",
    "k_norm": _HF_ATTENTION + "k_norm.weight",
    "mlp_norm": _HF_LAYER + "post_attention_layernorm.weight",
    "w_gate": _HF_MLP + "gate_proj.weight",
    "w_up": _HF_MLP + "up_proj.weight",
    "w_down": _HF_MLP + "down_proj.weight",
    "b_gate": _HF_MLP + "gate_proj.bias",
    "b_up": _HF_MLP + "up_proj.bias",
    "b_down": _HF_MLP + "down_proj.bias",
    "router": _HF_MLP + "gate.weight",
    "experts_gate": _HF_MLP + "experts.{expert}.gate_proj.weight",
    "experts_up": _HF_MLP + "experts.{expert}.up_proj.weight",
    "experts_down": _HF_MLP + "experts.{expert}.down_proj.weight",
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
    "bq": "blk.{layer}.attn_q.bias",
    "bk": "blk.{layer}.attn_k.bias",
    "bv": "blk.{layer}.attn_v.bias",
    "bo": "blk.{layer}.attn_output.bias",
    "q_norm": "blk.{layer}.attn_q_norm.weight",
    "k_norm": "blk.{layer}.attn_k_norm.weight",
    "post_attn_norm": "blk.{layer}.post_attention_norm.weight",
    "mlp_norm": "blk.{layer}.ffn_norm.weight",
    "post_mlp_norm": "blk.{layer}.post_ffw_norm.weight",
    "w_gate": "blk.{layer}.ffn_gate.weight",
    "w_up": "blk.{layer}.ffn_up.weight",
    "w_down": "blk.{layer}.ffn_down.weight",
    "b_gate": "blk.{layer}.ffn_gate.bias",
    "b_up": "blk.{layer}.ffn_up.bias",
    "b_down": "blk.{layer}.ffn_down.bias",
    "router": "blk.{layer}.ffn_gate_inp.weight",
    "experts_gate": "blk.{layer}.ffn_gate_exps.weight",
    "experts_up": "blk.{layer}.ffn_up_exps.weight",
    "experts_down": "blk.{layer}.ffn_down_exps.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
}


def half_split_rows(stored: np.ndarray, spec: ParamSpec, _: ModelConfig) -> np.ndarray:
    """Reorder rows of q or k from interleaved rotary pairs (2i, 2i + 1) to (i, i + head_dim / 2).

    Args:
      stored: [heads * head_dim, hidden_size], or a bias [heads * head_dim].
      spec: of the parameter, whose shape ends in (heads, head_dim).
    """
    heads, head_dim = spec.shape[-2:]
    pairs = stored.reshape(heads, head_dim // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(stored.shape)


INTERLEAVED = dict.fromkeys(("wq", "wk", "bq", "bk"), half_split_rows)
"""`restore` of GGUF architectures that rotate consecutive elements."""


def sizes_from_hf(
    fields: Fields, *, rms_norm_eps: float, max_positions: int, tied: bool = False
) -> dict[str, Any]:
    """Read what every config.json has, as arguments of ModelConfig.

    Args:
      rms_norm_eps, max_positions, tied: the architecture's defaults.
    """
    fields.require("quantization_config")
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    return dict(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        mlp_width=fields.count("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", num_heads),
        head_dim=fields.count("head_dim", hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", rms_norm_eps),
        max_positions=fields.count("max_position_embeddings", max_positions),
        tied_embeddings=fields.flag("tie_word_embeddings", tied),
    )


def sizes_from_gguf(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Read what the metadata of every decoder has, as arguments of ModelConfig.

    The embedding is tied where the file has no output matrix.
    """
    fields = file.fields

    def count(key: str, default: int | None = None) -> int:
        return fields.count(f"{architecture}.{key}", default)

    fields.require(f"{architecture}.attention.causal", True)
    hidden_size, num_heads = count("embedding_length"), count("attention.head_count")
    head_dim = count("attention.key_length", hidden_size // num_heads)
    fields.require(f"{architecture}.attention.value_length", head_dim)
    tokens = fields.values.get("tokenizer.ggml.tokens")
    return dict(
        vocab_size=count("vocab_size", len(tokens) if isinstance(tokens, list) else None),
        hidden_size=hidden_size,
        mlp_width=count("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=count("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        max_positions=count("context_length"),
        tied_embeddings=GGUF_NAMES["lm_head"] not in file.tensors,
    )


def layers_from_hf(
    fields: Fields, rope: RopeConfig, *, window: int | None, sliding: Sequence[bool] | None = None
) -> tuple[LayerConfig, ...]:
    """Lay out the layers of a config.json, some of them with a sliding window.

    Args:
      window: of the sliding layers; None = there are none.
      sliding: which layers slide where `layer_types` does not say; all of them if None.
    Raises:
      ValueError: a layer type other than full and sliding attention.
    """
    num_layers = fields.count("num_hidden_layers")
    types = fields.values.get("layer_types")
    if types is not None:
        known = {"full_attention": False, "sliding_attention": True}
        if not isinstance(types, list) or len(types) != num_layers or not set(types) <= set(known):
            raise ValueError(
                f"{fields.origin}: layer_types: expected {num_layers} of {', '.join(known)}, got "
                f"{types!r}; use a model of a supported kind"
            )
        sliding = [known[kind] for kind in types]
    if sliding is None:
        sliding = [True] * num_layers
    return tuple(LayerConfig(rope=rope, window=window if slides else None) for slides in sliding)


def same_layers(num_layers: int, rope: RopeConfig) -> tuple[LayerConfig, ...]:
    """Return layers without windows that differ in nothing."""
    return (LayerConfig(rope=rope),) * num_layers


def late_windows_from_hf(fields: Fields, rope: RopeConfig) -> tuple[LayerConfig, ...]:
    """Lay out the layers of Qwen's config.json: windows, if switched on, from some layer on."""
    num_layers = fields.count("num_hidden_layers")
    window = None
    if fields.flag("use_sliding_window", False):
        window = fields.optional_count("sliding_window", 4096)
    first = fields.values.get("max_window_layers", 28)
    sliding = [index >= first for index in range(num_layers)]
    return layers_from_hf(fields, rope, window=window, sliding=sliding)
