"""The commands that look at models: what there is, what a chat becomes, whether a model is well."""

from __future__ import annotations

import dataclasses
import json
import re

import command_line
import model_files
import numpy as np
import plain_models
import pytest
from command_line import run

from jaxstate import models
from jaxstate.models import plain_forward, sources
from jaxstate.serving import doctor, machine

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(autouse=True)
def jax_settings():
    with command_line.kept_jax_settings():
        yield


@pytest.fixture
def tiny(tmp_path):
    return command_line.write_tiny_gguf(
        tmp_path / "tiny.gguf", max_positions=128, chat_template=TEMPLATE
    )


def _lines(result: command_line.Result) -> list[dict]:
    return [json.loads(line) for line in result.out.splitlines()]


def _findings(result: command_line.Result) -> dict[str, str]:
    return {line["check"]: line["verdict"] for line in _lines(result)}


# models


def test_models_lists_names_with_their_files_and_every_family(capsys, tmp_path):
    source = sources.SOURCES["smollm2-135m"]
    path = tmp_path / "models" / source.file_name
    lines = _lines(run(capsys, "models", "--json", "--cache-dir", tmp_path))
    assert {"model": "smollm2-135m", "path": None}.items() <= lines[0].items()
    assert {line["gguf"] for line in lines if "family" in line} >= {"llama", "gemma3", "qwen3moe"}
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(source.size_bytes)
    lines = _lines(run(capsys, "models", "--json", "--cache-dir", tmp_path))
    assert lines[0]["path"] == str(path)


def test_models_prints_tables_for_people(capsys, tmp_path):
    result = run(capsys, "models", "--cache-dir", tmp_path)
    assert result.status == 0
    assert "not pulled" in result.out and "Gemma3ForCausalLM" in result.out


# render


def test_render_prints_exact_text_and_ids(capsys, tiny, tmp_path):
    arguments = ("render", tiny, "--system", "be", "--user", "a 11")
    result = run(capsys, *arguments)
    assert result.out == "[system]be[user]a 11>\n"
    found = json.loads(run(capsys, *arguments, "--json").out)
    tokenizer = models.Tokenizer.from_gguf(tiny)
    assert found["ids"] == tokenizer.encode("[system]be[user]a 11>")
    assert "".join(found["tokens"]) == found["text"] == "[system]be[user]a 11>"
    assert f"{len(found['ids'])} tokens" in result.err


def test_render_reads_messages_and_tools_from_files(capsys, tiny, tmp_path):
    (tmp_path / "m.json").write_text('[{"role": "tool", "content": "7"}]')
    (tmp_path / "t.json").write_text('[{"name": "add"}]')
    files = ("--messages", tmp_path / "m.json", "--tools", tmp_path / "t.json", "--open-ended")
    assert run(capsys, "render", tiny, *files).out == '[tool]7[{"name": "add"}]\n'


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "messages: expected at least one, got none; give --user or --messages"),
        ("{", "m.json: expected JSON, got something else"),
        ('{"role": "user"}', "m.json: expected a list of objects, got dict"),
        ('[{"content": "a"}]', r"messages\[0\]: expected a mapping with role"),
    ],
)
def test_render_refuses_what_are_no_messages(capsys, tiny, tmp_path, content, message):
    path = tmp_path / "m.json"
    if content is not None:
        path.write_text(content)
    files = () if content is None else ("--messages", path)
    result = run(capsys, "render", tiny, *files)
    assert result.status == 2 and result.out == ""
    assert len(result.err.splitlines()) == 1
    assert re.search(message, result.err)


# doctor


def test_doctor_finds_a_sound_model_sound(capsys, tiny):
    result = run(capsys, "doctor", tiny, "--json")
    assert result.status == 0
    checks = ("architecture", "memory", "weights", "tokenizer", "chat template", "parity")
    assert _findings(result) == dict.fromkeys(checks, "ok")


def test_doctor_says_that_a_base_model_has_no_template(capsys, tmp_path):
    path = command_line.write_tiny_gguf(tmp_path / "base.gguf", max_positions=128)
    result = run(capsys, "doctor", path)
    assert result.status == 0
    assert "! chat template  none, as base models are" in result.out
    assert "✓ parity" in result.out


def test_doctor_stops_at_weights_that_are_damaged(capsys, tmp_path):
    config = model_files.tiny_config()
    tensors = model_files.gguf_tensors(models.init_params(config, seed=2))
    tensors["output_norm.weight"] = np.full(config.hidden_size, np.nan, np.float32)
    path = model_files.write_gguf(tmp_path / "x.gguf", model_files.gguf_metadata(config), tensors)
    result = run(capsys, "doctor", path)
    assert result.status == 1
    assert "✗ weights        " in result.out and "NaN" in result.out
    assert "parity" not in result.out


def test_doctor_refuses_what_does_not_fit_before_reading_it(capsys, tiny, monkeypatch):
    monkeypatch.setattr(machine, "free_bytes", lambda: 10_000)
    result = run(capsys, "doctor", tiny)
    assert result.status == 1
    assert "✗ memory" in result.out and "take bfloat16" in result.out
    assert "weights  " not in result.out.splitlines()[-1]


def test_doctor_of_an_unknown_architecture_names_the_known_ones(capsys, tmp_path):
    config = model_files.tiny_config()
    tensors = model_files.gguf_tensors(models.init_params(config, seed=2))
    path = model_files.write_gguf(
        tmp_path / "x.gguf", model_files.gguf_metadata(config), tensors, architecture="mamba"
    )
    result = run(capsys, "doctor", path)
    assert result.status == 1
    assert "✗ architecture   " in result.out and "'mamba'" in result.out


def test_doctor_notices_steps_that_compute_something_else(tiny, monkeypatch):
    loaded = models.load(tiny)
    assert doctor.parity_with_plain_forward(loaded, "float32").verdict == "ok"
    wrong = dataclasses.replace(loaded.config, query_scale=1.1)
    monkeypatch.setattr(doctor, "_engine", _engine_of(wrong, loaded, doctor._engine))
    assert doctor.parity_with_plain_forward(loaded, "float32").verdict == "failed"


def _engine_of(config, loaded, build):
    return lambda _: build(dataclasses.replace(loaded, config=config))


@pytest.mark.long
def test_doctor_compares_smollm2_with_recorded_answers(smollm2_model):
    (finding,) = doctor.parity_with_record(smollm2_model, "smollm2-135m")
    assert finding.verdict == "ok" and finding.text.startswith("3 of 3 recorded answers")


@pytest.mark.parametrize("name", ["gemma3_text", "smollm3", "qwen3_moe", "phi3-partial"])
def test_plain_forward_of_doctor_equals_an_independent_one(tmp_path, name):
    config = plain_models.config_of(name)
    tensors = plain_models.tensors_of(config)
    model, params = models.load_safetensors(model_files.write_hf_dir(tmp_path, config, tensors))
    ids = np.random.default_rng(3).integers(0, model.vocab_size, 30)
    found = plain_forward.logits(params, model, ids.astype(np.int32))[-1]
    np.testing.assert_allclose(found, plain_models.logits(config, tensors, ids)[-1], atol=1e-4)


def test_doctor_and_render_read_checkpoints(capsys, tiny, tmp_path):
    path = tmp_path / "saved"
    models.save_checkpoint(path, models.load(tiny))
    assert set(_findings(run(capsys, "doctor", path, "--json")).values()) == {"ok"}
    rendered = run(capsys, "render", path, "--user", "a").out
    assert rendered == run(capsys, "render", tiny, "--user", "a").out == "[user]a>\n"
