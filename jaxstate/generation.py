"""A question and its answer as a tail behind a context, dropped when done."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from jaxstate import pages as pages_module
from jaxstate.answer import Answer, FinishReason, Source, Token
from jaxstate.choices import ChoiceTree
from jaxstate.errors import InputError
from jaxstate.executor import MAX_TOP_LOGPROBS, Executor, StepResult
from jaxstate.models.tokenizer import Detokenizer, Tokenizer
from jaxstate.pages import Entry, Pages
from jaxstate.rows import Group, RowInput
from jaxstate.sampling import Sampling
from jaxstate.stopping import StopStrings


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
    """

    token_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    eos_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None

    def __post_init__(self):
        """Check ranges."""
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens: expected at least 1, got {self.max_new_tokens}")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise InputError(
                f"top_logprobs: expected 0 to {MAX_TOP_LOGPROBS}, got {self.top_logprobs}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextToken:
    """The distribution after a token: one row of a gate summary, and how to get its logits."""

    top_id: int
    gap: float
    lse: float
    logits: Any  # [vocab] f32 on the device, or a function that fetches it

    @classmethod
    def of(cls, summary, row: int, logits) -> NextToken:
        """Read one row of a GateSummary that is on the host."""
        top = summary.top_logits[row]
        return cls(
            top_id=int(summary.top_ids[row, 0]), gap=float(top[0] - top[1]),
            lse=float(summary.lse[row]), logits=logits,
        )

    def row_logits(self):
        """Return the logits, [vocab] f32."""
        return self.logits() if callable(self.logits) else self.logits


class Tail:
    """New tokens behind a context, on pages of their own; the context's cells are never written.

    All pages the tail may need are taken at once, so that it cannot run dry on the way.
    """

    def __init__(
        self, executor: Executor, pages: Pages, owner: int, context: Sequence[Entry],
        position: int, shifts: np.ndarray, *, growing: bool = False,
    ):
        """Reserve cells for len(shifts) tokens at `position` and following.

        Raises:
          CapacityError: not enough free pages; nothing was taken.
        """
        self._executor = executor
        self._pages = pages
        self._begin = position
        self._growth = None
        if len(shifts):
            self._growth = pages_module.plan_growth(
                pages, owner, context, position, shifts, growing=growing
            )
        self._all_entries = self._growth.entries if self._growth else tuple(context)
        pages.hold(self._all_entries)
        self.position = position

    def entries(self) -> tuple[Entry, ...]:
        """Return the table of context and tail up to the last forwarded token."""
        return pages_module.cut_end(self._all_entries, self.position)

    def close(self) -> None:
        """Give back every cell."""
        self._pages.drop(self._all_entries)
        self._all_entries = ()

    def keep(self) -> tuple[Entry, ...]:
        """End the tail but keep what was forwarded: the caller holds the returned entries."""
        entries = self.entries()
        self._pages.hold(entries)
        self.close()
        return entries

    def forward(
        self, token_ids: Sequence[int], *, want_last: bool, nodes: TreePart | None = None
    ) -> StepResult | None:
        """Forward tokens in as few steps as possible; return the last step's result.

        Args:
          want_last: the distribution after the last token is wanted (output row 0).
          nodes: tree tokens to forward behind the last token in the same step, not kept.
        """
        ids = np.asarray(token_ids, np.int32)
        limit = self._executor.longest_step
        extra = len(nodes.token_ids) if nodes else 0
        result = None
        at = 0
        while at < len(ids) or (extra and result is None):
            count = min(limit, len(ids) - at)
            last = at + count == len(ids)
            if last and extra and count + extra > limit:
                count, last = count - 1, False  # leave one for a step with the nodes
            result = self._step(
                ids[at : at + count], want_last=last and want_last, nodes=nodes if last else None
            )
            at += count
        return result

    def _step(self, ids: np.ndarray, *, want_last: bool, nodes: TreePart | None) -> StepResult:
        count = len(ids)
        offset = self.position - self._begin
        context = pages_module.stretches(self.entries(), self._pages.page_size)
        positions = np.arange(self.position, self.position + count, dtype=np.int32)
        cells = np.zeros(0, np.int32)
        shifts = np.zeros(0, np.int32)
        if count and self._growth:
            cells = self._growth.cells[offset : offset + count]
            shifts = self._growth.shifts[offset : offset + count]
        wanted = [count - 1] if want_last and count else []
        parents = None
        if nodes:
            extra = len(nodes.token_ids)
            ids = np.concatenate([ids, np.asarray(nodes.token_ids, np.int32)])
            positions = np.concatenate(
                [positions, self.position + count - 1 + np.asarray(nodes.depths, np.int32)]
            )
            cells = np.concatenate([cells, np.full(extra, self._executor.config.num_cells)])
            shifts = np.concatenate([shifts, np.zeros(extra, np.int32)])
            parents = list(range(-1, count - 1)) + [
                count + parent if parent >= 0 else count - 1 for parent in nodes.parents
            ]
            wanted += [count + index for index in nodes.wanted]
        row = RowInput(
            token_ids=ids, positions=positions, cells=cells.astype(np.int32), shifts=shifts,
            context=context, wanted=wanted, parents=parents,
        )
        result = self._executor.run([Group(rows=[row])])
        self.position += count
        return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreePart:
    """Some nodes of a choice tree as tokens behind the question, without the root.

    Attributes:
      nodes: their indices in the tree.
      token_ids: the token of each.
      depths: how far each stands behind the question's last token.
      parents: index within this part of each one's parent; -1 = the question's last token.
      wanted: indices within this part whose distributions are wanted.
    """

    nodes: tuple[int, ...]
    token_ids: tuple[int, ...]
    depths: tuple[int, ...]
    parents: tuple[int, ...]
    wanted: tuple[int, ...]


