"""Tokenizers against an independent BPE and Hugging Face's recorded ids; streams and chats."""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import re

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxstate import models
from jaxstate.models import vocabulary_gguf

RECORDS = pathlib.Path(__file__).parents[1] / "serving" / "data" / "parity"
PROMPTS = json.loads((RECORDS / "smollm2-135m.json").read_text())
SETTINGS = hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
# SmolLM2's vocabulary has no token for these bytes (0xF1 and 0xF2 begin U+40000 to U+BFFFF).
MISSING_BYTES = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}
TEXT = st.text().map(lambda text: "".join(c for c in text if MISSING_BYTES.isdisjoint(c.encode())))


@pytest.fixture(scope="module")
def smollm2(smollm2_model):
    return smollm2_model.tokenizer


@pytest.fixture(scope="module")
def smollm2_vocabulary(smollm2_path):
    return vocabulary_gguf.from_gguf(models.GgufFile(smollm2_path))


@pytest.fixture(scope="module")
def byte_ids(smollm2):
    """Id by byte, of the bytes that SmolLM2 has a token for."""
    found = {smollm2.token_bytes(idx): idx for idx in range(17, smollm2.vocab_size)}
    return {byte: found[bytes([byte])] for byte in range(256) if bytes([byte]) in found}


@pytest.fixture(scope="module")
def smollm2_tables(smollm2_path):
    """Rank by merge, and id by token."""
    metadata = models.GgufFile(smollm2_path).metadata
    merges = metadata["tokenizer.ggml.merges"]
    tokens = metadata["tokenizer.ggml.tokens"]
    return (
        {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)},
        {token: idx for idx, token in enumerate(tokens)},
    )


def _plain_bpe(text: str, ranks, ids) -> list[int]:
    """Encode ASCII without control tokens, the slow and plain way.

    Split off digits, split the rest into words, then merge the best-ranked pair while there is one.
    """
    pattern = r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
    stand_ins = str.maketrans(" \t\n", "ĠĉĊ")
    encoded = []
    for isolated in re.split(r"([0-9])", text):
        for word in re.findall(pattern, isolated):
            parts = list(word.translate(stand_ins))
            while True:
                pairs = list(zip(parts, parts[1:], strict=False))
                best = min(pairs, key=lambda pair: ranks.get(pair, 1 << 30), default=None)
                if best not in ranks:
                    break
                where = pairs.index(best)
                parts[where : where + 2] = ["".join(best)]
            encoded += [ids[part] for part in parts]
    return encoded


@pytest.mark.parametrize("record", PROMPTS, ids=lambda record: record["prompt"])
def test_smollm2_ids_and_text_equal_hugging_face(smollm2, record):
    assert smollm2.encode(record["prompt"]) == record["ids"]
    assert smollm2.decode(record["new"]) == record["text"]


def test_smollm2_special_ids(smollm2):
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_id, smollm2.eos_ids, smollm2.add_bos) == (1, (2,), False)
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.chat_template.startswith("{% for message in messages %}")


@SETTINGS
@hypothesis.given(
    st.lists(
        st.sampled_from(
            ["The", " don't", " she'll", " ", "  ", "\n", "\t", "2024", " token", "..."]
        )
        | st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E))
    ).map("".join)
)
def test_smollm2_ascii_equals_plain_bpe(smollm2, smollm2_tables, text):
    assert smollm2.encode(text, parse_special=False) == _plain_bpe(text, *smollm2_tables)


@SETTINGS
@hypothesis.given(TEXT)
@hypothesis.example("Grüße, 東京 🙂👩‍👩‍👧 \r\n\t  x <|im_end|> ¾ ٣")
def test_decode_gives_back_what_was_encoded(smollm2, text):
    assert smollm2.decode(smollm2.encode(text)) == text
    assert smollm2.decode(smollm2.encode(text, parse_special=False)) == text


