"""What a verb checks before it touches anything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxstate.errors import CapacityError, InputError
from jaxstate.generation import Request
from jaxstate.models.config import ModelConfig
from jaxstate.sampling import Sampling


def token_ids(given: Sequence[int] | np.ndarray, model: ModelConfig, what: str) -> np.ndarray:
    """Return token ids as [tokens] int32.

    Raises:
      InputError: none, not a flat list of integers, or outside the vocabulary.
    """
    ids = np.asarray(given)
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


def request(
    ids: np.ndarray,
    model: ModelConfig,
    *,
    max_new_tokens: int,
    sampling: Sampling | None,
    eos_ids: Sequence[int],
    stop: Sequence[str],
    top_logprobs: int | None,
    has_text: bool,
) -> Request:
    """Assemble a query's settings.

    Args:
      has_text: the engine has a tokenizer.
    Raises:
      InputError: out of range, or stop strings without text.
    """
    if stop and not has_text:
        raise InputError("stop: needs text, and this engine has no tokenizer; pass eos_ids")
    sampling = sampling or Sampling()
    for token_id in (*sampling.logit_bias, *eos_ids):
        if not 0 <= token_id < model.vocab_size:
            raise InputError(
                f"logit_bias and eos_ids: expected ids in 0 … {model.vocab_size - 1}, "
                f"got {token_id}"
            )
    return Request(
        token_ids=tuple(ids.tolist()),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        eos_ids=tuple(eos_ids),
        stop=tuple(stop),
        top_logprobs=top_logprobs,
    )
