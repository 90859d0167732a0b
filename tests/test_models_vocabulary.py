"""Vocabularies of both formats: equal where they should be, refused where they are damaged."""

from __future__ import annotations

import json

import model_files
import pytest

from jaxstate import models


@pytest.fixture
def tiny_gguf(tmp_path):
    """Build a tokenizer from the tiny vocabulary with changed metadata (None removes a key)."""

    def build(changes=()):
        metadata = model_files.gguf_metadata(model_files.tiny_config()) | dict(changes)
        metadata = {key: value for key, value in metadata.items() if value is not None}
        path = model_files.write_gguf(tmp_path / "tiny.gguf", metadata, {})
        return models.Tokenizer.from_gguf(path)

    return build


@pytest.fixture
def tiny_hf_dir(tmp_path):
    """Build a tokenizer from a directory with these JSON files beside tokenizer.json."""

    def build(tokenizer=None, **files):
        contents = tokenizer or model_files.hf_tokenizer()
        (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return models.Tokenizer.from_hf_dir(tmp_path)

    return build


@pytest.mark.parametrize("text", ["a ab aab 11 é🙂", "<|im_start|>user\n11<|im_end|>", "", "  "])
def test_both_formats_build_the_same_tokenizer(tiny_gguf, tiny_hf_dir, text):
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    config |= {"chat_template": model_files.CHAT_TEMPLATE}
    from_gguf, from_hf = tiny_gguf(), tiny_hf_dir(tokenizer_config=config)
    for parse_special in (True, False):
        ids = from_gguf.encode(text, parse_special=parse_special)
        assert from_hf.encode(text, parse_special=parse_special) == ids
        assert from_hf.decode(ids) == text
    for name in ("vocab_size", "bos_id", "eos_ids", "add_bos", "chat_template"):
        assert getattr(from_gguf, name) == getattr(from_hf, name)


def test_default_pre_tokenizer_keeps_up_to_three_digits_together(tiny_gguf):
    tokenizer = tiny_gguf({"tokenizer.ggml.pre": "default"})
    # "1111" splits into "111" and "1": one merge, then two single digits.
    assert [tokenizer.decode([idx]) for idx in tokenizer.encode("1111")] == ["11", "1", "1"]
    # Punctuation stands alone, so that the space before it belongs to nothing else.
    assert [tokenizer.decode([idx]) for idx in tokenizer.encode(" a.")] == [" a", "."]


def test_ends_of_an_answer_are_collected(tiny_gguf, tiny_hf_dir):
    assert tiny_gguf({"tokenizer.ggml.eot_token_id": 0}).eos_ids == (2, 0)
    # <|im_end|> ends a turn whatever the metadata say.
    assert tiny_gguf({"tokenizer.ggml.eos_token_id": 0}).eos_ids == (0, 2)
    types = model_files.tiny_tokens()[1]
    types[2] = 1
    changes = {"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.token_type": types}
    assert tiny_gguf(changes).eos_ids == ()
    config = {"eos_token": "<|im_end|>"}
    both = tiny_hf_dir(tokenizer_config=config, generation_config={"eos_token_id": [2, 0]})
    assert both.eos_ids == (2, 0)
    one = tiny_hf_dir(tokenizer_config=config, generation_config={"eos_token_id": 0})
    assert one.eos_ids == (0, 2)


def test_pre_tokenizer_decides_whether_digits_stay_together(tiny_gguf):
    assert len(tiny_gguf().encode("11")) == 2
    assert len(tiny_gguf({"tokenizer.ggml.pre": "gpt-2"}).encode("11")) == 1


def test_every_byte_has_a_token(tiny_gguf):
    tokenizer = tiny_gguf()
    alphabet = {tokenizer.token_bytes(idx) for idx in range(3, 259)}
    assert alphabet == {bytes([byte]) for byte in range(256)}


def test_bos_is_refused_where_there_is_none(tiny_gguf):
    with pytest.raises(ValueError, match="expected a tokenizer with a bos_id"):
        tiny_gguf({"tokenizer.ggml.bos_token_id": None}).encode("a", add_bos=True)


def test_whether_bos_is_expected_is_read_from_the_post_processor(tiny_hf_dir):
    contents = model_files.hf_tokenizer()
    bos = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    contents["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
        },
    }
    config = {"bos_token": "<|im_start|>"}
    tokenizer = tiny_hf_dir(contents, tokenizer_config=config)
    assert tokenizer.add_bos
    assert tokenizer.encode("a") == tokenizer.encode("a", add_bos=True)[1:]
    assert not tiny_hf_dir(contents, tokenizer_config=config | {"add_bos_token": False}).add_bos


