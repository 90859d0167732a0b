"""Turn chat messages into a prompt with a model's own Jinja template, sandboxed."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes, parser, sandbox

Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant" | …, "content": text, …}."""

_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    LookupError,
    RecursionError,
)


def render(
    messages: Sequence[Message],
    template: str,
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    now: datetime.datetime | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render messages as the model was trained to see them.

    Templates come with weights, so they run sandboxed: no attribute tricks, no changes to the
    messages, no files.

    Args:
      template: Jinja source, e.g. Tokenizer.chat_template.
      add_generation_prompt: end with the header of the assistant's answer.
      tools: what the model may call, as JSON schemas: [{"type": "function", "function": {…}}, …].
      documents: what the model may cite: [{"title": …, "text": …}, …].
      now: what `strftime_now` in the template formats; the local time if None.
      variables: more names for the template, e.g. {"enable_thinking": False}.
    Raises:
      ValueError: a message without role, or the template is faulty or refuses the messages.
    """
    _check_roles(messages)
    names = {
        **(variables or {}),
        "messages": messages,
        "tools": tools,
        "documents": documents,
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    try:
        return _environment(now).from_string(template).render(names)
    except _FAULTS as error:
        raise ValueError(
            f"chat template: expected messages that it accepts, got an error "
            f"({_reason(error)}); change the roles or their order, or give another template"
        ) from error


def check(template: str, *, bos_token: str = "", eos_token: str = "") -> None:
    """Render a short conversation, so that a broken template is found when a model is loaded.

    Raises:
      ValueError: the template is faulty, or makes nothing of a user's message.
    """
    probe = "jaxstate"
    try:
        text = render(
            [{"role": "user", "content": probe}],
            template,
            bos_token=bos_token,
            eos_token=eos_token,
        )
    except ValueError as error:
        raise ValueError(
            f"chat template: expected one that renders a user's message, got an error "
            f"({_reason(error.__cause__ or error)}); fetch the model again or give another template"
        ) from error
    if probe not in text:
        raise ValueError(
            "chat template: expected a user's message in what it renders, got a text without it; "
            "fetch the model again or give another template"
        )


def raw_text(messages: Sequence[Message]) -> str:
    """Return the messages' texts, joined by blank lines, for models without a template.

    Raises:
      ValueError: a message without role, or with a content that is not text.
    """
    _check_roles(messages)
    for message_idx, message in enumerate(messages):
        if not isinstance(message.get("content"), str):
            raise ValueError(
                f"messages[{message_idx}]: expected a text as content, got "
                f"{message.get('content')!r}; without a chat template only text can be put"
            )
    return "\n\n".join(message["content"] for message in messages)


def _check_roles(messages: Sequence[Message]) -> None:
    for message_idx, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(
                f"messages[{message_idx}]: expected a mapping with role and content, got "
                f"{message!r}; give for example {{'role': 'user', 'content': 'Hello'}}"
            )


class _Generation(ext.Extension):
    """{% generation %} … {% endgeneration %}, which marks what a model is trained on."""

    tags = {"generation"}

    def parse(self, parser: parser.Parser) -> nodes.Node:
        """Keep what is inside, in a scope of its own as Hugging Face does."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment(now: datetime.datetime | None) -> sandbox.ImmutableSandboxedEnvironment:
    """Offer what Hugging Face offers to templates."""
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _Generation]
    )

    def strftime_now(format: str) -> str:
        return (now or datetime.datetime.now()).strftime(format)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _reason(error: BaseException) -> str:
    """Say in one line what is wrong."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{error.message}, line {error.lineno}"
    return str(error) or type(error).__name__


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
