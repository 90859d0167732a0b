"""Turn chat messages into a prompt with a model's own Jinja template, sandboxed."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import sandbox

Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant" | …, "content": text, …}."""


def render(
    messages: Sequence[Message],
    template: str,
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    now: datetime.datetime | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render messages as the model was trained to see them.

    Templates come with weights, so they run sandboxed: no attribute tricks, no changes to the
    messages, no files.

    Args:
      template: Jinja source, e.g. Tokenizer.chat_template.
      add_generation_prompt: end with the header of the assistant's answer.
      now: what `strftime_now` in the template formats; the local time if None.
      variables: more names for the template, e.g. {"tools": […]}.
    Raises:
      ValueError: a message without role, or the template is faulty or refuses the messages.
    """
    for message_idx, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(
                f"messages[{message_idx}]: expected a mapping with role and content, got "
                f"{message!r}; give for example {{'role': 'user', 'content': 'Hello'}}"
            )
    names = {
        **(variables or {}),
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    try:
        return _environment(now).from_string(template).render(names)
    except (jinja2.TemplateError, TypeError, ArithmeticError, LookupError) as error:
        raise ValueError(
            f"chat template: expected messages that it accepts, got an error "
            f"({error}); change the roles or their order, or give another template"
        ) from error


def _environment(now: datetime.datetime | None) -> sandbox.ImmutableSandboxedEnvironment:
    """Offer what Hugging Face offers to templates."""
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def strftime_now(format: str) -> str:
        return (now or datetime.datetime.now()).strftime(format)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
