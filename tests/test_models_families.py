"""Configurations read from config.json and from GGUF metadata, and what they refuse."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import tempfile

import jax.numpy as jnp
import model_files
import numpy as np
import pytest

from jaxstate import models
from jaxstate.models import registry
from jaxstate.models.families import base, llama
from jaxstate.models.fields import Fields
from jaxstate.models.params import ParamSpec

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


def _from_hf(changes):
    return llama.config_from_hf(Fields(SMOLLM2 | changes, "config.json"), models.DtypePolicy())


def _from_gguf(changes, tensor_names=("output.weight",)):
    values = model_files.gguf_metadata(model_files.tiny_config()) | changes
    values = {key: value for key, value in values.items() if value is not None}
    tensors = dict.fromkeys(tensor_names, np.ones(8, np.float32))
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "x.gguf"
        file = models.GgufFile(model_files.write_gguf(path, values, tensors))
        return llama.config_from_gguf(file, models.DtypePolicy())


def test_smollm2_config_is_read_alike_from_both_formats(smollm2_model):
    from_gguf = smollm2_model.config
    from_hf = _from_hf({})
    assert from_gguf.rms_norm_eps == np.float32(from_hf.rms_norm_eps)
    eps = from_hf.rms_norm_eps  # GGUF keeps it in f32
    assert dataclasses.replace(from_gguf, rms_norm_eps=eps) == from_hf
    assert from_hf.head_dim == 64
    assert models.num_params(from_hf) == 134_515_008


def test_defaults_are_those_of_hugging_face():
    optional = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
    config = _from_hf(dict.fromkeys((*optional, "max_position_embeddings")))
    assert config.num_kv_heads == 9
    assert config.rms_norm_eps == 1e-6
    assert config.layers[0].rope == models.RopeConfig(theta=10_000.0)
    assert config.max_positions == 2048
    assert not config.tied_embeddings


@pytest.mark.parametrize(
    "changes, expected",
    [
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            (100_000.0, models.LinearScaling(factor=4.0)),
        ),
        ({"rope_scaling": {"rope_type": "default"}}, (100_000.0, None)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, (5e5, None)),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2}},
            (5e5, models.LinearScaling(factor=2.0)),
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 2048,
                }
            },
            (
                100_000.0,
                models.Llama3Scaling(
                    factor=8.0,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_max_positions=2048,
                ),
            ),
        ),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 2048,
                    "attention_factor": 1.25,
                }
            },
            (
                100_000.0,
                models.YarnScaling(factor=4.0, original_max_positions=2048, attention_factor=1.25),
            ),
        ),
    ],
)
def test_rope_settings_of_hugging_face_are_read(changes, expected):
    rope = _from_hf(changes).layers[-1].rope
    assert (rope.theta, rope.scaling) == expected


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor: expected"),
        ({"rope_scaling": {"type": "yarn"}}, "factor: expected a number, got nothing"),
        ({"rope_scaling": {"type": "yarn", "factor": 8.0, "mscale": 0.7}}, "mscale: expected no"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "expected default or linear or"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "short_factor: expected a list"),
        ({"rope_scaling": {"type": "linear"}}, "factor: expected a number, got nothing"),
        ({"rope_scaling": {"factor": 2.0}}, "type: expected a string, got nothing"),
        ({"rope_scaling": "linear"}, "rope_scaling: expected a mapping"),
        ({"rope_theta": -1.0}, "rope_theta: expected a number above 0, got -1.0"),
        ({"rope_theta": math.inf}, "rope_theta: expected a number above 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1, got 0.5"),
        ({"attention_bias": 1}, "attention_bias: expected true or false, got 1"),
        ({"hidden_act": "gelu"}, "hidden_act: expected silu, got 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: expected no value"),
        ({"sliding_window": 4096}, "sliding_window: expected no value"),
        ({"hidden_size": None}, "hidden_size: expected a whole number, got nothing"),
        ({"hidden_size": "576"}, "hidden_size: expected a whole number of at least 1, got '576'"),
        ({"vocab_size": True}, "vocab_size: expected a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected a whole number of at least 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads: expected a whole number"),
        ({"num_key_value_heads": 4}, "num_heads: expected a multiple of num_kv_heads=4"),
        ({"head_dim": 63}, "head_dim: expected an even number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false"),
    ],
)
def test_config_json_that_cannot_be_honoured_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        _from_hf(changes)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, None),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            models.LinearScaling(factor=4.0),
        ),
        ({"llama.rope.scaling.factor": 4.0}, models.LinearScaling(factor=4.0)),
        ({"llama.rope.scale_linear": 2.0}, models.LinearScaling(factor=2.0)),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 16,
            },
            models.YarnScaling(
                factor=4.0,
                original_max_positions=16,
                attention_factor=0.1 * math.log(4.0) + 1.0,
            ),
        ),
    ],
)
def test_rope_scaling_of_gguf_is_read(changes, expected):
    assert _from_gguf(changes).layers[0].rope.scaling == expected


def test_gguf_without_output_matrix_is_tied():
    assert _from_gguf({}, tensor_names=()).tied_embeddings
    assert not _from_gguf({}, tensor_names=("output.weight",)).tied_embeddings


def test_gguf_vocabulary_counts_its_tokens_if_no_size_is_given():
    values = model_files.gguf_metadata(model_files.tiny_config())
    tokens = values["tokenizer.ggml.tokens"]
    assert _from_gguf({"llama.vocab_size": None}).vocab_size == len(tokens)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"llama.rope.scaling.type": "longrope"}, "none or linear or yarn, got 'longrope'"),
        ({"llama.rope.scaling.attn_factor": 0.5}, "attn_factor: expected 1, got 0.5"),
        ({"llama.rope.dimension_count": 8}, "dimension_count: expected 16, got 8"),
        ({"llama.attention.value_length": 8}, "value_length: expected 16, got 8"),
        ({"llama.expert_count": 8}, "expert_used_count: expected a whole number, got nothing"),
        ({"llama.attention.sliding_window": 64}, "sliding_window: expected 0, got 64"),
        ({"llama.attention.scale": 0.5}, "attention.scale: expected 0, got 0.5"),
        ({"llama.attention.causal": False}, "attention.causal: expected True, got False"),
        ({"llama.attention.head_count": [4, 2]}, "head_count: expected a whole number"),
        ({"llama.context_length": None}, "context_length: expected a whole number, got nothing"),
    ],
)
def test_gguf_metadata_that_cannot_be_honoured_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        _from_gguf(changes)


def test_family_is_found_by_the_name_of_either_format():
    assert registry.gguf_format("llama") is llama.FAMILY.gguf
    assert registry.hf_format(["Other", "LlamaForCausalLM"]) is llama.FAMILY.hf


def test_unknown_architecture_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="expected one of llama, .*phi3, got 'mamba'"):
        registry.gguf_format("mamba")
    with pytest.raises(ValueError, match=r"expected one of LlamaForCausalLM, .*, got \['T5'\]"):
        registry.hf_format(["T5"])


def test_half_split_rows_pairs_each_element_with_its_neighbour():
    spec = ParamSpec(shape=(1, 2, 4), axes=("hidden", "heads", "head_dim"), fan_in=1)
    stored = np.asarray([[0], [2], [1], [3], [4], [6], [5], [7]])
    config = model_files.tiny_config()
    assert base.half_split_rows(stored, spec, config).ravel().tolist() == list(range(8))


def test_linear_scaling_divides_positions():
    plain = models.RopeConfig(theta=500.0).inverse_frequencies(16)
    scaling = models.LinearScaling(factor=4.0)
    scaled = models.RopeConfig(theta=500.0, scaling=scaling).inverse_frequencies(16)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 16)), jnp.float32)
    positions = jnp.asarray([4, 8, 20], jnp.int32)
    np.testing.assert_allclose(
        models.rotate(x, positions, jnp.asarray(scaled)),
        models.rotate(x, positions // 4, jnp.asarray(plain)),
        atol=1e-5,
    )
