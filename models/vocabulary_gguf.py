"""Read the vocabulary in GGUF metadata: byte-level BPE, or SentencePiece BPE with scores."""

from __future__ import annotations

import math
from typing import Any

import tokenizers
from tokenizers import models, normalizers

from jaxstate.models import pre_tokenizers, vocabulary
from jaxstate.models.gguf_file import GgufFile
from jaxstate.models.pieces import BLANK, Pieces
from jaxstate.models.vocabulary import Vocabulary

# Of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = range(1, 6)
# Files of instruct models often name only the token that ends a document.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")


def from_gguf(file: GgufFile) -> Vocabulary:
    """Read the tables of GGUF metadata.

    Raises:
      ValueError: another kind of vocabulary, an unknown pre-tokenizer, or damaged tables.
    """
    fields = file.fields
    kind = fields.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model: expected gpt2 or llama, got {kind!r}; use a model "
            "with a byte-level BPE or a SentencePiece BPE tokenizer"
        )
    tokens, types = _tables(file)
    bos_id = file.metadata.get("tokenizer.ggml.bos_token_id")
    if kind == "gpt2":
        backend, pieces, add_bos = _byte_level(file, tokens, types)
    else:
        tokens = [
            # Converters write the spaces of these tokens out.
            token.replace(" ", BLANK) if kind == _USER_DEFINED else token
            for token, kind in zip(tokens, types, strict=True)
        ]
        backend, pieces = _sentencepiece(file, tokens, types)
        add_bos = True
    # Phi-3's tokenizer swallows blanks behind its control tokens, of which GGUF knows nothing.
    swallows = kind == "llama" and file.metadata.get("general.architecture") == "phi3"
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(
                token,
                normalized=False,
                rstrip=swallows and token not in ("<unk>", "<s>", "<|endoftext|>"),
            )
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _UNKNOWN)
        ]
    )
    backend.add_tokens(
        [
            tokenizers.AddedToken(token, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _USER_DEFINED
        ]
    )
    ends = [file.metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    ends += [
        idx
        for idx, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == _CONTROL and token in _TURN_ENDS
    ]
    template = "tokenizer.chat_template"
    return Vocabulary(
        backend=backend,
        pieces=pieces,
        bos_id=bos_id,
        eos_ids=vocabulary.unique(ends),
        add_bos=fields.flag("tokenizer.ggml.add_bos_token", add_bos and bos_id is not None),
        chat_template=fields.text(template) if template in file.metadata else None,
    )


def _tables(file: GgufFile) -> tuple[list[str], list[int]]:
    """Return token strings and types."""
    tokens = _strings(file, "tokenizer.ggml.tokens")
    return tokens, _column(file, "tokenizer.ggml.token_type", len(tokens))


def _byte_level(
    file: GgufFile, tokens: list[str], types: list[int]
) -> tuple[tokenizers.Tokenizer, Pieces, bool]:
    name = file.fields.text("tokenizer.ggml.pre")
    if name not in pre_tokenizers.BY_NAME:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre: expected one of "
            f"{', '.join(pre_tokenizers.BY_NAME)}, got {name!r}; use a model with a supported "
            "tokenizer"
        )
    pre = pre_tokenizers.BY_NAME[name]
    vocab = _vocab(file, tokens, types)
    merges = []
    for merge in _strings(file, "tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocab.keys():
            raise ValueError(
                f"{file.path}: tokenizer.ggml.merges: expected two tokens that form a third, got "
                f"{merge!r}; the file is damaged, fetch it again"
            )
        merges.append((left, right))
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre.split()
    normalizer = pre.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    return backend, Pieces(alphabet="bytes"), pre.add_bos


def _sentencepiece(
    file: GgufFile, tokens: list[str], types: list[int]
) -> tuple[tokenizers.Tokenizer, Pieces]:
    vocab = _vocab(file, tokens, types)
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    model = models.BPE(
        vocab=vocab,
        merges=_merges(vocab, types, _column(file, "tokenizer.ggml.scores", len(tokens))),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    # As in the first converters: a space goes before the text and behind each control token.
    prefix = file.fields.flag("tokenizer.ggml.add_space_prefix", True)
    blanks = normalizers.Replace(" ", BLANK)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(BLANK), blanks]) if prefix else blanks
    )
    strip = "space" if prefix else "nothing"
    return backend, Pieces(alphabet="text", byte_fallback=True, strip=strip)


def _merges(vocab: dict[str, int], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Order all pairs that form a token as SentencePiece merges them: best score first.

    Pairs that form the same token have equal scores, and SentencePiece takes the leftmost. The
    library ranks pairs instead; longer left parts first comes to the same in runs of one
    character, where such pairs overlap. Control tokens are never formed from text.
    """
    found = []
    for token, idx in vocab.items():
        kind = types[idx]
        if kind not in (_NORMAL, _USER_DEFINED):
            continue
        score = scores[idx] if kind == _NORMAL else 0.0  # which SentencePiece gives the latter
        for cut in range(1, len(token)):
            right = token[cut:]  # the rarer of the two
            if right in vocab and token[:cut] in vocab:
                found.append((score, cut, len(right), token[:cut], right))
    found.sort(reverse=True)
    return [pair[3:] for pair in found]


def _vocab(file: GgufFile, tokens: list[str], types: list[int]) -> dict[str, int]:
    """Return id by token, without those that only fill the table."""
    vocab = {token: idx for idx, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.tokens: expected {len(tokens)} different tokens, got "
            f"{len(vocab)}; the file is damaged, fetch it again"
        )
    return {token: idx for token, idx in vocab.items() if types[idx] != _UNUSED}


def _strings(file: GgufFile, key: str) -> list[str]:
    values = file.metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(
            f"{file.path}: {key}: expected a list of strings, got {type(values).__name__}; the "
            "file has no complete tokenizer, use another one"
        )
    return values


def _column(file: GgufFile, key: str, length: int) -> list[Any]:
    """Return one finite number for each token."""
    values = file.metadata.get(key)
    if not isinstance(values, list) or len(values) != length:
        got = len(values) if isinstance(values, list) else repr(values)
        raise ValueError(
            f"{file.path}: {key}: expected {length} values, got {got}; the file is damaged, fetch "
            "it again"
        )
    for value in values:
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(
                f"{file.path}: {key}: expected finite numbers, got {value!r}; the file is damaged, "
                "fetch it again"
            )
    return values