def tree_parts(tree: ChoiceTree, max_wanted: int, max_tokens: int) -> list[TreePart]:
    """Split the branching nodes below the root into parts that fit a step, with their ancestors.

    Raises:
      InputError: a choice is longer than a step.
    """
    parts: list[TreePart] = []
    wanted: list[int] = []
    members: set[int] = set()

    def ancestry(node: int) -> set[int]:
        chain = set()
        while node > 0:
            chain.add(node)
            node = tree.nodes[node].parent
        return chain

    def flush():
        if not wanted:
            return
        nodes = tuple(sorted(members))
        place = {node: index for index, node in enumerate(nodes)}
        parts.append(
            TreePart(
                nodes=nodes,
                token_ids=tuple(tree.nodes[node].token_id for node in nodes),
                depths=tuple(tree.nodes[node].depth for node in nodes),
                parents=tuple(place.get(tree.nodes[node].parent, -1) for node in nodes),
                wanted=tuple(place[node] for node in wanted),
            )
        )
        wanted.clear()
        members.clear()

    for node in tree.branching:
        if node == 0:
            continue
        chain = ancestry(node)
        if len(chain) > max_tokens:
            raise InputError(
                f"choices: expected at most {max_tokens} tokens each, got {len(chain) + 1}"
            )
        if len(wanted) == max_wanted or len(members | chain) > max_tokens:
            flush()
        members |= chain
        wanted.append(node)
    flush()
    return parts


def stream_tokens(
    tail: Tail, executor: Executor, request: Request, first: NextToken,
    tokenizer: Tokenizer | None,
) -> Generator[Token, None, tuple[list[Token], str, FinishReason]]:
    """Draw and yield tokens behind a forwarded question; return all of them, text and reason.

    The last token drawn has not been forwarded.
    """
    detokenizer = Detokenizer(tokenizer, skip_special=True) if tokenizer else None
    watch = StopStrings(request.stop)
    tokens: list[Token] = []
    shown: list[str] = []
    following = first
    for index in itertools.count(1):
        token_id, logprob, top = _pick(executor, request, following, tail.position)
        ended = token_id in request.eos_ids
        text = "" if ended or detokenizer is None else watch.push(detokenizer.push(token_id))
        last = ended or watch.stopped or index == request.max_new_tokens
        if last and not watch.stopped:
            text += watch.push(detokenizer.finish()) if detokenizer else ""
            text += watch.finish()
        token = Token(token_id=token_id, text=text, logprob=logprob, top_logprobs=top)
        tokens.append(token)
        shown.append(text)
        yield token
        if last:
            reason = FinishReason.LENGTH
            if ended:
                reason = FinishReason.EOS
            elif watch.stopped:
                reason = FinishReason.STOP
            return tokens, "".join(shown), reason
        result = tail.forward([token_id], want_last=True)
        assert result is not None
        following = NextToken.of(result.summary, 0, lambda result=result: result.row_logits(0))
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
    }
    return token_id, float(np.asarray(logits)[token_id]) - following.lse, top


def answer_of(
    tokens: Sequence[Token], text: str, reason: FinishReason, first: NextToken, *,
    source: Source, version: int, context_len: int, tokens_forwarded: int,
) -> Answer:
    """Assemble the answer of a finished stream."""
    return Answer(
        token_ids=tuple(token.token_id for token in tokens), text=text, finish_reason=reason,
        source=source, version=version, context_len=context_len,
        tokens_forwarded=tokens_forwarded, gap=first.gap, tokens=tuple(tokens),
    )
