"""Loading a whole model from one path."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import model_files
import numpy as np
import pytest

from jaxstate import models
from jaxstate.models import loading


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The same model as a GGUF file and as a Hugging Face directory."""
    root = tmp_path_factory.mktemp("tiny")
    config = model_files.tiny_config()
    params = models.init_params(config, seed=3)
    metadata, tensors = model_files.gguf_metadata(config), model_files.gguf_tensors(params)
    path = model_files.write_gguf(root / "tiny.v1.gguf", metadata, tensors)
    directory = model_files.write_hf_dir(
        root / "tiny-hf", model_files.hf_settings(config), model_files.hf_tensors(params)
    )
    (directory / "tokenizer.json").write_text(json.dumps(model_files.hf_tokenizer()))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return path, directory


def test_both_formats_load_the_same_model(tiny):
    path, directory = tiny
    from_gguf, from_hf = models.load(path), models.load(str(directory))
    assert from_gguf.config == from_hf.config
    for a, b in zip(
        jax.tree.leaves(from_gguf.params), jax.tree.leaves(from_hf.params), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert from_gguf.tokenizer.encode(" ab 11") == from_hf.tokenizer.encode(" ab 11")
    assert (from_gguf.name, from_hf.name) == ("tiny.v1", "tiny-hf")


def test_smollm2_loads_with_its_tokenizer(smollm2_model, smollm2_path):
    model = smollm2_model
    assert model.name == "smollm2-135m"
    assert model.config.vocab_size == model.tokenizer.vocab_size == 49152
    assert models.num_params(model.config) == 134_515_008
    assert model.fingerprint == loading.fingerprint(model.config, [smollm2_path])


def test_dtype_is_a_named_policy(tiny):
    model = models.load(tiny[0], dtype="bfloat16")
    assert model.params["embed"].dtype == jnp.bfloat16
    assert model.config.dtypes == models.DtypePolicy.named("bfloat16")
    with pytest.raises(ValueError, match='expected "float32" or "bfloat16", got "int8"'):
        models.load(tiny[0], dtype="int8")


def test_fingerprint_follows_weights_and_config_not_places(tiny, tmp_path):
    path, directory = tiny
    copy = tmp_path / "other-name.gguf"
    shutil.copy(path, copy)
    original = models.load(path).fingerprint
    assert len(original) == 64
    assert models.load(copy).fingerprint == original
    assert models.load(path, dtype="bfloat16").fingerprint != original
    assert models.load(directory).fingerprint != original

    config = model_files.tiny_config()
    assert loading.fingerprint(config, [path]) == original
    scaled = model_files.tiny_config(linear_factor=2.0)
    assert loading.fingerprint(scaled, [path]) != original

    content = bytearray(copy.read_bytes())
    content[-1] ^= 1
    copy.write_bytes(content)
    assert loading.fingerprint(config, [copy]) != original


def test_nothing_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="an existing path or an id .*absent'; give a GGUF"):
        models.load(tmp_path / "absent")


def test_tokenizer_larger_than_the_embedding_is_refused(tmp_path, tiny):
    directory = shutil.copytree(tiny[1], tmp_path / "model")
    contents = model_files.hf_tokenizer()
    contents["model"]["vocab"]["Ġextra"] = 264
    (directory / "tokenizer.json").write_text(json.dumps(contents))
    with pytest.raises(ValueError, match="expected a tokenizer of at most 264 ids, got 265"):
        models.load(directory)
