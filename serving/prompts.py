"""From what a client sends to token ids."""

from __future__ import annotations

import json
from typing import Any

from jaxstate.errors import InputError
from jaxstate.models.tokenizer import Chat, Tokenizer
from jaxstate.serving import jaxstate_pb2 as pb


def ids(
    prompt: pb.Prompt, field: str, tokenizer: Tokenizer | None, *, begins: bool = False
) -> list[int]:
    """Return a prompt's token ids; [] if it has none, which the verbs refuse where they need some.

    Args:
      field: where the prompt is in the message, for errors.
      begins: it begins a context, so that text gets the model's first token; else text goes on.
    Raises:
      InputError: text without a tokenizer, or text that it refuses.
    """
    kind = prompt.WhichOneof("kind")
    if kind is None:
        return []
    if kind == "tokens":
        return list(prompt.tokens.ids)
    if tokenizer is None:
        raise InputError(
            f"{field}.{kind}: expected tokens, got {kind}; this server has no tokenizer"
        )
    if kind == "chat":
        return chat(prompt.chat, f"{field}.chat", tokenizer).ids
    try:
        return tokenizer.encode(
            prompt.text.text, add_bos=begins and tokenizer.add_bos,
            parse_special=prompt.text.parse_special, continues=not begins,
        )  # fmt: skip
    except ValueError as error:
        raise InputError(f"{field}.text: {error}") from error


def chat(given: pb.Chat, field: str, tokenizer: Tokenizer) -> Chat:
    """Render a conversation in the model's own template.

    Raises:
      InputError: a message without role, the template refuses it, or its JSON is none.
    """
    for index, message in enumerate(given.messages):
        if not message.role:
            raise InputError(f"{field}.messages[{index}].role: expected one, got none")
    try:
        return tokenizer.encode_chat(
            [{"role": one.role, "content": one.content} for one in given.messages],
            add_generation_prompt=not given.without_generation_prompt,
            tools=_json(given.tools_json, f"{field}.tools_json", list),
            variables=_json(given.variables_json, f"{field}.variables_json", dict),
        )
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{field}.messages: {error}") from error


def _json(text: str, field: str, kind: type) -> Any:
    if not text:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{field}: expected JSON, got {error}") from error
    if not isinstance(found, kind):
        raise InputError(f"{field}: expected a JSON {kind.__name__}, got {type(found).__name__}")
    return found
