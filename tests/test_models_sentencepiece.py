"""SentencePiece vocabularies of both formats, against plain BPE with scores and the library."""

from __future__ import annotations

import json
import math

import hypothesis
import model_files
import plain_sentencepiece
import pytest
import tokenizers
from hypothesis import strategies as st

from jaxstate import models

SETTINGS = hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
RUNS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "ab", "=", " ", "ha", ".", "é", "東", "\n", "</"]),
              st.integers(1, 20))
).map(lambda runs: "".join(text * count for text, count in runs))  # fmt: skip
BEGUN = "<s> ▁ ▁▁ ▁a a é <0x20> <0xE6> <0x9D> </s>".split()


@pytest.fixture(scope="module")
def build_gguf(tmp_path_factory):
    """Build a tokenizer from the tiny vocabulary with changed metadata (None removes a key)."""

    def build(changes=(), *, architecture="llama", **options):
        values = plain_sentencepiece.metadata(**options) | dict(changes)
        values = {key: value for key, value in values.items() if value is not None}
        path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
        model_files.write_gguf(path, values, {}, architecture=architecture)
        return models.Tokenizer.from_gguf(path)

    return build


@pytest.fixture(scope="module")
def build_hf(tmp_path_factory):
    """Build a tokenizer, and the library's own, from the contents of a tokenizer.json."""

    def build(contents):
        directory = tmp_path_factory.mktemp("hf")
        (directory / "tokenizer.json").write_text(json.dumps(contents))
        library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        return models.Tokenizer.from_hf_dir(directory), library

    return build


@pytest.fixture(scope="module")
def llama2(build_gguf):
    """With a space before each text."""
    return build_gguf()


@pytest.fixture(scope="module")
def gemma(build_gguf):
    """Without."""
    return build_gguf(add_space_prefix=False)


@SETTINGS
@hypothesis.given(RUNS, st.booleans())
def test_ids_equal_plain_bpe_with_scores(gemma, llama2, text, prefix):
    tokenizer = llama2 if prefix else gemma
    expected = plain_sentencepiece.encode(text, add_space_prefix=prefix)
    assert tokenizer.encode(text) == tokenizer.encode(text, parse_special=False) == expected
    assert tokenizer.decode(expected) == text


@SETTINGS
@hypothesis.given(RUNS, RUNS)
def test_text_that_continues_another_gets_no_space(llama2, first, second):
    continued = llama2.encode(second, continues=True)
    assert continued == plain_sentencepiece.encode(second, add_space_prefix=False)
    assert llama2.decode(llama2.encode(first) + continued) == first + second or not first


def test_only_the_stretch_that_continues_gets_no_space(llama2):
    a, blank_a = llama2.encode("a", continues=True), llama2.encode("a")
    assert a != blank_a
    assert llama2.encode("a</s>a", continues=True) == [*a, 2, *blank_a]
    assert llama2.encode("a</s>a") == [*blank_a, 2, *blank_a]
    assert llama2.encode("</s>a", continues=True) == [2, *blank_a]


def test_control_tokens_never_come_from_plain_text(llama2):
    assert llama2.encode("<s>") == [1]
    assert not {1, 2} & set(llama2.encode("<s></s>", parse_special=False))
    assert llama2.encode("<0x0A>") == plain_sentencepiece.encode("<0x0A>")


def test_bos_is_expected_unless_the_file_says_otherwise(build_gguf, llama2):
    assert llama2.add_bos
    assert not build_gguf({"tokenizer.ggml.add_bos_token": False}).add_bos
    assert not build_gguf({"tokenizer.ggml.bos_token_id": None}).add_bos


