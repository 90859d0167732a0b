"""Hugging Face directories: what is read, and refusals that explain."""

from __future__ import annotations

import json

import jax.numpy as jnp
import model_files
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from jaxstate import models


@pytest.fixture
def hf_parts():
    return model_files.tiny_hf_parts()


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_half_precision_files_load_as_f32_without_rounding(tmp_path, hf_parts, dtype):
    settings, tensors = hf_parts
    halves = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    model_files.write_hf_dir(tmp_path, settings, halves)
    _, params = models.load_safetensors(tmp_path)
    np.testing.assert_array_equal(
        params["embed"], halves["model.embed_tokens.weight"].astype(np.float32)
    )


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: model_files.without(t, "lm_head.weight"), "expected tensor lm_head.weight"),
        (
            lambda t: t | {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)},
            "got model.layers.0.self_attn.q_proj.bias",
        ),
        (
            lambda t: t | {"model.norm.weight": np.zeros(31, np.float32)},
            r"model.norm.weight: expected shape \(32,\), got \(31,\)",
        ),
        (
            lambda t: t | {"lm_head.weight": np.full((264, 32), np.inf, np.float32)},
            "lm_head.*expected finite numbers",
        ),
        (
            lambda t: t | {"lm_head.weight": np.zeros((264, 32), np.int8)},
            "lm_head.weight: expected F32, F16, BF16, got I8",
        ),
    ],
)
def test_hf_directory_with_wrong_tensors_is_refused(tmp_path, hf_parts, change, message):
    settings, tensors = hf_parts
    model_files.write_hf_dir(tmp_path, settings, change(tensors))
    with pytest.raises(ValueError, match=message):
        models.load_safetensors(tmp_path)


def test_truncated_safetensors_file_is_refused(tmp_path, hf_parts):
    model_files.write_hf_dir(tmp_path, *hf_parts)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    for size in (0, 5, 100, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match="truncated or damaged"):
            models.load_safetensors(tmp_path)


def test_directory_without_its_files_is_refused(tmp_path, hf_parts):
    with pytest.raises(ValueError, match="config.json: expected a JSON file, got none"):
        models.load_safetensors(tmp_path)
    model_files.write_hf_dir(tmp_path, *hf_parts)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="expected model.safetensors or .*, got neither"):
        models.load_safetensors(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"hidden_size": 32}'])
def test_damaged_config_json_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match="config.json"):
        models.load_safetensors(tmp_path)


def _sharded(directory, hf_parts):
    model_files.write_hf_dir(directory, *hf_parts, num_shards=2)
    path = directory / "model.safetensors.index.json"
    return path, json.loads(path.read_text())


def test_missing_shard_is_refused(tmp_path, hf_parts):
    _sharded(tmp_path, hf_parts)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="expected the shard model-00002-of-00002.safetensors"):
        models.load_safetensors(tmp_path)


def test_shard_outside_the_directory_is_refused(tmp_path, hf_parts):
    path, index = _sharded(tmp_path / "model", hf_parts)
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes((path.parent / "model-00001-of-00002.safetensors").read_bytes())
    index["weight_map"]["lm_head.weight"] = "../outside.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="expected the shard ../outside.safetensors"):
        models.load_safetensors(path.parent)


def test_index_that_disagrees_with_its_shards_is_refused(tmp_path, hf_parts):
    path, index = _sharded(tmp_path, hf_parts)
    for weight_map in ({}, None):
        path.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match="weight_map: expected a shard per tensor"):
            models.load_safetensors(tmp_path)
    first, second = sorted(set(index["weight_map"].values()))
    name = next(name for name, shard in index["weight_map"].items() if shard == first)
    path.write_text(json.dumps({"weight_map": index["weight_map"] | {name: second}}))
    with pytest.raises(ValueError, match=f"tensor {name}: expected it in {second}"):
        models.load_safetensors(tmp_path)


def test_tensor_in_two_shards_is_refused(tmp_path, hf_parts):
    _sharded(tmp_path, hf_parts)
    safetensors_numpy.save_file(hf_parts[1], tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(ValueError, match="expected it in one shard, got it again"):
        models.load_safetensors(tmp_path)