def test_chat_template_file_and_named_templates_are_read(tmp_path, tiny_hf_dir):
    first, second, third = (f"{number} {{{{ messages[0].content }}}}" for number in range(3))
    named = [{"name": "tool_use", "template": first}, {"name": "default", "template": second}]
    assert tiny_hf_dir(tokenizer_config={"chat_template": named}).chat_template == second
    (tmp_path / "chat_template.jinja").write_text(third)
    assert models.Tokenizer.from_hf_dir(tmp_path).chat_template == third


def test_user_defined_tokens_are_always_parsed_and_never_special(tiny_gguf):
    types = model_files.tiny_tokens()[1]
    types[0] = 4
    tokenizer = tiny_gguf({"tokenizer.ggml.token_type": types})
    for parse_special in (True, False):
        assert tokenizer.encode("<|endoftext|>", parse_special=parse_special) == [0]
    assert not tokenizer.is_special(0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokenizer.ggml.pre": "bloom"}, "expected one of default, gpt-2, .*, got 'bloom'"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre: expected a string, got nothing"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model: expected gpt2 or llama, got 't5'"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model: expected a string, got nothing"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens: expected a list of strings"),
        (
            {"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]},
            "tokens: expected 2 different tokens, got 1",
        ),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges: expected a list of strings"),
        ({"tokenizer.ggml.merges": ["q q"]}, "expected two tokens that form a third, got 'q q'"),
        ({"tokenizer.ggml.merges": ["Ġa"]}, "expected two tokens that form a third, got 'Ġa'"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type: expected 262 values, got 1"),
        ({"tokenizer.ggml.token_type": None}, "token_type: expected 262 values, got None"),
        ({"tokenizer.ggml.eos_token_id": 262}, "eos_ids: expected an id below 262, got 262"),
        ({"tokenizer.ggml.bos_token_id": "1"}, "bos_id: expected an id below 262, got '1'"),
        (
            {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True},
            "add_bos: expected a tokenizer with a bos_id",
        ),
        ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token: expected true or false, got 1"),
        ({"tokenizer.chat_template": 1}, "tokenizer.chat_template: expected a string, got 1"),
    ],
)
def test_damaged_gguf_vocabulary_is_refused(tiny_gguf, changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_gguf(changes)


BLANKS = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}


def _sequence(*decoders: dict) -> dict:
    return {"type": "Sequence", "decoders": list(decoders)}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"decoder": None}, "decoder: expected one of byte-level BPE or SentencePiece, got none"),
        ({"decoder": {"type": "WordPiece"}}, "decoder: expected .*, got WordPiece; use a model"),
        ({"decoder": {"type": "Fuse"}}, "decoder: expected .*, got Fuse; use a model"),
        ({"decoder": _sequence(BLANKS | {"content": "_"})}, "got Replace; use a model"),
        (
            {"decoder": _sequence(BLANKS, {"type": "Strip", "content": " ", "start": 2})},
            "got Replace \\+ Strip; use a model",
        ),
        ({"model": {"type": "Unknown"}}, "tokenizer.json: expected a tokenizer"),
    ],
)
def test_unusable_tokenizer_json_is_refused(tiny_hf_dir, changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_hf_dir(model_files.hf_tokenizer() | changes)


def test_companions_of_tokenizer_json_that_do_not_belong_are_refused(tmp_path, tiny_hf_dir):
    with pytest.raises(ValueError, match="tokenizer.json: expected a JSON file, got none"):
        models.Tokenizer.from_hf_dir(tmp_path)
    with pytest.raises(
        ValueError, match="bos_token: expected a token of tokenizer.json, got '<s>'"
    ):
        tiny_hf_dir(tokenizer_config={"bos_token": "<s>"})
    with pytest.raises(ValueError, match="chat_template: expected a string or a list"):
        tiny_hf_dir(tokenizer_config={"chat_template": [{"name": "default", "template": 1}]})
    with pytest.raises(ValueError, match="eos_ids: expected an id below 262, got 500"):
        tiny_hf_dir(tokenizer_config={}, generation_config={"eos_token_id": 500})
