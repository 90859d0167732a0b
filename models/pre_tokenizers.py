"""The pre-tokenizers of byte-level BPE vocabularies, by the names that GGUF files give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tokenizers
from tokenizers import normalizers, pre_tokenizers

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words_and_digits(digits: str) -> str:
    """Words with the character before them, digits, signs with the lines they end."""
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
    )


def _cased_words_and_digits(contraction: str, digits: str) -> str:
    """As above, and a word ends before the upper-case letter of the next one."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{_UPPER}*{_LOWER}+{contraction}|{before}{_UPPER}+{_LOWER}*{contraction}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
    )


_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_apart() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _splits(*patterns: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in patterns]
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, bytes_only])

    return build


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """What a name in GGUF metadata says about encoding.

    Attributes:
      split: builds what cuts a text into words; merges never cross them.
      ignore_merges: a word that is a token becomes that token, even where no merges lead to it.
      nfc: texts are normalized to NFC first.
      add_bos: texts begin with BOS unless the file says otherwise.
    """

    split: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        """Build what changes a text before it is cut, if anything does."""
        return normalizers.NFC() if self.nfc else None


_UP_TO_3_DIGITS = _splits(_words_and_digits(r"\p{N}{1,3}"))
_LLAMA3 = PreTokenizer(split=_UP_TO_3_DIGITS, ignore_merges=True, add_bos=True)
_GPT_4O = PreTokenizer(split=_splits(_cased_words_and_digits(f"{_CONTRACTION}?", r"\p{N}{1,3}")))
_DIGITS_APART = PreTokenizer(split=_digits_apart)

BY_NAME = {
    "default": PreTokenizer(split=_splits(*_DEFAULT)),  # as llama.cpp means it
    "gpt-2": PreTokenizer(split=_gpt2),
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,  # Granite
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "smaug-bpe": PreTokenizer(split=_UP_TO_3_DIGITS),  # SmolLM3
    "dbrx": PreTokenizer(split=_UP_TO_3_DIGITS),  # Phi-4
    "gpt-4o": _GPT_4O,  # Phi-4-mini
    "llama4": _GPT_4O,
    "qwen2": PreTokenizer(split=_splits(_words_and_digits(r"\p{N}")), nfc=True),
    "tekken": PreTokenizer(  # Mistral NeMo and later
        split=_splits(_cased_words_and_digits("", r"\p{N}")), ignore_merges=True, add_bos=True
    ),
}
"""Source: the files' own tokenizer.json where one exists; ggml-org/llama.cpp,
src/llama-vocab.cpp, for which model has which name and for the flags."""
