"""Read the vocabulary of a Hugging Face directory: tokenizer.json and the files beside it."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import tokenizers

from jaxstate.models import fields as fields_lib
from jaxstate.models import pieces as pieces_lib
from jaxstate.models import vocabulary
from jaxstate.models.pieces import Pieces
from jaxstate.models.vocabulary import Vocabulary


def from_hf_dir(directory: pathlib.Path) -> Vocabulary:
    """Read tokenizer.json and, where present, the files beside it.

    These are tokenizer_config.json, generation_config.json and chat_template.jinja.

    Raises:
      ValueError: a file is missing or damaged, or the vocabulary is of a kind that language models
        do not have, as WordPiece.
    """
    backend, pieces = _backend(directory / "tokenizer.json")
    settings = _optional_json(directory / "tokenizer_config.json")
    bos_id = _token_id(backend, settings, "bos_token")
    ends = _optional_json(directory / "generation_config.json").values.get("eos_token_id")
    begins_with_bos = bos_id is not None and backend.encode("").ids[:1] == [bos_id]
    return Vocabulary(
        backend=backend,
        pieces=pieces,
        bos_id=bos_id,
        eos_ids=vocabulary.unique(
            [
                *(ends if isinstance(ends, list) else [ends]),
                _token_id(backend, settings, "eos_token"),
            ]
        ),
        add_bos=settings.flag("add_bos_token", begins_with_bos),
        chat_template=_chat_template(directory, settings),
    )


def _backend(path: pathlib.Path) -> tuple[tokenizers.Tokenizer, Pieces]:
    description = fields_lib.read_json(path)
    pieces = pieces_lib.from_decoder(description.get("decoder"), str(path))
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every defect
        raise ValueError(
            f"{path}: expected a tokenizer of the tokenizers library, got one it refuses "
            f"({error}); fetch the file again"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    return backend, pieces


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


def _chat_template(directory: pathlib.Path, settings: fields_lib.Fields) -> str | None:
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
