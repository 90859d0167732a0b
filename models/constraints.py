"""Which tokens may come next in JSON of a schema, in what a regex matches, or in text of a grammar.

Tokens count by their exact bytes: any that can still lead to an allowed text may come, however a
tokenizer would have cut that text. Control tokens never may.

Source: llguidance (https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Literal

import llguidance
import numpy as np

Kind = Literal["json_schema", "regex", "grammar"]

KEPT = 64
"""Compiled constraints that are kept for who comes next."""

_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=15_000,
    max_grammar_size=500_000,
    max_lexer_states=20_000,  # some 20 MB
    verbose_errors=False,
)
"""The library's own, but for the states, and for the items: of ambiguous grammars they allow tokens
that take 20 to 30 ms instead of 400; a hundred optional properties, any of which may come next, are
400 in a row and up to 11,000 in a step."""

_SPREAD = 4096
"""Characters of a grammar for which one text more has to have begun before it is started anew, so
that no text costs whoever follows it more than some 25 ms of that."""

_LONGEST_MESSAGE = 400  # characters: it may quote all there is

_ANY_TOKENS = {"name": "any_tokens", "lark_grammar": '%llguidance {"no_forcing": true}\nstart: "x"'}
"""Told with a grammar, has the library not insist on one way to cut a text that is the only one."""


class Constraints:
    """Compiles what text of a vocabulary's tokens has to be; usable from any thread."""

    def __init__(self, tokens: Sequence[bytes]):
        """Index the tokens; 0.1 s for 49,152 of them.

        Args:
          tokens: what each id stands for; b"" where it may never come.
        """
        # 0xff is no part of any text, and marks control tokens to the library.
        tokens = [b"" if token.startswith(b"\xff") else token for token in tokens]
        is_text = np.zeros(-(-len(tokens) // 32) * 32, bool)
        is_text[: len(tokens)] = [bool(token) for token in tokens]
        self.is_text = np.packbits(is_text, bitorder="little").view(np.uint32)
        # The library wants an end token: one behind all that there are, which no grammar can name.
        wrapper = llguidance.TokenizerWrapper(_Tokens([*tokens, b"\xff."]))
        self._index = llguidance.LLTokenizer(wrapper)
        self.compiled = functools.lru_cache(maxsize=KEPT)(self._compile)

    def _compile(self, kind: Kind, text: str) -> Compiled:
        """Compile a constraint, or return it from those kept: `compiled(kind, text)`.

        That may take seconds for what is complex, during which other threads go on.

        Raises:
          ValueError: it is damaged, too complex, allows no text, or none but the empty one.
        """
        if kind == "json_schema":
            try:
                grammar = {"json_schema": json.loads(text)}
            except (ValueError, RecursionError) as error:
                raise ValueError(f"expected a schema in JSON, got {error}") from error
        elif kind == "regex":
            [grammar] = json.loads(llguidance.LLMatcher.grammar_from_regex(text))["grammars"]
        else:
            grammar = {"lark_grammar": text}
        compiled = Compiled(self, json.dumps({"grammars": [grammar, _ANY_TOKENS]}))
        if compiled.matcher().is_finished:
            raise ValueError("expected one that allows some text, got one that allows none")
        return compiled

    def start(self, grammar: str) -> llguidance.LLMatcher:
        """Return the library's matcher of a grammar in its JSON.

        Raises:
          ValueError: the library refuses it.
        """
        matcher = llguidance.LLMatcher(self._index, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise ValueError(_sentence(matcher))
        return matcher


class Compiled:
    """A compiled constraint."""

    def __init__(self, constraints: Constraints, grammar: str):
        """Compile; see Constraints.start."""
        self.is_text = constraints.is_text
        self._start = functools.partial(constraints.start, grammar)
        self._first = self._start()
        self._spread = len(grammar) // _SPREAD
        self._num_begun = 0

    def matcher(self) -> Matcher:
        """Return one for a text of its own."""
        return Matcher(self)

    def begin(self) -> llguidance.LLMatcher:
        """Return the library's matcher at the beginning; all share what they find on the way."""
        self._num_begun += 1
        return self._first.deep_copy()

    def begin_anew(self) -> llguidance.LLMatcher | None:
        """Likewise, without what others found; None where too few texts have begun to pay it."""
        if self._num_begun <= self._spread:
            return None
        self._first = self._start()
        self._num_begun = 0
        return self.begin()


class Matcher:
    """Follows a text token by token.

    Attributes:
      allowed: [ceil(vocab_size / 32)] uint32, bit j of word w is set where token 32 * w + j may
        come next.
      may_end: the text is complete.
    """

    def __init__(self, compiled: Compiled):
        """Start before the first token.

        Raises:
          ValueError: no token can begin such a text.
        """
        self._compiled = compiled
        self._matcher = compiled.begin()
        self._is_anew = False
        self._token_ids: list[int] = []
        self._look()

    @property
    def is_finished(self) -> bool:
        """The text is complete and nothing can follow it."""
        return self.may_end and not self.allowed.any()

    def accept(self, token_id: int) -> None:
        """Go on behind a token that was allowed.

        Raises:
          ValueError: the vocabulary has no token that goes on, or it is too complex from here on.
        """
        self._token_ids.append(token_id)
        self._matcher.consume_token(token_id)
        self._look()

    def _look(self) -> None:
        if self._see():
            return
        # States alone count what all matchers of a constraint have found together: nothing else
        # would be less in a fresh one, and starting it takes as long as compiling.
        if not self._is_anew and "too many states" in (self._matcher.get_error() or ""):
            self._is_anew = True
            matcher = self._compiled.begin_anew()
            if matcher is not None:
                self._matcher = matcher
                self._matcher.consume_tokens(self._token_ids)
                if self._see():
                    return
        raise ValueError(_sentence(self._matcher))

    def _see(self) -> bool:
        """Look at what may come next; False where the library gives up."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        is_text = self._compiled.is_text
        self.allowed = mask[: len(is_text)] & is_text
        self.may_end = self._matcher.is_accepting()
        return bool(self.allowed.any()) or (self.may_end and not self._matcher.is_error())


class _Tokens:
    """A vocabulary in the library's form; of tokens alone it needs no encoder."""

    def __init__(self, tokens: Sequence[bytes]):
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("the library is not to force tokens")


def _sentence(matcher: llguidance.LLMatcher) -> str:
    """Return why the library gave up, in one line."""
    message = matcher.get_error()
    if not message or message.startswith("NoExtension"):
        return "no token of this model goes on from here; allow other text, too"
    # What is indented quotes the text and points into it.
    lines = [line.strip() for line in message.splitlines() if line[:1].strip()]
    return " ".join(line for line in lines if line != "<non-verbose/>")[:_LONGEST_MESSAGE]
