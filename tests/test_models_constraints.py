"""Which tokens may come next, against languages written out and the tokenizers' own library."""

from __future__ import annotations

import itertools
import json
import random
import re
import threading

import model_files
import numpy as np
import plain_sentencepiece
import pytest
import tokenizers
from tokenizers import decoders

from jaxstate import models
from jaxstate.models import constraints
from jaxstate.models.constraints import Constraints

TEXTS = ("a ba ab ha = h a <s> ab é", " ab", "  a", "ha haha é.", '{"a": 11}\n', "東京 🙂")
FINITE = r"(ab|ha é|a b)(=|==|\n)?(é{1,2}|11)"
LANGUAGE = {
    "".join(parts).encode()
    for parts in itertools.product(
        ("ab", "ha é", "a b"), ("", "=", "==", "\n"), ("é", "éé", "11")
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def by_name(tmp_path_factory, smollm2_path):
    """Tokenizers of every kind."""
    folder = tmp_path_factory.mktemp("tokenizers")
    byte_level = model_files.gguf_metadata(model_files.tiny_config())
    found = {"smollm2": models.Tokenizer.from_gguf(smollm2_path)}
    for name, values in {
        "byte-level": byte_level,
        "llama2": plain_sentencepiece.metadata(),
        "gemma": plain_sentencepiece.metadata(add_space_prefix=False),
    }.items():
        path = model_files.write_gguf(folder / f"{name}.gguf", values, {})
        found[name] = models.Tokenizer.from_gguf(path)
    return found


@pytest.fixture(params=["smollm2", "byte-level", "llama2", "gemma"])
def tokenizer(by_name, request):
    return by_name[request.param]


def _allowed(matcher, count):
    """Ids that the matcher allows."""
    bits = np.unpackbits(matcher.allowed.view(np.uint8), bitorder="little")
    assert not bits[count:].any()
    return set(np.flatnonzero(bits).tolist())


def test_the_allowed_tokens_are_those_that_begin_a_text_of_the_language(tokenizer):
    ids = range(tokenizer.vocab_size)
    pieces = {
        idx: tokenizer.token_bytes(idx)
        for idx in ids
        if not tokenizer.is_special(idx) and tokenizer.token_bytes(idx)
    }
    beginnings = {text[:end] for text in LANGUAGE for end in range(len(text) + 1)}
    rng = random.Random(1)
    for _ in range(6):
        matcher, text = tokenizer.constraints.compiled("regex", FINITE).matcher(), b""
        while True:
            expected = {idx for idx, piece in pieces.items() if text + piece in beginnings}
            assert _allowed(matcher, tokenizer.vocab_size) == expected
            assert matcher.may_end == (text in LANGUAGE)
            assert matcher.is_finished == (matcher.may_end and not expected)
            if not expected:
                break
            idx = rng.choice(sorted(expected))
            matcher.accept(idx)
            text += pieces[idx]
        assert text in LANGUAGE


def test_tokens_stand_for_what_their_library_decodes_them_to(tokenizer):
    library = tokenizers.Tokenizer.from_str(tokenizer.vocabulary.backend.to_str())
    library.decoder = decoders.ByteLevel()
    if tokenizer.vocabulary.pieces.alphabet == "text":
        blank = decoders.Replace("▁", " ")
        library.decoder = decoders.Sequence([blank, decoders.ByteFallback(), decoders.Fuse()])
    matcher = tokenizer.constraints.compiled("regex", r"[^é0-9]+").matcher()
    allowed = _allowed(matcher, tokenizer.vocab_size)
    checked = 0
    for idx in range(tokenizer.vocab_size):
        text = library.decode([idx], skip_special_tokens=False)
        if "\ufffd" not in text:  # else it is a part of a character
            is_text = text != "" and not tokenizer.is_special(idx)
            assert (idx in allowed) == (is_text and not re.search("[é0-9]", text)), text
            checked += is_text
    assert checked > 100


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_followed_through_its_own_tokens_and_every_other_cut_of_it(tokenizer, text):
    compiled = tokenizer.constraints.compiled("regex", re.escape(text).replace("\\ ", " "))
    canonical = tokenizer.encode(text, parse_special=False, continues=True)
    single = {tokenizer.token_bytes(idx): idx for idx in reversed(range(tokenizer.vocab_size))}
    by_bytes = [single[bytes([byte])] for byte in text.encode()]
    for ids in (canonical, by_bytes):
        matcher = compiled.matcher()
        for idx in ids:
            assert idx in _allowed(matcher, tokenizer.vocab_size) and not matcher.may_end
            matcher.accept(idx)
        assert matcher.is_finished


def test_control_tokens_are_no_text(by_name):
    tokenizer = by_name["byte-level"]
    for kind, text in (
        ("regex", r"(?s:.)*"), ("grammar", "start: /(?s:.)/*"),
        ("grammar", 'start: "<|im_end|>"'), ("grammar", 'start: <[1]> | "a"'),
    ):  # fmt: skip
        matcher = tokenizer.constraints.compiled(kind, text).matcher()
        assert not _allowed(matcher, tokenizer.vocab_size) & {0, 1, 2}
        assert _allowed(matcher, tokenizer.vocab_size)


def test_equal_bytes_are_equally_allowed_and_none_are_never():
    tokens = [b"", b"a", b"a", b"\xff", b"b", b"ab", b"\xff<end>"]
    matcher = Constraints(tokens).compiled("regex", "a?b").matcher()
    assert _allowed(matcher, 7) == {1, 2, 4, 5}
    matcher.accept(2)
    assert _allowed(matcher, 7) == {4}


@pytest.mark.parametrize(
    "kind, text, words",
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)a", "look-around"),
        ("regex", "", "allows none"),
        ("regex", r"[^\s\S]", "no token"),
        ("regex", "x", "no token"),
        ("json_schema", "{", "schema in JSON"),
        ("json_schema", "[" * 100_000, "schema in JSON"),
        ("json_schema", '{"type": "text"}', "Invalid type: text"),
        ("json_schema", '{"not": {}}', "Unimplemented"),
        ("json_schema", "false", "Unsatisfiable"),
        ("json_schema", '{"$ref": "https://example.com/a.json"}', "not present"),
        ("grammar", "start: foo", 'unknown name: "foo"'),
        ("grammar", "begin: /a/", "start"),
        ("grammar", "start: <|im_end|>", "unknown special token"),
        ("grammar", "start: <[0]>", "no token"),
        ("grammar", "start: " + "(" * 50_000, "nested"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_one_line(kind, text, words):
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        Constraints([b"", b"a", b"b"]).compiled(kind, text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_vocabulary_without_what_must_come_is_told_when_it_comes():
    matcher = Constraints([b"a", b"b"]).compiled("regex", "abc|b").matcher()
    matcher.accept(0)
    with pytest.raises(ValueError, match="no token of this model goes on"):
        matcher.accept(1)


def test_what_all_texts_of_a_constraint_have_found_is_no_limit_to_the_next(monkeypatch):
    monkeypatch.setattr(
        constraints, "_LIMITS",
        constraints.llguidance.LLParserLimits(max_lexer_states=250, verbose_errors=False),
    )  # fmt: skip
    anew = []
    monkeypatch.setattr(
        constraints.Compiled, "begin_anew",
        lambda self, plain=constraints.Compiled.begin_anew: anew.append(1) or plain(self),
    )  # fmt: skip
    compiled = Constraints([b"a", b"b", b"ab"]).compiled("regex", "[ab]*a[ab]{9}=?")
    for seed in range(4):
        rng, matcher, text = random.Random(seed), compiled.matcher(), ""
        for _ in range(40):
            assert _allowed(matcher, 3) == {0, 1, 2}
            assert matcher.may_end == bool(re.fullmatch("[ab]*a[ab]{9}", text))
            idx = rng.randrange(3)
            matcher.accept(idx)
            text += ("a", "b", "ab")[idx]
    assert anew


@pytest.mark.parametrize("text", ["[ab]*a[ab]{9}=?", "([ab]*a[ab]{9}){9}" + "=" * 20_000])
def test_a_text_starts_a_constraint_anew_once_at_most_and_only_where_that_is_cheap(
    monkeypatch, text
):
    limits = constraints.llguidance.LLParserLimits
    monkeypatch.setattr(constraints, "_LIMITS", limits(max_lexer_states=40, verbose_errors=False))
    starts, start = [], Constraints.start
    monkeypatch.setattr(
        Constraints, "start", lambda self, grammar: starts.append(1) or start(self, grammar)
    )
    compiled = Constraints([b"a", b"b", b"ab", b"="]).compiled("regex", text)
    rng, matcher = random.Random(1), compiled.matcher()
    with pytest.raises(ValueError, match="too many states"):
        for _ in range(200):
            matcher.accept(rng.randrange(2))
    assert len(starts) == (1 if len(text) > 1000 else 2)


def test_what_a_fresh_start_would_not_help_is_not_started_anew(monkeypatch):
    starts, start = [], Constraints.start
    monkeypatch.setattr(
        Constraints, "start", lambda self, grammar: starts.append(1) or start(self, grammar)
    )
    schema = {"properties": {f"p{n}": {"type": "string"} for n in range(600)}}
    compiled = Constraints([bytes([n]) for n in range(255)]).compiled(
        "json_schema", json.dumps(schema)
    )
    matcher = compiled.matcher()
    with pytest.raises(ValueError, match="items"):
        for byte in b'{"p599":"a","p':
            matcher.accept(byte)
    assert starts == [1]


def test_a_grammar_whose_steps_take_ever_longer_is_given_up_soon():
    grammar = 'start: e\ne: e "+" e | e e | "a" | "b"'
    matcher = Constraints([b"aaaa", b"b"]).compiled("grammar", grammar).matcher()
    with pytest.raises(ValueError, match="items"):
        for _ in range(100):
            matcher.accept(0)


def test_a_schema_of_a_hundred_properties_is_kept_whichever_come():
    names = [f"property{n}" for n in range(100)]
    schema = {"properties": {name: {"type": ["string", "integer", "null"]} for name in names}}
    compiled = Constraints([bytes([n]) for n in range(255)]).compiled(
        "json_schema", json.dumps(schema)
    )
    for few in (names[:1], names[-2:], names[::7], names):
        matcher = compiled.matcher()
        for byte in json.dumps(dict.fromkeys(few, "x")).encode():
            matcher.accept(byte)
        assert matcher.may_end


def test_many_threads_compile_and_follow_the_same_constraints(by_name):
    tokenizer, failed = by_name["byte-level"], []

    def follow(seed):
        rng = random.Random(seed)
        for turn in range(20):
            matcher = tokenizer.constraints.compiled("regex", f"[a-f]{{{turn + 1}}}").matcher()
            count = 0
            while not matcher.is_finished:
                matcher.accept(rng.choice(sorted(_allowed(matcher, tokenizer.vocab_size))))
                count += 1
            if count != turn + 1:
                failed.append((turn, count))

    threads = [threading.Thread(target=follow, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