def test_user_defined_tokens_are_taken_whole_and_their_spaces_restored(build_gguf):
    names, types, scores = plain_sentencepiece.tokens()
    for piece in ("▁▁", "▁▁▁▁"):
        at = names.index(piece)
        names[at], types[at], scores[at] = piece.replace("▁", " "), 4, -1000.0
    tokenizer = build_gguf({
        "tokenizer.ggml.tokens": names, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
    }, add_space_prefix=False)  # fmt: skip
    assert tokenizer.token_bytes(at) == b"    "
    # They go before "▁a", the best of the others.
    assert tokenizer.encode("    a") == [at, names.index("a")]
    assert tokenizer.encode("▁▁▁▁a") == [at, names.index("a")]


def test_phi3_swallows_blanks_behind_control_tokens(build_gguf, llama2):
    phi3 = build_gguf(architecture="phi3")
    assert phi3.encode("a</s> \n a") == phi3.encode("a</s>a") == llama2.encode("a</s>a")
    assert llama2.encode("a</s> a") != llama2.encode("a</s>a")
    assert phi3.encode("<s> a") == llama2.encode("<s> a")


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("skip_special", [True, False])
def test_text_read_back_equals_the_library(build_hf, legacy, skip_special):
    tokenizer, library = build_hf(plain_sentencepiece.tokenizer_json(legacy=legacy))

    @SETTINGS
    @hypothesis.given(st.lists(st.sampled_from(BEGUN), max_size=3), RUNS)
    def check(begun, text):
        tail = tokenizer.encode(text)
        assert tail == library.encode(text, add_special_tokens=False).ids
        ids = [library.token_to_id(token) for token in begun] + tail
        expected = library.decode(ids, skip_special_tokens=skip_special)
        if "\ufffd" not in expected:  # which the library shows once for each byte
            assert tokenizer.decode(ids, skip_special=skip_special) == expected

    check()


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_unigram_with_metaspace_equals_the_library(build_hf, scheme):
    pieces = [["<unk>", 0.0], ["▁", -2.0], ["▁▁", -1.0], ["a", -3.0], ["▁a", -1.5], ["b", -3.0]]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}
    tokenizer, library = build_hf({
        "version": "1.0", "added_tokens": [], "pre_tokenizer": metaspace, "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces},
    })  # fmt: skip
    for text in ("a b", " a", "   b a", "ab", ""):
        ids = library.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == library.decode(ids)
    for ids in ([1], [2, 1, 3], [1, 1, 3], [3, 2, 2], [4, 4]):
        assert tokenizer.decode(ids) == library.decode(ids)
    assert tokenizer.decode(tokenizer.encode("b", continues=True)) == "b"
    assert tokenizer.encode("b", continues=True) == [5]


@SETTINGS
@hypothesis.given(st.lists(st.integers(0, 310)), st.booleans())
@hypothesis.example([300, 259], False)  # no token, then "▁a", which begins the text
def test_streamed_text_equals_decode_of_all_ids(llama2, ids, skip_special):
    detokenizer = models.Detokenizer(llama2, skip_special=skip_special)
    pieces = [detokenizer.push(idx) for idx in ids] + [detokenizer.finish()]
    assert "".join(pieces) == llama2.decode(ids, skip_special=skip_special)


def test_the_first_token_of_an_answer_keeps_its_space(llama2):
    (answer,) = llama2.encode("a")
    assert models.Detokenizer(llama2).push(answer) == "a"
    behind = models.Detokenizer(llama2, skip_special=True, context=[1, *llama2.encode("b")])
    assert behind.push(answer) == " a"
    begins = models.Detokenizer(llama2, skip_special=True, context=[1])
    assert begins.push(answer) == "a"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokenizer.ggml.scores": None}, "scores: expected 290 values, got None"),
        ({"tokenizer.ggml.scores": [0.0]}, "scores: expected 290 values, got 1"),
        ({"tokenizer.ggml.scores": [math.nan] * 290}, "scores: expected finite numbers, got nan"),
    ],
)
def test_damaged_scores_are_refused(build_gguf, changes, message):
    with pytest.raises(ValueError, match=message):
        build_gguf(changes)
