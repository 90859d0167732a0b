"""Rotary settings as the files of all families write them."""

from __future__ import annotations

import math

import numpy as np

from jaxstate.models.config import ModelConfig
from jaxstate.models.fields import Fields
from jaxstate.models.gguf_file import GgufFile
from jaxstate.models.params import ParamSpec
from jaxstate.models.rope import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)


def rope_from_hf(
    fields: Fields, *, theta: float, layer_type: str | None = None, partial: bool = False
) -> RopeConfig:
    """Read rotary settings, both as `rope_theta` + `rope_scaling` and as `rope_parameters`.

    Length-dependent scalings are fixed for the model's longest context.

    Args:
      theta: the architecture's default.
      layer_type: which of the settings, where `rope_parameters` has them by type of layer.
      partial: the family loads weights with `turning_first`, so a part of the head may turn.
    Raises:
      ValueError: a scaling that is not supported, or settings that do not fit together.
    """
    newer = fields.group("rope_parameters")
    if layer_type is not None and layer_type in newer.values:
        newer = newer.group(layer_type)
    scaling = newer if newer.values else fields.group("rope_scaling")
    kind_key = "rope_type" if "rope_type" in scaling.values else "type"
    scaling.require(kind_key, "default", "linear", "llama3", "yarn", "longrope", "su")
    kind = scaling.text(kind_key, None if "factor" in scaling.values else "default")
    return RopeConfig(
        theta=scaling.number("rope_theta", fields.number("rope_theta", theta)),
        rotary_dim=_rotary_dim(fields, scaling, partial),
        scaling=_HF_SCALINGS[kind](fields, scaling),
    )


def _rotary_dim(fields: Fields, scaling: Fields, partial: bool) -> int | None:
    if not partial:
        fields.require("partial_rotary_factor", 1)
        scaling.require("partial_rotary_factor", 1)
        return None
    share = scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if share == 1.0:
        return None
    head_dim = fields.count(
        "head_dim", fields.count("hidden_size") // fields.count("num_attention_heads")
    )
    rotary_dim = int(head_dim * share)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ValueError(
            f"{fields.origin}: partial_rotary_factor: expected an even share of head_dim="
            f"{head_dim}, got {share}; the file is damaged, fetch it again"
        )
    return rotary_dim


def _original(fields: Fields, scaling: Fields) -> int:
    key = "original_max_position_embeddings"
    return scaling.count(key, fields.count(key, fields.count("max_position_embeddings")))


def _none(_fields: Fields, _scaling: Fields) -> None:
    return None


def _linear(_: Fields, scaling: Fields) -> RopeScaling:
    return LinearScaling(factor=scaling.number("factor"))


def _llama3(fields: Fields, scaling: Fields) -> RopeScaling:
    return Llama3Scaling(
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_positions=_original(fields, scaling),
    )


def _yarn(fields: Fields, scaling: Fields) -> RopeScaling:
    for key in ("mscale", "mscale_all_dim"):
        scaling.require(key)
    factor = scaling.number("factor")
    usual = YarnScaling.usual_attention_factor(factor)
    return YarnScaling(
        factor=factor,
        original_max_positions=_original(fields, scaling),
        attention_factor=scaling.number("attention_factor", usual),
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", True),
    )


def _longrope(fields: Fields, scaling: Fields) -> RopeScaling:
    longest, original = fields.count("max_position_embeddings"), _original(fields, scaling)
    factor = scaling.number("factor", longest / original)
    return FactorScaling(
        factors=_factors(scaling, "long_factor" if longest > original else "short_factor"),
        attention_factor=scaling.number("attention_factor", _longrope_attention(factor, original)),
    )


def _longrope_attention(factor: float, original: int) -> float:
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _factors(scaling: Fields, key: str) -> tuple[float, ...]:
    values = scaling.values.get(key)
    if not isinstance(values, list) or not values or not all(_is_positive(v) for v in values):
        raise ValueError(
            f"{scaling.origin}: {key}: expected a list of numbers above 0, got {values!r}; the "
            "file is damaged, fetch it again"
        )
    return tuple(float(value) for value in values)


def _is_positive(value) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


_HF_SCALINGS = {
    "default": _none,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # its first name
}


def rope_from_gguf(
    file: GgufFile, architecture: str, *, theta: float, partial: bool = False
) -> RopeConfig:
    """Read rotary settings of GGUF metadata; a factor without a type means linear scaling.

    Args:
      theta: the architecture's default.
      partial: as for rope_from_hf.
    Raises:
      ValueError: a scaling that is not supported.
    """
    fields, prefix = file.fields, f"{architecture}.rope."
    head_dim = fields.count(
        f"{architecture}.attention.key_length",
        fields.count(f"{architecture}.embedding_length")
        // fields.count(f"{architecture}.attention.head_count"),
    )
    if not partial:
        fields.require(prefix + "dimension_count", head_dim)
    rotary_dim = fields.count(prefix + "dimension_count", head_dim)
    return RopeConfig(
        theta=fields.number(prefix + "freq_base", theta),
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        scaling=_gguf_scaling(file, architecture, prefix + "scaling."),
    )


def _gguf_scaling(file: GgufFile, architecture: str, prefix: str) -> RopeScaling | None:
    fields = file.fields
    longest = fields.count(f"{architecture}.context_length")
    original = fields.count(prefix + "original_context_length", longest)
    if "rope_freqs.weight" in file.tensors:  # Llama 3.1 and later
        return FactorScaling(factors=_table(file, "rope_freqs.weight"))
    if "rope_factors_long.weight" in file.tensors:
        usual = _longrope_attention(longest / original, original)
        return FactorScaling(
            factors=_table(
                file, f"rope_factors_{'long' if longest > original else 'short'}.weight"
            ),
            attention_factor=fields.number(prefix + "attn_factor", usual),
        )
    fields.require(prefix + "type", "none", "linear", "yarn")
    legacy = fields.number(f"{architecture}.rope.scale_linear", 1.0)
    factor = fields.number(prefix + "factor", legacy)
    kind = fields.text(prefix + "type", "linear")
    if kind == "yarn":
        usual = YarnScaling.usual_attention_factor(factor)
        return YarnScaling(
            factor=factor,
            original_max_positions=original,
            attention_factor=fields.number(prefix + "attn_factor", 1.0) * usual,
            beta_fast=fields.number(prefix + "yarn_beta_fast", 32.0),
            beta_slow=fields.number(prefix + "yarn_beta_slow", 1.0),
        )
    fields.require(prefix + "attn_factor", 1)
    return LinearScaling(factor=factor) if kind == "linear" and factor != 1.0 else None


def _table(file: GgufFile, name: str) -> tuple[float, ...]:
    return tuple(float(value) for value in file.read(name))


def turning_first(stored: np.ndarray, spec: ParamSpec, config: ModelConfig) -> np.ndarray:
    """Reorder rows of q or k of which only the first rotary_dim elements of a head turn.

    Files pair (i, i + rotary_dim / 2) and leave the others where they are; here pairs are always
    (i, i + head_dim / 2), those that do not turn last. Scores do not change by it.

    Args:
      stored: [heads * head_dim, hidden_size] or [heads * head_dim].
    """
    rotary_dim = config.layers[0].rope.rotary_dim
    if rotary_dim is None:
        return stored
    heads, head_dim = spec.shape[-2:]
    turning, still = np.arange(rotary_dim), np.arange(rotary_dim, head_dim)
    left, right = np.split(turning, 2), np.split(still, 2)
    order = np.concatenate([left[0], right[0], left[1], right[1]])
    return stored.reshape(heads, head_dim, -1)[:, order].reshape(stored.shape)
