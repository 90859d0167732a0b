"""How texts are cut into words, by the names that GGUF files use."""

from __future__ import annotations

import model_files
import pytest

from jaxstate import models
from jaxstate.models import pre_tokenizers

TEXT = "I'LL  pay don't 12345 helloWorld/\n\n ¾é+="

# Worked out by hand from the published patterns, with | between the words.
WORDS = {
    "gpt-2": "I|'|LL| | pay| don|'t| 12345| helloWorld|/|\n\n| ¾|é|+=",
    "smollm": "I|'|LL| | pay| don|'t| |1|2|3|4|5| helloWorld|/|\n\n |¾|é|+=",
    "default": "I|'|LL| | pay| don|'|t| |123|45| helloWorld|/|\n\n| |¾|é|+=",
    "llama-bpe": "I|'LL| | pay| don|'t| |123|45| helloWorld|/\n\n| |¾|é|+=",
    "qwen2": "I|'LL| | pay| don|'t| |1|2|3|4|5| helloWorld|/\n\n| |¾|é|+=",
    "gpt-4o": "I'LL| | pay| don't| |123|45| hello|World|/\n\n| |¾|é|+=",
    "tekken": "I|'LL| | pay| don|'t| |1|2|3|4|5| hello|World|/\n\n| |¾|é|+=",
}
SAME = {
    "gpt-2": [],
    "smollm": ["starcoder", "refact"],
    "default": [],
    "llama-bpe": ["llama3", "llama-v3", "smaug-bpe", "dbrx"],
    "qwen2": [],
    "gpt-4o": ["llama4"],
    "tekken": [],
}


@pytest.mark.parametrize(
    "name, like", [(name, like) for like, others in SAME.items() for name in (like, *others)]
)
def test_texts_are_cut_as_published(name, like):
    found = pre_tokenizers.BY_NAME[name].split().pre_tokenize_str(TEXT)
    assert "|".join(TEXT[begin:end] for _, (begin, end) in found) == WORDS[like]


def test_every_name_is_tested():
    names = {name for like, others in SAME.items() for name in (like, *others)}
    assert names == set(pre_tokenizers.BY_NAME)


@pytest.fixture
def build(tmp_path):
    """Build a tokenizer with this pre-tokenizer, and a token "abc" that no merges lead to."""

    def build(name, **changes):
        tokens, types, merges = model_files.tiny_tokens()
        metadata = model_files.gguf_metadata(model_files.tiny_config()) | {
            "tokenizer.ggml.tokens": [*tokens, "abc", "Ã©"],  # the last: é
            "tokenizer.ggml.token_type": [*types, 1, 1],
            "tokenizer.ggml.merges": [*merges, "Ã ©"],
            "tokenizer.ggml.pre": name,
        }
        return models.Tokenizer.from_gguf(
            model_files.write_gguf(tmp_path / "tiny.gguf", metadata | changes, {})
        )

    return build


@pytest.mark.parametrize("name, whole", [("llama-bpe", True), ("tekken", True), ("dbrx", False)])
def test_words_that_are_tokens_need_no_merges_where_merges_are_ignored(build, name, whole):
    tokenizer = build(name)
    assert (len(tokenizer.encode("abc")) == 1) == whole
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"


def test_qwen_composes_characters(build):
    assert build("qwen2").encode("e\u0301") == build("qwen2").encode("é")
    assert build("smollm").encode("e\u0301") != build("smollm").encode("é")


def test_bos_is_expected_by_default_where_models_of_that_name_do(build):
    assert build("llama-bpe").add_bos
    assert build("tekken").add_bos
    assert not build("smaug-bpe").add_bos
    assert not build("llama-bpe", **{"tokenizer.ggml.add_bos_token": False}).add_bos


def test_tokens_that_fill_the_table_stand_for_nothing(build):
    types = [*model_files.tiny_tokens()[1], 5, 1]
    tokenizer = build("llama-bpe", **{"tokenizer.ggml.token_type": types})
    assert tokenizer.token_bytes(262) == b""
    assert len(tokenizer.encode("abc")) == 3
    assert tokenizer.vocab_size == 264
