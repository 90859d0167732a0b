"""Weights from both formats: exact round trips, equal logits, nothing left after a refusal."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import model_files
import numpy as np
import pytest

from jaxstate import models


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def tiny(request):
    config = model_files.tiny_config(tied=request.param, linear_factor=2.0)
    return config, models.init_params(config, seed=1)


def test_gguf_gives_back_config_and_weights_bitwise(tmp_path, tiny):
    config, params = tiny
    tensors = model_files.gguf_tensors(params)
    path = tmp_path / "tiny.gguf"
    model_files.write_gguf(path, model_files.gguf_metadata(config), tensors)
    loaded_config, loaded = models.load_gguf(path)
    assert loaded_config == config
    model_files.assert_bitwise_equal(loaded, params)


@pytest.mark.parametrize("num_shards", [0, 1, 3])
def test_hf_directory_gives_back_config_and_weights_bitwise(tmp_path, tiny, num_shards):
    config, params = tiny
    settings, tensors = model_files.hf_settings(config), model_files.hf_tensors(params)
    model_files.write_hf_dir(tmp_path, settings, tensors, num_shards=num_shards)
    loaded_config, loaded = models.load_safetensors(tmp_path)
    assert loaded_config == config
    model_files.assert_bitwise_equal(loaded, params)


def test_both_formats_give_equal_logits(tmp_path, tiny):
    config, params = tiny
    path = tmp_path / "tiny.gguf"
    metadata, tensors = model_files.gguf_metadata(config), model_files.gguf_tensors(params)
    model_files.write_gguf(path, metadata, tensors)
    model_files.write_hf_dir(
        tmp_path / "hf", model_files.hf_settings(config), model_files.hf_tensors(params)
    )
    ids = jnp.arange(20, dtype=jnp.int32)
    first = models.plain_forward.logits(*reversed(models.load_gguf(path)), ids)
    second = models.plain_forward.logits(*reversed(models.load_safetensors(tmp_path / "hf")), ids)
    np.testing.assert_array_equal(first, second)
    assert np.ptp(first) > 0.1


def test_matrices_are_cast_to_the_param_dtype(tmp_path):
    path = tmp_path / "tiny.gguf"
    model_files.write_gguf(path, *model_files.tiny_gguf_parts())
    dtypes = models.DtypePolicy.named("bfloat16")
    config, from_gguf = models.load_gguf(path, dtypes=dtypes)
    settings, tensors = model_files.tiny_hf_parts()
    tensors = {name: tensor.astype(jnp.bfloat16) for name, tensor in tensors.items()}
    model_files.write_hf_dir(tmp_path, settings, tensors)
    _, from_hf = models.load_safetensors(tmp_path, dtypes=dtypes)
    assert config.dtypes == dtypes
    layer = from_gguf["layers"][0]
    assert {layer[name].dtype for name in ("wq", "w_down")} == {jnp.dtype(jnp.bfloat16)}
    assert layer["attn_norm"].dtype == jnp.float32  # norms stay wide
    model_files.assert_bitwise_equal(from_gguf, from_hf)


def test_tensors_without_parameters_are_ignored(tmp_path, tiny):
    config, params = tiny
    tensors = model_files.hf_tensors(params)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    if config.tied_embeddings:
        tensors["lm_head.weight"] = np.zeros((264, 32), np.float32)
    model_files.write_hf_dir(tmp_path, model_files.hf_settings(config), tensors)
    model_files.assert_bitwise_equal(models.load_safetensors(tmp_path)[1], params)


def test_refused_model_leaves_no_arrays(tmp_path):
    settings, tensors = model_files.tiny_hf_parts()
    tensors["model.norm.weight"] = np.full(32, np.nan, np.float32)
    model_files.write_hf_dir(tmp_path, settings, tensors)
    gc.collect()
    before = len(jax.live_arrays())
    with pytest.raises(ValueError, match="final_norm"):
        models.load_safetensors(tmp_path)
    gc.collect()
    assert len(jax.live_arrays()) == before
