"""What an answer has to be: JSON of a schema, text that a regex matches, or text of a grammar."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from jaxstate.errors import InputError
from jaxstate.models.tokenizer import Tokenizer

Kind = Literal["json_schema", "regex", "grammar"]

LONGEST = 131_072
"""Characters of a constraint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constraint:
    """One of three; whitespace counts, so that equal constraints are equal texts.

    An answer ends by an end token exactly where its text is complete, and with the token that
    completes it where nothing can follow. One that is cut at max_new_tokens is a beginning of what
    is allowed.

    Attributes:
      json_schema: in JSON. What llguidance has not implemented of JSON Schema is refused; its
        "x-guidance" says among others whether there may be whitespace between the parts.
      regex: matched from the text's beginning to its end; Rust's syntax, without look-around.
      grammar: in llguidance's form of Lark's notation; control tokens are not part of any text.
    """

    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None

    _held = None, ""  # no field: the tokenizer it was compiled for, and what `compiled` found

    def __post_init__(self):
        """Check that it is one, of fair length."""
        given = {name: text for name, text in dataclasses.asdict(self).items() if text is not None}
        if len(given) != 1:
            names = ", ".join(given) or "none"
            raise InputError(
                f"constraint: expected one of json_schema, regex and grammar, got {names}"
            )
        if not isinstance(self.text, str) or not 0 < len(self.text) <= LONGEST:
            got = len(self.text) if isinstance(self.text, str) else type(self.text).__name__
            raise InputError(f"{self.kind}: expected text of 1 to {LONGEST} characters, got {got}")

    @property
    def kind(self) -> Kind:
        """Which of the three."""
        if self.json_schema is not None:
            return "json_schema"
        return "regex" if self.regex is not None else "grammar"

    @property
    def text(self) -> str:
        """What it says."""
        return getattr(self, self.kind)


class Matcher(Protocol):
    """Follows an answer token by token; see models.constraints.Matcher."""

    allowed: np.ndarray  # [ceil(vocab_size / 32)] uint32, bit j of word w is token 32 * w + j
    may_end: bool

    @property
    def is_finished(self) -> bool:
        """The text is complete and nothing can follow it."""
        ...

    def accept(self, token_id: int) -> None:
        """Go on behind a token that was allowed."""
        ...


class Compiled(Protocol):
    """A compiled constraint."""

    def matcher(self) -> Matcher:
        """Return one for an answer of its own."""
        ...


class Guide:
    """Holds one answer to its constraint."""

    def __init__(self, kind: Kind, matcher: Matcher, end_ids: Sequence[int], vocab_size: int):
        """Start before the first token.

        Args:
          end_ids: allowed exactly where the text may end, whatever they stand for.
        """
        self._kind = kind
        self._matcher = matcher
        self._end_ids = end_ids
        self._num_words = -(-vocab_size // 32)

    @property
    def is_finished(self) -> bool:
        """The text is complete and nothing can follow it."""
        return self._matcher.is_finished

    def allowed(self) -> np.ndarray:
        """Return which tokens may be drawn: [ceil(vocab_size / 32)] uint32, as in Matcher.

        Raises:
          InputError: there is none.
        """
        bits = np.zeros(self._num_words, np.uint32)
        known = self._matcher.allowed[: len(bits)]  # models pad their vocabulary
        bits[: len(known)] = known
        for token_id in self._end_ids:
            bit = np.uint32(1 << token_id % 32)
            if self._matcher.may_end:
                bits[token_id // 32] |= bit
            else:
                bits[token_id // 32] &= ~bit
        if not bits.any():
            raise InputError(
                f"{self._kind}: expected one that goes on without tokens of eos_ids, got one that "
                "needs them; leave them out"
            )
        return bits

    def accept(self, token_id: int) -> None:
        """Go on behind a token that was drawn; nothing comes behind an end token.

        Raises:
          InputError: it was not allowed, or none of the model's tokens goes on.
        """
        ends = token_id in self._end_ids
        if not (self._matcher.may_end if ends else self._allows(token_id)):
            raise InputError("logit_bias: expected one that leaves a token to go on with, got none")
        if ends:
            return
        try:
            self._matcher.accept(token_id)
        except ValueError as error:
            raise InputError(f"{self._kind}: {error}") from error

    def _allows(self, token_id: int) -> bool:
        return bool(self._matcher.allowed[token_id // 32] >> (token_id % 32) & 1)


def compiled(constraint: Constraint, tokenizer: Tokenizer | None) -> Compiled:
    """Compile a constraint, or find it compiled; from any thread.

    What it comes to stays with it: whoever keeps a question can have it answered at any time
    without another compilation.

    Raises:
      InputError: it is damaged, too complex or allows nothing, or there is no tokenizer.
    """
    if tokenizer is None:
        raise InputError(
            f"{constraint.kind}: needs text, and this engine has no tokenizer; ask without it"
        )
    held_by, found = constraint._held
    if held_by is not tokenizer:
        try:
            found = tokenizer.constraints.compiled(constraint.kind, constraint.text)
        except ValueError as error:
            found = f"{constraint.kind}: {error}"
        object.__setattr__(constraint, "_held", (tokenizer, found))
    if isinstance(found, str):
        raise InputError(found)
    return found


def guide(
    constraint: Constraint, tokenizer: Tokenizer | None, end_ids: Sequence[int], vocab_size: int
) -> Guide:
    """Return what holds one answer to a constraint; errors as of `compiled`, end_ids see Guide."""
    matcher = compiled(constraint, tokenizer).matcher()
    return Guide(constraint.kind, matcher, end_ids, vocab_size)
