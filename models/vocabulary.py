"""Read the vocabulary of a model: GGUF metadata or a Hugging Face directory."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxstate.models import fields as fields_lib
from jaxstate.models.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """A byte-level BPE vocabulary as its files describe it.

    Attributes:
      backend: encodes text; control tokens are its special tokens.
      bos_id: id of the token that begins a text, or None.
      eos_ids: ids that end an answer, without repeats.
      add_bos: the model expects `bos_id` first.
      chat_template: Jinja source, or None.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None

    def __post_init__(self):
        """Check that the parts belong together."""
        size = self.size
        for name, idx in [("bos_id", self.bos_id), *(("eos_ids", idx) for idx in self.eos_ids)]:
            if idx is not None and (type(idx) is not int or not 0 <= idx < size):
                raise ValueError(
                    f"{name}: expected an id below {size}, got {idx!r}; the files of the "
                    "tokenizer do not belong together, fetch the model again"
                )
        if self.add_bos and self.bos_id is None:
            raise ValueError(
                "add_bos: expected a tokenizer with a bos_id, got none; the files of the "
                "tokenizer do not belong together, fetch the model again"
            )

    @property
    def size(self) -> int:
        """One more than the largest id that has a token."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def from_gguf(file: GgufFile) -> Vocabulary:
    """Read the tables of GGUF metadata.

    Raises:
      ValueError: no byte-level BPE vocabulary, an unknown pre-tokenizer, or damaged tables.
    """
    fields = file.fields
    kind = fields.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model: expected gpt2, got {kind!r}; use a model with a "
            "byte-level BPE tokenizer"
        )
    tokens = _strings(file, "tokenizer.ggml.tokens")
    backend = tokenizers.Tokenizer(_gguf_bpe(file, tokens))
    backend.pre_tokenizer = _pre_tokenizer(fields.text("tokenizer.ggml.pre"), file)
    backend.decoder = decoders.ByteLevel()
    types = file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        got = len(types) if isinstance(types, list) else repr(types)
        raise ValueError(
            f"{file.path}: tokenizer.ggml.token_type: expected {len(tokens)} values, got {got}; "
            "the file is damaged, fetch it again"
        )
    backend.add_special_tokens(_added(tokens, types, _CONTROL))
    backend.add_tokens(_added(tokens, types, _USER_DEFINED))
    ends = (file.metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom"))
    template = "tokenizer.chat_template"
    return Vocabulary(
        backend=backend,
        bos_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_ids=_unique(ends),
        add_bos=fields.flag("tokenizer.ggml.add_bos_token", False),
        chat_template=fields.text(template) if template in file.metadata else None,
    )


def from_hf_dir(directory: pathlib.Path) -> Vocabulary:
    """Read tokenizer.json and, where present, the files beside it.

    These are tokenizer_config.json, generation_config.json and chat_template.jinja.

    Raises:
      ValueError: a file is missing or damaged, or the vocabulary is not byte-level BPE.
    """
    backend = _hf_backend(directory / "tokenizer.json")
    settings = _optional_json(directory / "tokenizer_config.json")
    bos_id = _token_id(backend, settings, "bos_token")
    ends = _optional_json(directory / "generation_config.json").values.get("eos_token_id")
    begins_with_bos = bos_id is not None and backend.encode("").ids[:1] == [bos_id]
    return Vocabulary(
        backend=backend,
        bos_id=bos_id,
        eos_ids=_unique(
            [
                *(ends if isinstance(ends, list) else [ends]),
                _token_id(backend, settings, "eos_token"),
            ]
        ),
        add_bos=settings.flag("add_bos_token", begins_with_bos),
        chat_template=_hf_chat_template(directory, settings),
    )


def _strings(file: GgufFile, key: str) -> list[str]:
    values = file.metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(
            f"{file.path}: {key}: expected a list of strings, got {type(values).__name__}; the "
            "file has no complete tokenizer, use another one"
        )
    return values


def _gguf_bpe(file: GgufFile, tokens: list[str]) -> models.BPE:
    vocab = {token: idx for idx, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.tokens: expected {len(tokens)} different tokens, got "
            f"{len(vocab)}; the file is damaged, fetch it again"
        )
    merges = []
    for merge in _strings(file, "tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocab.keys():
            raise ValueError(
                f"{file.path}: tokenizer.ggml.merges: expected two tokens that form a third, got "
                f"{merge!r}; the file is damaged, fetch it again"
            )
        merges.append((left, right))
    return models.BPE(vocab=vocab, merges=merges)


def _added(tokens: list[str], types: list[int], wanted: int) -> list[tokenizers.AddedToken]:
    return [
        tokenizers.AddedToken(token, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind == wanted
    ]


def _unique(ids: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(idx for idx in ids if idx is not None))


def _gpt2_pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _gpt2_pre_tokenizer()]
    )


def _default_pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """What llama.cpp means by "default": four splits in a row."""
    patterns = (
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    )
    splits = [pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in patterns]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


_PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _default_pre_tokenizer,
    "gpt-2": _gpt2_pre_tokenizer,
    "smollm": _smollm_pre_tokenizer,
}


def _pre_tokenizer(name: str, file: GgufFile) -> pre_tokenizers.PreTokenizer:
    if name not in _PRE_TOKENIZERS:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre: expected one of {', '.join(_PRE_TOKENIZERS)}, got "
            f"{name!r}; use a model with a supported tokenizer"
        )
    return _PRE_TOKENIZERS[name]()


def _hf_backend(path: pathlib.Path) -> tokenizers.Tokenizer:
    description = fields_lib.read_json(path)
    decoder = description.get("decoder") or {}
    kind = decoder.get("type") if isinstance(decoder, dict) else decoder
    if kind != "ByteLevel":
        raise ValueError(
            f"{path}: decoder: expected ByteLevel, got {kind!r}; use a model with a byte-level BPE "
            "tokenizer"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every defect
        raise ValueError(
            f"{path}: expected a tokenizer of the tokenizers library, got one it refuses "
            f"({error}); fetch the file again"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _optional_json(path: pathlib.Path) -> fields_lib.Fields:
    return fields_lib.Fields(fields_lib.read_json(path) if path.is_file() else {}, str(path))


def _token_id(backend: tokenizers.Tokenizer, settings: fields_lib.Fields, key: str) -> int | None:
    """Return the id of a token named in tokenizer_config.json, as text or as {"content": text}."""
    value = settings.values.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return None
    token_id = backend.token_to_id(text) if isinstance(text, str) else None
    if token_id is None:
        raise ValueError(
            f"{settings.origin}: {key}: expected a token of tokenizer.json, got {text!r}; the "
            "files do not belong together, fetch the model again"
        )
    return token_id


def _hf_chat_template(directory: pathlib.Path, settings: fields_lib.Fields) -> str | None:
    """Return the template; of several named ones, the one called "default"."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.values.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, Mapping)]
        template = {entry.get("name"): entry.get("template") for entry in named}.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f"{settings.origin}: chat_template: expected a string or a list of named ones, got "
            f"{type(template).__name__}; fetch the file again"
        )
    return template
