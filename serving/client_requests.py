"""From what a client's user gives to messages."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, Unpack

from jaxstate.errors import InputError
from jaxstate.serving import jaxstate_pb2 as pb

if TYPE_CHECKING:
    import numpy as np

    from jaxstate.sampling import Sampling  # needs JAX

Prompt: TypeAlias = "str | Sequence[int] | np.ndarray | Sequence[Mapping[str, str]] | pb.Prompt"
"""Text, token ids, or messages with role and content. The message of the protocol says what these
cannot: that special tokens are parsed, tools, an open end."""

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "logit_bias")
_MESSAGE = {"role", "content"}


class Wanted(TypedDict, total=False):
    """How a question is to be answered.

    Attributes:
      max_new_tokens: longest answer, in tokens; 128 unless said. Not used with choices.
      choices: fixed answers, of which the most probable is taken.
      eos_ids: tokens that end the answer besides the model's own.
      ignore_model_eos: the model's own do not end it.
      sampling: how tokens are drawn: a jaxstate.Sampling, or a mapping of its fields.
      json_schema: the answer is JSON that this allows; JSON text or an object.
      regex: the answer matches it from beginning to end.
      grammar: the answer is of this grammar, in Lark's notation.
    """

    max_new_tokens: int
    choices: Iterable[Prompt]
    eos_ids: Iterable[int]
    ignore_model_eos: bool
    sampling: Sampling | Mapping[str, Any]
    json_schema: str | Mapping[str, Any]
    regex: str
    grammar: str


def prompt(given: Prompt, field: str) -> pb.Prompt:
    """Return text, token ids or messages as a message.

    Args:
      field: what it is, for errors.
    Raises:
      InputError: it is none of these.
    """
    if isinstance(given, pb.Prompt):
        return given
    if isinstance(given, str):
        return pb.Prompt(text=pb.Text(text=given))
    expected = f"{field}: expected text, token ids, or messages with role and content"
    if not isinstance(given, Iterable) or isinstance(given, bytes | Mapping):
        raise InputError(f"{expected}, got {type(given).__name__}")
    parts = given.tolist() if hasattr(given, "tolist") else list(given)
    if is_messages(parts):
        messages = [pb.Message(role=one["role"], content=one["content"]) for one in parts]
        return pb.Prompt(chat=pb.Chat(messages=messages))
    try:
        return pb.Prompt(tokens=pb.TokenIds(ids=map(operator.index, parts)))
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{expected}, got {_shown(parts)}") from error


def is_messages(parts: Sequence[Any]) -> bool:
    """Say whether these are messages of a conversation, and not rows."""
    return bool(parts) and all(isinstance(one, Mapping) and one.keys() == _MESSAGE for one in parts)


def _shown(parts: Sequence[Any]) -> str:
    text = repr(parts)
    return text if len(text) <= 80 else f"{text[:79]}…"


def question(given: Prompt, **wanted: Unpack[Wanted]) -> pb.Question:
    """Return a question as a message.

    Raises:
      InputError: what gRPC cannot even send; the server refuses the rest.
    """
    choices = [
        prompt(choice, f"choices[{index}]")
        for index, choice in enumerate(wanted.get("choices", ()))
    ]
    schema = wanted.get("json_schema")
    constraint = {
        "json_schema": schema if isinstance(schema, str | None) else json.dumps(schema),
        "regex": wanted.get("regex"),
        "grammar": wanted.get("grammar"),
    }
    named = {name: value for name, value in constraint.items() if value is not None}
    if len(named) > 1:
        raise InputError(f"{' and '.join(named)}: expected one of them, got {len(named)}")
    return message(
        pb.Question, prompt=prompt(given, "question"), choices=choices,
        max_new_tokens=0 if choices else wanted.get("max_new_tokens", 128),
        eos_ids=wanted.get("eos_ids", ()),
        ignore_model_eos=wanted.get("ignore_model_eos", False),
        sampling=_sampling(wanted.get("sampling")), **named,
    )  # fmt: skip


def _sampling(given: Sampling | Mapping[str, Any] | None) -> pb.Sampling | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        given = {name: getattr(given, name) for name in _SAMPLING}
    if unknown := [name for name in given if name not in _SAMPLING]:
        raise InputError(f"sampling: expected any of {', '.join(_SAMPLING)}, got {unknown[0]}")
    return message(pb.Sampling, **given)


def header(
    given: Prompt, max_new_tokens: int, min_gap: float, eos_ids: Iterable[int],
    slot_ids: Iterable[int],
) -> pb.Header:  # fmt: skip
    """Return what is paid for ahead as a message."""
    return message(
        pb.Header, prompt=prompt(given, "header"), max_new_tokens=max_new_tokens,
        min_gap=min_gap, eos_ids=eos_ids, slot_ids=slot_ids,
    )  # fmt: skip


def named(enum: Any, given: str, field: str) -> int:
    """Return a value of an enum by its name: STALE_WAIT for "wait".

    Raises:
      InputError: there is none.
    """
    names = {name.rpartition("_")[2].lower(): value for name, value in enum.items() if value}
    if given not in names:
        raise InputError(f"{field}: expected one of {', '.join(names)}, got {given!r}")
    return names[given]


def message(kind: Any, **fields: Any) -> Any:
    """Return a message.

    Raises:
      InputError: a value that its field cannot hold.
    """
    made = kind()
    for name, value in fields.items():
        try:
            made.MergeFrom(kind(**{name: value}))
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"{name}: {error}") from error
    return made


WhenFull: TypeAlias = Literal["error", "slide"]
Stale: TypeAlias = Literal["compute", "wait", "serve"]
From: TypeAlias = Literal["question", "header"]
