"""Every family on tiny random checkpoints, in both formats, against a plain forward in numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import model_files
import numpy as np
import plain_gguf
import plain_models
import pytest

from jaxstate import models
from jaxstate.models import registry

TOLERANCE = 1e-4  # f32 against f64 over a few layers
TOKEN_IDS = np.random.default_rng(3).integers(0, plain_models.SIZES["vocab_size"], 30)


def _assert_equal_to_plain(loaded, config: dict, tensors: plain_models.Tensors):
    model, params = loaded
    with jax.numpy_dtype_promotion("strict"):
        ids = jnp.asarray(TOKEN_IDS, jnp.int32)
        found = models.plain_forward.logits(params, model, ids)
    expected = plain_models.logits(config, tensors, TOKEN_IDS)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", plain_models.CONFIGS)
def test_hugging_face_checkpoint_gives_the_logits_of_a_plain_forward(tmp_path, name):
    config = plain_models.config_of(name)
    tensors = plain_models.tensors_of(config)
    directory = model_files.write_hf_dir(tmp_path, config, tensors)
    _assert_equal_to_plain(models.load_safetensors(directory), config, tensors)


@pytest.mark.parametrize("name", plain_gguf.CONVERTIBLE)
def test_gguf_file_gives_the_logits_of_a_plain_forward(tmp_path, name):
    config = plain_models.config_of(name) | plain_gguf.CONVERTIBLE[name]
    tensors = plain_models.tensors_of(config)
    path = model_files.write_gguf(
        tmp_path / "x.gguf",
        plain_gguf.metadata_of(config),
        plain_gguf.tensors_of(config, tensors),
        architecture=plain_gguf.architecture_of(config),
    )
    _assert_equal_to_plain(models.load_gguf(path), config, tensors)


def test_every_family_is_covered():
    architectures = {
        plain_models.config_of(name)["architectures"][0] for name in plain_models.CONFIGS
    }
    assert architectures == {
        name for family in registry.FAMILIES for name in family.hf.architectures
    }
    converted = {
        plain_gguf.architecture_of(plain_models.config_of(name)) for name in plain_gguf.CONVERTIBLE
    }
    assert converted == {family.gguf.architecture for family in registry.FAMILIES if family.gguf}


@pytest.mark.parametrize("name", plain_models.CONFIGS)
def test_every_tensor_matters(name):
    """The plain forward itself would notice a tensor that it forgot to read."""
    config = plain_models.config_of(name)
    tensors = plain_models.tensors_of(config)
    whole = plain_models.logits(config, tensors, TOKEN_IDS)
    for tensor in tensors:
        changed = tensors | {tensor: tensors[tensor] * np.float32(1.1) + np.float32(0.05)}
        assert np.abs(plain_models.logits(config, changed, TOKEN_IDS) - whole).max() > TOLERANCE, (
            tensor
        )
