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
    GATED = "gated"  # not the model's full answer to the newest version, at a measured risk


class FinishReason(enum.Enum):
    """Why an answer ended."""

    EOS = "eos"  # an end token, which is the last of token_ids
    STOP = "stop"  # a stop string, which is not part of the text; or its constraint has it end here
    LENGTH = "length"  # max_new_tokens
    CHOICE = "choice"  # the best of the given choices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
    """One token of an answer as it is streamed.

    Attributes:
      token_id: its id.
      text: what it adds to the shown text; may be empty while bytes or a stop string are pending.
      logprob: its natural log-probability in the model's own distribution, among the tokens that a
        constraint allows if there is one; None unless asked.
      top_logprobs: the most likely tokens and their log-probabilities, if asked.
    """

    token_id: int
    text: str
    logprob: float | None = None
    top_logprobs: Mapping[int, float] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstToken:
    """What the first tokens of the choices alone say, where all differ.

    Attributes:
      choice: index of the choice whose first token is likeliest.
      gap: its logit minus that of the next one.
    """

    choice: int
    gap: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """What an answer says about the gate that gave it.

    Attributes:
      gap: of what it was taken from, in logits, see Answer.certainty.
      tau: what it had to exceed.
      risk: largest share of disagreement, with 95 % confidence.
      bound: see calibration.Calibration.
      num_effective: effective samples behind the bound.
      age: versions between what the answer saw and the session.
    """

    gap: float
    tau: float
    risk: float
    bound: float
    num_effective: int
    age: int


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
      cached_tokens: of the question or prompt, that had been computed before.
      gap: top-1 minus top-2 logit where the answer begins.
      blocks_kept: share of the context that attention read, see BlockSelector; None = all of it.
      tokens: each token with what was asked of it.
      choice: index of the best choice; None without choices.
      choice_logprobs: log-probability of each choice, normalized over the choices; None too where
        the first token alone has decided.
      first_token: see FirstToken; None without choices.
      rebuilt: the session's cells had been lost, see Session.rebuilt.
      age: versions that the session was ahead when it was given.
      evidence: of a GATED answer.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    source: Source
    version: int
    context_len: int
    tokens_forwarded: int
    gap: float
    cached_tokens: int = 0
    blocks_kept: float | None = None
    tokens: tuple[Token, ...] = ()
    choice: int | None = None
    choice_logprobs: tuple[float, ...] | None = None
    first_token: FirstToken | None = None
    rebuilt: bool = False
    age: int = 0
    evidence: Evidence | None = None

    @property
    def certainty(self) -> float:
        """What a gate looks at: by how many logits the best choice, or first token, leads."""
        if self.choice is None:
            return self.gap
        if self.choice_logprobs is None:
            return self.first_token.gap if self.first_token else 0.0
        scores = sorted(self.choice_logprobs)[-2:]
        # A choice that nothing is left for would make it infinite.
        return min(scores[-1] - scores[0], 1e4) if len(scores) > 1 else 1e4
