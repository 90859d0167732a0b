"""What a query gives back, and where it came from."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping


class Source(enum.Enum):
    """Where an answer came from."""

    COMPUTED = "computed"  # the whole question was forwarded for it
    RESUMED = "resumed"  # part or all of the question had been paid for by `advance`
    FLASH = "flash"  # a registered question, answered before it was asked


class FinishReason(enum.Enum):
    """Why an answer ended."""

    EOS = "eos"  # an end token, which is the last of token_ids
    STOP = "stop"  # a stop string, which is not part of the text
    LENGTH = "length"  # max_new_tokens
    CHOICE = "choice"  # the best of the given choices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
    """One token of an answer as it is streamed.

    Attributes:
      token_id: its id.
      text: what it adds to the shown text; may be empty while bytes or a stop string are pending.
      logprob: its natural log-probability in the model's own distribution; None unless asked.
      top_logprobs: the most likely tokens and their log-probabilities, if asked.
    """

    token_id: int
    text: str
    logprob: float | None = None
    top_logprobs: Mapping[int, float] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """A finished answer.

    Attributes:
      token_ids: all tokens drawn, or those of the best choice.
      text: the text, stop strings and end tokens left out; empty without a tokenizer.
      finish_reason: see FinishReason.
      source: see Source.
      version: the session's version it saw.
      context_len: context tokens it saw.
      tokens_forwarded: tokens that ran through the model for it.
      gap: top-1 minus top-2 logit where the answer begins.
      blocks_kept: share of the context that attention read, see BlockSelector; None = all of it.
      tokens: each token with what was asked of it.
      choice: index of the best choice; None without choices.
      choice_logprobs: log-probability of each choice, normalized over the choices.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    source: Source
    version: int
    context_len: int
    tokens_forwarded: int
    gap: float
    blocks_kept: float | None = None
    tokens: tuple[Token, ...] = ()
    choice: int | None = None
    choice_logprobs: tuple[float, ...] | None = None
