"""From the distribution after a question to an answer: token by token, or among choices."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Generator, Sequence
from typing import Any, TypedDict

import numpy as np

from jaxstate.answer import Answer, FinishReason, FirstToken, Source, Token
from jaxstate.choices import ChoiceTree
from jaxstate.constraint import Constraint, Guide
from jaxstate.errors import InputError
from jaxstate.executor import MAX_TOP_LOGPROBS, Executor, StepResult
from jaxstate.models.tokenizer import Detokenizer, Tokenizer
from jaxstate.needs import Need, Ran
from jaxstate.sampling import Sampling
from jaxstate.stopping import StopStrings
from jaxstate.tail import NextToken, Tail


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What a query asks for.

    Attributes:
      token_ids: the question.
      max_new_tokens: longest answer, in tokens.
      sampling: how tokens are drawn.
      eos_ids: tokens that end the answer.
      stop: strings that end the answer and are not shown.
      top_logprobs: None = no logprobs; n = also the n most likely tokens of each step.
      guide: holds the answer to its constraint; of this one answer.
    """

    token_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    eos_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    guide: Guide | None = None

    @property
    def is_plain_greedy(self) -> bool:
        """What is drawn is what was decoded ahead; see Sampling."""
        return self.sampling.is_plain_greedy and self.guide is None

    def __post_init__(self):
        """Check ranges."""
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise InputError(
                f"top_logprobs: expected 0 to {MAX_TOP_LOGPROBS}, got {self.top_logprobs}"
            )


class RequestOptions(TypedDict, total=False):
    """What a verb takes by name for a Request; absent, or None where that may be = the default.

    Attributes:
      constraint: what the answer has to be; tokens it does not allow are impossible, so that
        sampling, gap and log-probabilities are of those it does.
    """

    sampling: Sampling | None
    eos_ids: Sequence[int]
    stop: Sequence[str]
    top_logprobs: int | None
    constraint: Constraint | None


def stream_tokens(
    tail: Tail,
    executor: Executor,
    request: Request,
    along: list[NextToken],
    tokenizer: Tokenizer | None,
    context: Sequence[int],
) -> Generator[Need | Token, Any, tuple[list[Token], str, FinishReason, float]]:
    """Draw and yield tokens behind a forwarded question.

    Returns all of them, text, reason and the gap of the first. The last one has not been forwarded
    for it.

    Args:
      along: the distributions after the question and after each token of the answer that has been
        forwarded before, which are those that will be drawn; grows by what is forwarded now.
      context: ids right before the answer, the question's last; a character that they begin is
        completed by the answer.
    """
    guide = request.guide
    detokenizer = None
    if tokenizer is not None:
        detokenizer = Detokenizer(
            tokenizer, skip_special=True, context=context, continues=guide is not None
        )
    gap = along[0].gap
    watch = StopStrings(request.stop)
    tokens: list[Token] = []
    shown: list[str] = []
    for index in itertools.count(1):
        following = along[index - 1]
        if guide is not None:
            following = following.among(guide.allowed(), executor)
            gap = following.gap if index == 1 else gap
        token_id, logprob, top = _pick(executor, request, following, tail.position)
        ended = token_id in request.eos_ids
        if guide is not None:
            guide.accept(token_id)
        text = "" if ended or detokenizer is None else watch.push(detokenizer.push(token_id))
        complete = guide is not None and guide.is_finished
        last = ended or complete or watch.stopped or index == request.max_new_tokens
        if last and not watch.stopped:
            # What a constraint allows has no part of a character for its end.
            if detokenizer is not None and guide is None:
                text += watch.push(detokenizer.finish())
            text += watch.finish()
        token = Token(token_id=token_id, text=text, logprob=logprob, top_logprobs=top)
        tokens.append(token)
        shown.append(text)
        yield token
        if last:
            reason = FinishReason.LENGTH
            if ended:
                reason = FinishReason.EOS
            elif watch.stopped or complete:
                reason = FinishReason.STOP
            return tokens, "".join(shown), reason, gap
        if index == len(along):
            result = yield from tail.forward([token_id], want_last=True)
            assert result is not None
            along.append(NextToken.of(result, 0))
    raise AssertionError("unreachable")


