"""`jaxstate ask` on a tiny model: its JSON against the dense forward, its text, its refusals."""

from __future__ import annotations

import dataclasses
import json
import re

import command_line
import numpy as np
import pytest
from command_line import run

from jaxstate import models
from jaxstate.engine import Engine
from jaxstate.sampling import Sampling
from jaxstate.serving import ask

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}:"
PROMPT = "Hello, world"
NEW_TOKENS = 12
TOLERANCE = 1e-4  # f32, summed in another order


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The tiny model with and without a chat template, and a cache directory."""
    directory = tmp_path_factory.mktemp("ask")
    command_line.write_tiny_gguf(directory / "chat.gguf", chat_template=TEMPLATE)
    command_line.write_tiny_gguf(directory / "base.gguf")
    return directory


@pytest.fixture(scope="module")
def chat_model(files):
    return models.load(files / "chat.gguf")


@pytest.fixture(autouse=True)
def jax_settings():
    with command_line.kept_jax_settings():
        yield


def _ask(capsys, files, *options, model="chat.gguf", prompt=PROMPT):
    return run(
        capsys,
        "ask",
        "--model",
        files / model,
        "--prompt",
        prompt,
        "--cache-dir",
        files,
        "--max-new-tokens",
        NEW_TOKENS,
        *options,
    )


def test_json_equals_the_dense_forward(capsys, files, chat_model):
    result = _ask(capsys, files, "--raw", "--json")
    assert result.status == 0
    assert result.out.count("\n") == 1
    found = json.loads(result.out)
    prompt_ids = chat_model.tokenizer.encode(PROMPT)
    dense = command_line.Dense(chat_model, 64)
    expected = dense.greedy(prompt_ids, NEW_TOKENS)
    logits, logprobs = dense.logits(prompt_ids)[-1], dense.logprobs(prompt_ids)[-1]
    assert found["prompt_ids"] == prompt_ids
    assert found["ids"] == expected
    assert found["text"] == chat_model.tokenizer.decode(expected, skip_special=True)
    assert found["finish_reason"] == ("length" if len(expected) == NEW_TOKENS else "eos")
    order = np.argsort(-logits)[: ask.NUM_TOP_LOGITS]
    assert [top["id"] for top in found["top_logits"]] == order.tolist()
    for top in found["top_logits"]:
        assert top["token"] == chat_model.tokenizer.decode([top["id"]])
        assert top["logit"] == pytest.approx(logits[top["id"]], abs=TOLERANCE)
        assert top["logprob"] == pytest.approx(logprobs[top["id"]], abs=TOLERANCE)
    assert set(found["timings"]) == {"load_s", "compile_s", "first_token_ms", "total_ms"}
    assert 0 < found["timings"]["first_token_ms"] <= found["timings"]["total_ms"]
    compiled = [line for line in result.err.splitlines() if line.startswith("compiling ")]
    assert [line.split()[1] for line in compiled] == [
        f"{done}/{len(compiled)}" for done in range(1, len(compiled) + 1)
    ]
    assert any(re.fullmatch(r"compiling \S+ step 32 … \d+\.\d s", line) for line in compiled)


def test_second_start_finds_every_program_compiled(capsys, files):
    _ask(capsys, files)
    kept = {path.name for path in (files / "xla").iterdir()}
    assert kept
    _ask(capsys, files)
    now = {path.name for path in (files / "xla").iterdir()}
    assert {name for name in now if name.endswith("-cache")} == {
        name for name in kept if name.endswith("-cache")
    }


def test_text_is_streamed_and_equals_the_json(capsys, files, chat_model):
    prompt_ids = chat_model.tokenizer.encode(f"<|im_start|>{PROMPT}:")
    assert prompt_ids[0] == 1  # the control token, not its letters
    found = json.loads(_ask(capsys, files, "--json").out)
    assert found["prompt_ids"] == prompt_ids
    result = _ask(capsys, files)
    assert result.status == 0
    assert result.out == found["text"] + "\n"
    assert f"{len(prompt_ids)} prompt tokens, first token after" in result.err


def test_draws_repeat_with_the_seed(capsys, files):
    options = ("--raw", "--json", "--temperature", "3", "--top-k", "50")
    first, same, other = (
        json.loads(_ask(capsys, files, *options, "--seed", seed).out)["ids"] for seed in (1, 1, 2)
    )
    assert first == same != other


def test_stop_ends_the_text(capsys, files):
    text = json.loads(_ask(capsys, files, "--raw", "--json").out)["text"]
    stop = text[4:6]
    found = json.loads(_ask(capsys, files, "--raw", "--json", "--stop", stop).out)
    assert found["text"] == text[: text.index(stop)]
    assert found["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "options, model, prompt, message",
    [
        (("--raw",), "base.gguf", "", "prompt: expected some text"),
        (("--raw",), "base.gguf", "x" * 60, "60 prompt tokens and 12 new ones exceed the model's"),
        (("--raw",), "absent.gguf", PROMPT, "an existing path or an id"),
        (("--raw", "--dtype", "int3"), "base.gguf", PROMPT, 'got "int3"'),
        (("--raw", "--weights", "int3"), "base.gguf", PROMPT, "weights: expected one of"),
    ],
)
def test_refusals_come_before_anything_is_compiled(capsys, files, options, model, prompt, message):
    result = _ask(capsys, files, *options, model=model, prompt=prompt)
    assert result.status == 2
    assert result.out == ""
    assert message in result.err.splitlines()[-1]
    assert "compiling" not in result.err


@pytest.mark.parametrize(
    "prompt_len, tokens",
    [(1, [1]), (33, [1, 64]), (512, [1, 512]), (513, [1, 512]), (1124, [1, 128, 512])],
)
def test_only_needed_steps_are_compiled(chat_model, prompt_len, tokens):
    long = dataclasses.replace(chat_model.config, max_positions=8192)
    config = ask.engine_config(long, prompt_len, 10)
    assert [shape.num_tokens for shape in config.step_shapes] == tokens
    assert config.num_cells >= prompt_len + 10 + 2 * config.page_size


def test_answer_completes_a_character_that_the_question_began(chat_model):
    """And shows nothing of the question itself."""
    first, second = "é".encode()
    config = ask.engine_config(chat_model.config, 8, 4)
    engine = Engine(chat_model.params, chat_model.config, config, tokenizer=chat_model.tokenizer)
    ids = {
        chat_model.tokenizer.token_bytes(idx): idx for idx in range(chat_model.config.vocab_size)
    }
    question = [ids[b"a"], ids[bytes([first])]]
    forced = Sampling(logit_bias={ids[bytes([second])]: 100.0})
    session = engine.create()
    assert engine.query(session, question, max_new_tokens=1, sampling=forced).text == "é"
    engine.append(session, question)
    assert (
        engine.query(session, [ids[bytes([second])]], max_new_tokens=1, sampling=forced).text
        == "\ufffd"
    )


def test_base_model_gets_the_message_as_raw_text_with_a_warning(capsys, files, caplog):
    asked = json.loads(_ask(capsys, files, "--json", model="base.gguf").out)
    raw = json.loads(_ask(capsys, files, "--json", "--raw", model="base.gguf").out)
    assert asked["prompt_ids"] == raw["prompt_ids"]
    assert "no chat template" in caplog.text


def test_weights_are_kept_in_few_bits_on_request(capsys, files):
    result = _ask(capsys, files, "--raw", "--json", "--weights", "int8")
    assert result.status == 0 and len(json.loads(result.out)["ids"]) == NEW_TOKENS
    assert "as int8" in result.err
