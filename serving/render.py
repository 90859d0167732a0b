"""`jaxstate render`: a conversation exactly as the model sees it, text and token ids."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from jaxstate.models import loading
from jaxstate.models.tokenizer import Chat, Tokenizer
from jaxstate.serving import local_model, terminal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """What `render` was told on the command line.

    Attributes:
      system: text of a system message, or None.
      user: text of a user message, or None.
      messages: JSON file with a list of messages, put between the two, or None.
      tools: JSON file with a list of tools, or None.
      open_ended: leave out the header of the assistant's answer.
    """

    system: str | None
    user: str | None
    messages: pathlib.Path | None
    tools: pathlib.Path | None
    open_ended: bool


def run(
    model: str, conversation: Conversation, *, as_json: bool, cache_dir: pathlib.Path,
    out: Console, log: Console,
) -> None:
    """Print the text, and a line per token; or one JSON object.

    Raises:
      ValueError: unknown model, a file that holds no messages, or the template refuses them.
    """
    path = local_model.path_of(model, cache_dir, log)
    tokenizer = loading.load_tokenizer(path)
    chat = tokenizer.encode_chat(
        _messages(conversation),
        tools=_read_list(conversation.tools) if conversation.tools else None,
        add_generation_prompt=not conversation.open_ended,
    )
    if as_json:
        found = {"text": chat.text, "ids": chat.ids, "tokens": _tokens(tokenizer, chat)}
        out.file.write(json.dumps(found, ensure_ascii=False) + "\n")
        return
    out.file.write(chat.text + "\n")
    out.file.flush()
    terminal.say(log, f"\n{len(chat.ids)} tokens:")
    for token_id, text in zip(chat.ids, _tokens(tokenizer, chat), strict=True):
        mark = "  special" if tokenizer.is_special(token_id) else ""
        terminal.say(log, f"{token_id:>8}  {text!r}{mark}")


def _messages(conversation: Conversation) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    if conversation.system is not None:
        found.append({"role": "system", "content": conversation.system})
    if conversation.messages is not None:
        found += _read_list(conversation.messages)
    if conversation.user is not None:
        found.append({"role": "user", "content": conversation.user})
    if not found:
        raise ValueError("messages: expected at least one, got none; give --user or --messages")
    return found


def _read_list(path: pathlib.Path) -> Sequence[Mapping[str, Any]]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path}: expected JSON, got something else ({error}); correct the file"
        ) from error
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise ValueError(f"{path}: expected a list of objects, got {type(value).__name__}")
    return value


def _tokens(tokenizer: Tokenizer, chat: Chat) -> list[str]:
    """Return what each token stands for; bytes of a cut character as U+FFFD."""
    return [tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in chat.ids]