def _pick(executor: Executor, request: Request, following: NextToken, position: int):
    """Choose the next token: (id, logprob or None, top logprobs or None)."""
    logits = None
    if request.sampling.is_plain_greedy:
        token_id = following.top_id
    else:
        logits = following.row_logits()
        token_id = executor.draw(logits, request.sampling, position)
    if request.top_logprobs is None:
        return token_id, None, None
    logits = following.row_logits() if logits is None else logits
    values, ids = executor.top_logits(logits)
    top = {
        int(token): float(value) - following.lse
        for token, value in zip(
            ids[: request.top_logprobs], values[: request.top_logprobs], strict=True
        )
        if value > -np.inf
    }
    return token_id, float(np.asarray(logits)[token_id]) - following.lse, top


def score_choices(
    tail: Tail, tree: ChoiceTree, question: np.ndarray, ready: NextToken | None
) -> Generator[Need, Ran, tuple[NextToken, list[float], FirstToken | None]]:
    """Score all choices behind a question, as a tree behind its last token.

    Args:
      question: tokens to forward first; may be empty if `ready` is given.
      ready: the distribution after the question, if it is known already.
    Returns:
      the distribution after the question, each choice's normalized log-probability, and what the
      first token alone would have decided.
    Raises:
      InputError: a choice is longer than a step.
    """
    parts = tail.split_tree(tree)
    logprobs: dict[tuple[int, int], float] = {}

    def note(result: StepResult, nodes: Sequence[int], first_row: int) -> None:
        edges = [(index, node) for index, node in enumerate(nodes)]
        pairs = [(first_row + i, token) for i, node in edges for token in tree.nodes[node].children]
        keys = [(node, token) for _, node in edges for token in tree.nodes[node].children]
        logprobs.update(zip(keys, result.logprobs_at(pairs), strict=True))

    if ready is not None:
        children = list(tree.nodes[0].children)
        row = np.asarray(ready.row_logits())[children] - ready.lse
        logprobs |= {(0, token): float(value) for token, value in zip(children, row, strict=True)}
        root = ready
    else:
        part = parts.pop(0) if parts else None
        result = yield from tail.forward(question, want_last=True, nodes=part)
        assert result is not None
        root = NextToken.of(result, 0)
        note(result, [0, *(part.wanted_nodes if part else ())], 0)
    for part in parts:
        result = yield from tail.forward([], want_last=False, nodes=part)
        assert result is not None
        note(result, part.wanted_nodes, 0)
    first = tree.first_tokens()
    decided = first_token([logprobs[0, token] for token in first]) if first else None
    return root, tree.scores([logprobs[edge] for edge in tree.edges()]), decided


def first_token(scores: Sequence[float]) -> FirstToken | None:
    """Choose by the first token of each choice alone; None for a single one.

    Args:
      scores: logit or log-probability of each.
    """
    if len(scores) < 2:
        return None
    best, second = np.argsort(-np.asarray(scores), kind="stable")[:2]
    return FirstToken(choice=int(best), gap=float(scores[best] - scores[second]))


def answer_of(
    tokens: Sequence[Token],
    text: str,
    reason: FinishReason,
    gap: float,
    *,
    source: Source,
    version: int,
    context_len: int,
    tokens_forwarded: int,
    cached_tokens: int,
    rebuilt: bool,
    blocks_kept: float | None,
) -> Answer:
    """Assemble the answer of a finished stream."""
    return Answer(
        token_ids=tuple(token.token_id for token in tokens),
        text=text,
        finish_reason=reason,
        source=source,
        version=version,
        context_len=context_len,
        tokens_forwarded=tokens_forwarded,
        gap=gap,
        cached_tokens=cached_tokens,
        rebuilt=rebuilt,
        blocks_kept=blocks_kept,
        tokens=tuple(tokens),
    )