@SETTINGS
@hypothesis.given(st.lists(st.integers(0, 49_200)), st.booleans())
def test_streamed_text_equals_decode_of_all_ids(smollm2, ids, skip_special):
    detokenizer = models.Detokenizer(smollm2, skip_special=skip_special)
    pieces = [detokenizer.push(idx) for idx in ids] + [detokenizer.finish()]
    assert "".join(pieces) == smollm2.decode(ids, skip_special=skip_special)


@SETTINGS
@hypothesis.given(TEXT)
def test_streamed_text_never_shows_half_a_character(smollm2, text):
    detokenizer = models.Detokenizer(smollm2)
    shown = ""
    for idx in smollm2.encode(text):
        shown += detokenizer.push(idx)
        assert text.startswith(shown)
    assert shown == text
    assert detokenizer.finish() == ""


def test_character_cut_off_at_the_end_is_replaced(smollm2):
    ids = smollm2.encode("🙂")
    assert len(ids) > 1
    detokenizer = models.Detokenizer(smollm2)
    assert "".join(detokenizer.push(idx) for idx in ids[:-1]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert [detokenizer.push(idx) for idx in ids][-1] == "🙂"


def test_digits_are_split_one_by_one(smollm2):
    ids = smollm2.encode("2024 x12.5")
    pieces = [smollm2.decode([idx]) for idx in ids]
    assert pieces == ["2", "0", "2", "4", " x", "1", "2", ".", "5"]


def test_special_tokens_are_parsed_only_on_request(smollm2):
    text = "<|im_end|>"
    assert smollm2.encode(text) == [2]
    plain = smollm2.encode(text, parse_special=False)
    assert len(plain) > 1
    assert not any(smollm2.is_special(idx) for idx in plain)
    assert smollm2.decode([2, *plain], skip_special=True) == text


def test_bos_is_added_on_request(smollm2):
    assert smollm2.encode("a", add_bos=True) == [smollm2.bos_id, *smollm2.encode("a")]


def test_lone_surrogate_is_refused(smollm2):
    with pytest.raises(ValueError, match="lone surrogate at index 1"):
        smollm2.encode("a\ud800")


def test_ids_without_a_token_stand_for_nothing(smollm2):
    assert smollm2.token_bytes(smollm2.vocab_size) == b""
    with pytest.raises(ValueError, match="token id: expected 0 or more, got -1"):
        smollm2.decode([-1])


def test_tokens_give_their_bytes(smollm2):
    joined = b"".join(smollm2.token_bytes(idx) for idx in smollm2.encode("naïve 🙂"))
    assert joined == "naïve 🙂".encode()


def _characters(data: bytes) -> list[tuple[str, int]]:
    """Characters with where they end; what is no UTF-8 is replaced as Unicode recommends."""
    found, at = [], 0
    while at < len(data):
        try:
            length = next(n for n in range(1, 5) if _decodes(data[at : at + n]))
            found.append((data[at : at + length].decode(), at + length))
        except StopIteration:
            with pytest.raises(UnicodeDecodeError) as raised:
                data[at:].decode()
            length = raised.value.end
            found.append(("\ufffd", at + length))
        at += length
    return found


def _decodes(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


@SETTINGS
@hypothesis.given(
    st.lists(
        st.sampled_from([*"a🙂é東".encode(), 0xED, 0xA0, 0xF4, 0x90, 0xC0, 0xFF]), max_size=12
    ),
    st.integers(0, 12),
)
@hypothesis.example(list("🙂🙂".encode()), 2)
@hypothesis.example([0xF0, 0x9F, 0x61], 2)
@hypothesis.example([0xF0, 0x9F, 0x99, 0x61], 2)
@hypothesis.example([0xF0, 0x9F], 2)
def test_stream_shows_the_characters_that_its_ids_complete(smollm2, byte_ids, data, cut):
    data = [byte for byte in data if byte in byte_ids]
    ids = [byte_ids[byte] for byte in data]
    cut = min(cut, len(ids))
    detokenizer = models.Detokenizer(smollm2, context=ids[:cut])
    shown = "".join([*map(detokenizer.push, ids[cut:]), detokenizer.finish()])
    assert shown == "".join(char for char, end in _characters(bytes(data)) if end > cut)


def test_half_a_character_at_the_end_of_a_prompt_is_shown_whole_or_not_at_all(smollm2, byte_ids):
    begun = [byte_ids[byte] for byte in "no🙂".encode()[:-1]]
    completing, other = byte_ids["🙂".encode()[-1]], byte_ids[ord("a")]
    assert models.Detokenizer(smollm2, context=begun).push(completing) == "🙂"
    assert models.Detokenizer(smollm2, context=begun).push(other) == "a"
    assert models.Detokenizer(smollm2, context=begun).finish() == ""


def test_bos_is_never_doubled(smollm2):
    text = f"{smollm2.bos_token}user"
    assert smollm2.encode(text, add_bos=True) == smollm2.encode(text)
    assert smollm2.encode("user", add_bos=True) == smollm2.encode(text)
    # As plain text it is no BOS.
    plain = smollm2.encode(text, add_bos=True, parse_special=False)
    assert plain[0] == 1
    assert plain[1:] == smollm2.encode(text, parse_special=False)


def test_chat_has_the_templates_text_and_ids(smollm2_vocabulary, smollm2):
    messages = [{"role": "user", "content": "Hello"}]
    chat = smollm2.encode_chat(messages)
    assert chat.text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert chat.ids == smollm2.encode(chat.text)
    # The template begins with BOS, so a model that expects one gets one.
    expects = models.Tokenizer(dataclasses.replace(smollm2_vocabulary, add_bos=True))
    assert expects.encode_chat(messages) == chat
    assert not smollm2.encode_chat(messages, add_generation_prompt=False).text.endswith("stant\n")
    template = "{{ messages[0].content }}{% for t in tools or [] %}{{ t.name }}{% endfor %}{{ x }}"
    other = models.Tokenizer(
        dataclasses.replace(smollm2_vocabulary, chat_template=template, add_bos=True)
    )
    found = other.encode_chat(messages, tools=[{"name": "f"}], variables={"x": 7})
    assert found.text == "Hellof7"
    assert found.ids == smollm2.encode("Hellof7")  # the template decides against BOS


def test_model_without_template_gets_raw_text_with_one_warning(smollm2_vocabulary, caplog):
    base = models.Tokenizer(
        dataclasses.replace(smollm2_vocabulary, chat_template=None, add_bos=True)
    )
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}]
    with caplog.at_level(logging.WARNING):
        chats = [base.encode_chat(messages) for _ in range(2)]
    assert chats[0] == chats[1]
    assert chats[0].text == "Be.\n\nHi"
    assert chats[0].ids == base.encode("Be.\n\nHi", add_bos=True)
    assert [record.message for record in caplog.records] == [
        "the model has no chat template; messages go to it as raw text, without roles"
    ]


