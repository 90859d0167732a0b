"""What a verb checks before it touches anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized

import numpy as np

from jaxstate.constraint import Constraint, guide
from jaxstate.errors import CapacityError, InputError
from jaxstate.generation import Request
from jaxstate.models.config import ModelConfig
from jaxstate.models.tokenizer import Tokenizer
from jaxstate.sampling import Sampling


def token_ids(given: Sequence[int] | np.ndarray, model: ModelConfig, what: str) -> np.ndarray:
    """Return token ids as [tokens] int32.

    Raises:
      InputError: none, not a flat list of integers, or outside the vocabulary.
    """
    try:
        ids = np.asarray(given)
    except ValueError:
        raise InputError(
            f"{what}: expected a flat list of integer token ids, got lists of different lengths"
        ) from None
    if ids.size == 0:
        raise InputError(f"{what}: expected at least one token id, got none")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise InputError(
            f"{what}: expected a flat list of integer token ids, got shape {ids.shape} of "
            f"{ids.dtype}"
        )
    bad = ids[(ids < 0) | (ids >= model.vocab_size)]
    if bad.size:
        raise InputError(
            f"{what}: expected token ids in 0 … {model.vocab_size - 1}, got {bad[0]}; "
            "encode the text with this model's tokenizer"
        )
    return ids.astype(np.int32)


def length(given: Sized, model: ModelConfig, what: str) -> None:
    """Refuse, before anybody looks at the tokens, more of them than any context can hold.

    Raises:
      CapacityError: says how many there may be.
    """
    if len(given) > model.max_positions:
        raise CapacityError(
            f"{what}: expected at most {model.max_positions} tokens, the model's positions, got "
            f"{len(given)}; shorten it"
        )


def positions(model: ModelConfig, context_len: int, count: int, max_new_tokens: int) -> None:
    """Refuse what would pass the model's longest position.

    Raises:
      CapacityError: says how much is free.
    """
    limit = model.max_positions
    if context_len + count + max_new_tokens > limit:
        raise CapacityError(
            f"{context_len} context tokens, {count} more and {max_new_tokens} new ones exceed "
            f"the model's {limit} positions; at most {max(limit - context_len, 0)} are free: "
            "shorten the question, ask for fewer tokens, or lower context_len"
        )


def vocabulary(model: ModelConfig, ids: Iterable[int], what: str) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
      InputError: names the first.
    """
    for token_id in ids:
        if not 0 <= token_id < model.vocab_size:
            raise InputError(f"{what}: expected ids in 0 … {model.vocab_size - 1}, got {token_id}")


def count(given: int, what: str, *, least: int) -> None:
    """Refuse what is no integer or less than `least`.

    Raises:
      InputError: says what was expected.
    """
    if not isinstance(given, int | np.integer) or isinstance(given, bool):
        raise InputError(f"{what}: expected an integer, got {given!r}")
    if given < least:
        raise InputError(f"{what}: expected at least {least}, got {given}")


def request(
    ids: np.ndarray,
    model: ModelConfig,
    max_new_tokens: int,
    *,
    tokenizer: Tokenizer | None,
    sampling: Sampling | None = None,
    eos_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
    top_logprobs: int | None = None,
    constraint: Constraint | None = None,
) -> Request:
    """Assemble a query's settings.

    Args:
      tokenizer: the engine's, if it has one.
    Raises:
      InputError: out of range, stop strings without text, or see constraint.compiled.
    """
    if isinstance(stop, str):
        raise InputError(
            f'stop: expected a list of strings, got the string "{stop}"; put it in [ ]'
        )
    if any(not string for string in stop):
        raise InputError("stop: expected non-empty strings, got an empty one; leave it out")
    if stop and tokenizer is None:
        raise InputError("stop: needs text, and this engine has no tokenizer; pass eos_ids")
    sampling = sampling or Sampling()
    vocabulary(model, (*sampling.logit_bias, *eos_ids), "logit_bias and eos_ids")
    count(max_new_tokens, "max_new_tokens", least=1)
    return Request(
        token_ids=tuple(ids.tolist()),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        eos_ids=tuple(eos_ids),
        stop=tuple(stop),
        top_logprobs=top_logprobs,
        guide=constraint and guide(constraint, tokenizer, tuple(eos_ids), model.vocab_size),
    )
