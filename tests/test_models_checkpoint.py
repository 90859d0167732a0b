"""Checkpoints of our own: bitwise back, whole or not at all, and refusals that explain."""

from __future__ import annotations

import dataclasses
import json
import shutil

import command_line
import jax
import model_files
import pytest

from jaxstate import models
from jaxstate.models import checkpoint, config_json, rope


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def saved(request, tmp_path_factory):
    """A model and the path of its checkpoint."""
    root = tmp_path_factory.mktemp("checkpoint")
    model = models.load(command_line.write_tiny_gguf(root / "tiny.gguf"), dtype=request.param)
    models.save_checkpoint(root / "new" / "tiny", model)
    return model, root / "new" / "tiny", request.param


def test_checkpoint_loads_as_the_model_it_was_saved_from(saved):
    model, path, dtype = saved
    again = models.load(path, dtype=dtype)
    model_files.assert_bitwise_equal(again.params, model.params)
    assert again.config == model.config
    assert (again.name, again.fingerprint) == (model.name, model.fingerprint)
    for name in ("bos_id", "eos_ids", "add_bos", "chat_template", "vocab_size"):
        assert getattr(again.tokenizer, name) == getattr(model.tokenizer, name)
    text = "<|im_start|> ab 1é1<|im_end|>"
    ids = model.tokenizer.encode(text)
    assert again.tokenizer.encode(text) == ids
    assert again.tokenizer.decode(ids) == model.tokenizer.decode(ids)
    assert [path.name for path in path.parent.iterdir()] == ["tiny"]


def test_no_file_of_a_checkpoint_names_the_folder_it_was_written_in(saved):
    _, path, _ = saved
    files = [each for each in path.rglob("*") if each.is_file()]
    assert files
    for folder in path.parents[:2]:
        assert [each.name for each in files if str(folder).encode() in each.read_bytes()] == []


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_model_is_saved_in_its_bits(tmp_path, weights):
    path = command_line.write_tiny_gguf(tmp_path / "tiny.gguf")
    model = models.load(path, weights=weights)
    models.save_checkpoint(tmp_path / "saved", model)
    again = models.load(tmp_path / "saved")
    assert again.config == model.config and again.config.quantized
    model_files.assert_bitwise_equal(again.params, model.params)


def test_checkpoint_of_another_dtype_is_refused(saved):
    _, path, dtype = saved
    other = "float32" if dtype == "bfloat16" else "bfloat16"
    with pytest.raises(ValueError, match=f"dtype: expected {dtype}.*, got {other}; load it as"):
        models.load(path, dtype=other)


def test_nothing_is_overwritten(saved):
    model, path, _ = saved
    with pytest.raises(ValueError, match="expected a path that does not exist yet"):
        models.save_checkpoint(path, model)


def test_what_reads_back_differently_never_appears(saved, tmp_path, monkeypatch):
    model, path, _ = saved
    other = jax.tree.map(lambda leaf: leaf.at[0].add(1), model.params)
    wrong = dataclasses.replace(model, params=other)
    monkeypatch.setattr(checkpoint, "load_checkpoint", lambda *_, **__: wrong)
    with pytest.raises(ValueError, match="expected to read back what was written"):
        models.save_checkpoint(tmp_path / "tiny", model)
    assert list(tmp_path.iterdir()) == []


def test_interrupted_save_leaves_nothing(saved, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_checksums", interrupt)
    with pytest.raises(KeyboardInterrupt):
        models.save_checkpoint(tmp_path / "tiny", saved[0])
    assert list(tmp_path.iterdir()) == []


def _largest(path):
    return max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def _truncate(path):
    file = _largest(path / "params")
    file.write_bytes(file.read_bytes()[:-1])


def _flip(path):
    file = _largest(path / "params")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _edit(**changes):
    def edit(path):
        about = json.loads((path / checkpoint.ABOUT).read_text())
        (path / checkpoint.ABOUT).write_text(json.dumps(about | changes))

    return edit


def _about(content):
    return lambda path: (path / checkpoint.ABOUT).write_text(content)


@pytest.mark.parametrize(
    "damage, message",
    [
        (_truncate, "got a difference in params/.*; the checkpoint is incomplete or damaged"),
        (_flip, "got a difference in params/"),
        (lambda path: _largest(path / "params").unlink(), "got a difference in params/"),
        (lambda path: (path / "tokenizer.json").unlink(), "got a difference in tokenizer.json"),
        (lambda path: (path / "more").write_text(""), "got a difference in more"),
        (_edit(sha256=None), "got a difference in jaxstate.json"),
        (_edit(fingerprint="0" * 64), "got a difference in jaxstate.json"),
        (_edit(format=2), "format: expected 1, got 2; save the model again"),
        (_edit(config={"class": "ModelConfig", "family": "llama"}), "config: expected a ModelConf"),
        (_edit(config=["llama"]), r"config: expected a ModelConfig, got \['llama'\]"),
        (_about(""), "jaxstate.json: expected JSON, got something else"),
        (_about("[1]"), "jaxstate.json: expected a JSON object, got list"),
        (lambda path: (path / checkpoint.ABOUT).unlink(), "config.json: expected a JSON file, got"),
    ],
)
def test_damaged_or_foreign_checkpoint_is_refused(saved, tmp_path, damage, message):
    _, path, dtype = saved
    copy = shutil.copytree(path, tmp_path / "copy")
    damage(copy)
    with pytest.raises(ValueError, match=message):
        models.load(copy, dtype=dtype)


def test_every_kind_of_config_survives_json():
    scalings = (
        None,
        rope.LinearScaling(factor=2.0),
        rope.Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64
        ),
        rope.YarnScaling(factor=4.0, original_max_positions=64, attention_factor=1.1),
        rope.FactorScaling(factors=(1.0, 2.0**-17), attention_factor=0.1),
    )
    config = dataclasses.replace(
        model_files.tiny_config(),
        layers=tuple(
            models.LayerConfig(
                rope=models.RopeConfig(theta=1e4 / 3, rotary_dim=idx or None, scaling=scaling),
                window=idx or None, routed=True,
            )
            for idx, scaling in enumerate(scalings)
        ),
        experts=models.ExpertConfig(count=4, per_token=2, width=8, normalize=False),
        activation="gelu_tanh", embed_scale=1 / 3, dtypes=models.DtypePolicy.named("bfloat16"),
    )  # fmt: skip
    described = json.loads(json.dumps(config_json.to_json(config)))
    assert config_json.from_json(described, models.ModelConfig, "here") == config


@pytest.mark.parametrize(
    "change, message",
    [
        ({"class": "Other"}, "expected a ModelConfig"),
        ({"head_dim": 15}, "head_dim: expected an even number, got 15"),
        ({"colour": "red"}, "as this version knows it, got .*colour"),
        ({"layers": [{"class": "Other"}]}, "as this version knows it, got 'Other'"),
        ({"dtypes": {"class": "DtypePolicy"}}, "as this version knows it, got no "),
    ],
)
def test_other_descriptions_of_a_config_are_refused(change, message):
    described = config_json.to_json(model_files.tiny_config()) | change
    with pytest.raises(ValueError, match=message):
        config_json.from_json(described, models.ModelConfig, "here")
    del described["family"]
    with pytest.raises(ValueError, match="here: expected a ModelConfig"):
        config_json.from_json(described, models.ModelConfig, "here")