def test_broken_template_is_found_when_the_tokenizer_is_built(smollm2_vocabulary):
    with pytest.raises(ValueError, match="chat template: expected one that renders a user's"):
        models.Tokenizer(dataclasses.replace(smollm2_vocabulary, chat_template="{% for %}"))


@pytest.mark.parametrize(
    "left, right, forced",
    [
        ("The cap", "ital", True),
        ("The capital", " of France", False),
        ("a\n", "\n", True),
        ("a\n", "b", False),
        ("12", "34", False),
        ("a <|im_end|>", "\n", False),
        ("a <|im_", "end|>", True),
        ("", "a", True),  # behind a space
        ("a", "", False),
    ],
)
def test_forced_boundaries_are_found(smollm2, left, right, forced):
    left_ids = smollm2.encode("Some text before. " * 20 + left)
    assert smollm2.forced_boundary(left_ids, right) == forced


@SETTINGS
@hypothesis.given(TEXT, TEXT)
def test_boundary_is_forced_exactly_where_one_text_encodes_otherwise(smollm2, left, right):
    left_ids = smollm2.encode(left)[:32]
    left = smollm2.decode(left_ids)
    apart = smollm2.encode(left) + smollm2.encode(right)
    assert smollm2.forced_boundary(left_ids, right) == (smollm2.encode(left + right) != apart)
