"""How questions are answered on a session's context, and what of their work is kept."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

import numpy as np

from jaxstate import checks, generation
from jaxstate import pages as pages_module
from jaxstate import session as session_module
from jaxstate.answer import Answer, Evidence, FinishReason, Source
from jaxstate.choices import ChoiceTree
from jaxstate.config import EngineConfig
from jaxstate.contexts import Contexts
from jaxstate.errors import ConflictError, SessionError
from jaxstate.executor import Executor
from jaxstate.generation import Request
from jaxstate.models.config import ModelConfig
from jaxstate.models.tokenizer import Tokenizer
from jaxstate.needs import Need, Ran, Steps, TokenSteps
from jaxstate.pages import Pages
from jaxstate.prefixes import Prefixes
from jaxstate.revival import Revival
from jaxstate.session import PaidTail, Session
from jaxstate.tail import NextToken, Tail
from jaxstate.tiers import Tiers

_TEXT_CONTEXT = 8  # ids before an answer that can hold the beginning of its first character


class Asking:
    """Runs checked questions; see Verbs for what callers may ask."""

    def __init__(
        self,
        executor: Executor,
        model: ModelConfig,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        pages: Pages,
        sessions: Mapping[str, Session],
        prefixes: Prefixes,
        tiers: Tiers,
        contexts: Contexts,
        revival: Revival,
        owners: Iterator[int],
    ):
        """Answer from what is on these pages.

        Args:
          owners: of tails, each another one.
        """
        self._executor = executor
        self._model = model
        self._config = config
        self._tokenizer = tokenizer
        self._pages = pages
        self._sessions = sessions
        self._prefixes = prefixes
        self._tiers = tiers
        self._contexts = contexts
        self._revival = revival
        self._owners = owners
        self._blocks_kept = config.selector.kept if config.selector else None

    def advance(
        self,
        session: Session,
        ids: np.ndarray,
        max_new_tokens: int,
        min_gap: float,
        eos_ids: Sequence[int],
        slot_ids: Sequence[int],
    ) -> Steps:
        """See Engine.advance; the session's cells are in the pool."""
        version = session.version
        paid, skip = self._longest_paid(session, ids, max_new_tokens)
        tail = self._tail(session, next(self._owners), paid, skip, len(ids) + max_new_tokens - skip)
        token_ids = ids.tolist()
        try:
            along = [(yield from self._ask(tail, ids, paid, skip))]
            while len(along) <= max_new_tokens:
                following = along[-1]
                if following.gap < min_gap or following.top_id in eos_ids:
                    break
                token_ids.append(following.top_id)
                result = yield from tail.forward(token_ids[-1:], want_last=True)
                assert result is not None
                along.append(NextToken.of(result, 0))
                if following.top_id in slot_ids:
                    break
            kept = self._keep(session, version, tail, token_ids, along)
        finally:
            tail.close()
        return kept

    def choose(
        self,
        session: Session,
        ids: np.ndarray,
        checked: Sequence[tuple[int, ...]],
        tree: ChoiceTree,
        gate: Callable[[float], Evidence | None] | None,
        keep: bool,
    ) -> Steps:
        """See Verbs.choose; the session's cells are in the pool."""
        longest = max(len(choice) for choice in checked)
        version, context_len = session.version, session.context_len
        paid, skip = self._longest_paid(session, ids, 0)
        ready = paid.behind(skip)[0] if paid and skip == len(ids) else None

        def answer(best: int, root: NextToken, **more) -> Answer:
            return Answer(
                token_ids=checked[best],
                finish_reason=FinishReason.CHOICE,
                text=self.text(checked[best]),
                version=version,
                context_len=context_len,
                gap=root.gap,
                blocks_kept=self._blocks_kept,
                rebuilt=session.rebuilt,
                choice=best,
                **more,
            )

        if ready is not None and gate is not None and longest > 1:
            first = tree.first_tokens()
            decided = generation.first_token(_logits_at(ready, first)) if first else None
            evidence = gate(decided.gap) if decided else None
            if decided and evidence:
                return answer(
                    decided.choice, ready, source=Source.GATED, tokens_forwarded=0,
                    cached_tokens=skip, first_token=decided, evidence=evidence,
                )  # fmt: skip
        tail = self._tail(session, next(self._owners), paid, skip, len(ids) - skip)
        try:
            root, scores, decided = yield from generation.score_choices(
                tail, tree, ids[skip:], ready
            )
            if keep and ready is None:
                self._keep(session, version, tail, ids.tolist(), [root])
        finally:
            tail.close()
        best = max(range(len(scores)), key=lambda index: (scores[index], -index))
        return answer(
            best, root, source=Source.RESUMED if skip else Source.COMPUTED,
            tokens_forwarded=tail.tokens_forwarded, cached_tokens=skip,
            choice_logprobs=tuple(scores), first_token=decided,
        )  # fmt: skip

    def generate(self, ids: np.ndarray, request: Request, tenant: str) -> TokenSteps:
        """Answer a prompt, whose beginning may be there as if it had been paid for."""
        nobody = Session(session_id="", owner=next(self._owners), when_full="error", tenant=tenant)
        count, entries = self._prefixes.match(tenant, ids, len(ids) - 1)
        if count:
            self._pages.hold(entries)
            nobody.paid.append(
                PaidTail(token_ids=tuple(ids[:count].tolist()), entries=entries, along=())
            )
        try:
            return (yield from self.stream(nobody, ids, request, commit=False, keep=False))
        finally:
            self._tiers.forget_paid(nobody)

    def stream(
        self, session: Session, ids: np.ndarray, request: Request, commit: bool, keep: bool
    ) -> TokenSteps:
        """See Verbs.stream."""
        if session.session_id and self._sessions.get(session.session_id) is not session:
            raise SessionError(f"session {session.session_id} was closed before it was asked")
        # Again, before others give way for it: the session may have grown since it was asked.
        checks.positions(self._model, session.context_len, len(ids), request.max_new_tokens)
        if commit:
            session_module.overflow_evictions(
                session, len(ids) + request.max_new_tokens, self._config.context_len,
                self._config.evict_quantum,
            )  # fmt: skip
        with session_module.using(session):
            yield from self._revival.resident(
                session, len(ids) + request.max_new_tokens - (not commit)
            )
            return (yield from self._answer(session, ids, request, commit, keep))

    def text(self, token_ids: Sequence[int]) -> str:
        """See Verbs.text."""
        return self._tokenizer.decode(token_ids) if self._tokenizer else ""

    # Inside

    def _answer(
        self, session: Session, ids: np.ndarray, request: Request, commit: bool, keep: bool
    ) -> TokenSteps:
        # Nothing approximate becomes durable, and a session-less prompt is no question.
        selects = self._blocks_kept is not None and not commit and bool(session.session_id)
        paid, skip = self._longest_paid(session, ids, request.max_new_tokens - (not commit))
        if commit and self._blocks_kept is not None:
            paid, skip = None, 0
        ahead: tuple[NextToken, ...] = ()
        if paid and skip == len(ids) and request.is_plain_greedy and not commit:
            # What was decoded ahead is what will be drawn.
            ahead = paid.behind(skip)[1 : request.max_new_tokens]
        owner = session.owner if commit else next(self._owners)
        version, context_len = session.version, session.context_len
        before = [*session.token_ids[-_TEXT_CONTEXT:], *ids.tolist()]
        # The last token drawn is forwarded only to be kept.
        count = len(ids) - skip + request.max_new_tokens - len(ahead) - (not commit)
        tail = self._tail(session, owner, paid, skip + len(ahead), count, selects=selects)
        is_prompt = not session.session_id
        if is_prompt:
            self._prefixes.begin(tail, session.tenant, ids)
        try:
            first = yield from self._ask(tail, ids, paid, skip)
            along = [first, *ahead]
            tokens, text, reason, gap = yield from generation.stream_tokens(
                tail, self._executor, request, along, self._tokenizer, before[-_TEXT_CONTEXT:]
            )
            new = [token.token_id for token in tokens]
            if commit:
                yield from self._commit(session, version, tail, ids, new)
            elif keep and tail.tokens_forwarded:
                if not request.is_plain_greedy:
                    new, along = [], [first]
                    tail.position = context_len + len(ids)
                self._keep(session, version, tail, [*ids.tolist(), *new[: len(along) - 1]], along)
        finally:
            self._prefixes.end(tail)
            tail.close()
        return generation.answer_of(
            tokens,
            text,
            reason,
            gap,
            source=Source.RESUMED if skip and not is_prompt else Source.COMPUTED,
            version=version,
            context_len=context_len,
            tokens_forwarded=tail.tokens_forwarded,
            cached_tokens=skip,
            rebuilt=session.rebuilt,
            blocks_kept=self._blocks_kept if selects else None,
        )

    def _commit(self, session: Session, version: int, tail: Tail, ids, answer: list[int]) -> Steps:
        """Make a finished tail part of the stream."""
        if session.version != version or self._sessions.get(session.session_id) is not session:
            raise ConflictError(
                f"session {session.session_id} changed while a turn to be committed was running; "
                "ask again"
            )
        dropped = session_module.overflow_evictions(  # may refuse: it may have grown since asked
            session, len(ids) + len(answer), self._config.context_len, self._config.evict_quantum
        )
        # The last token drawn was not forwarded yet.
        yield from tail.forward(answer[-1:], want_last=False)
        entries = tail.entries()
        self._pages.hold(entries)
        self._pages.drop(session.entries)
        session.entries = entries
        session.token_ids.extend([*ids.tolist(), *answer])
        if dropped:
            self._contexts.drop_oldest(session, dropped)
        self._contexts.advance_version(session)

    def _tail(
        self,
        session: Session,
        owner: int,
        paid: PaidTail | None,
        skip: int,
        count: int,
        *,
        selects: bool = True,
    ) -> Tail:
        """Start a tail of `count` more tokens behind the context and `skip` paid ones."""
        position = session.context_len + skip
        context = session.entries
        if paid:
            context = pages_module.cut_end(paid.entries, position)
        shifts = self._contexts.shifts(session, session.stream_len + skip, count)
        on_paid = context if paid else ()
        self._pages.hold(on_paid)  # the paid tail may be given back for the new one's own pages
        try:
            return Tail(
                self._executor, self._pages, owner, context, position, shifts, selects=selects
            )
        finally:
            self._pages.drop(on_paid)

    def _longest_paid(
        self, session: Session, ids: np.ndarray, more: int
    ) -> tuple[PaidTail | None, int]:
        """Find the paid tail to go on behind, and the tokens it saves, unless it is in the way.

        Who goes on behind a part-filled page may need one page more than who starts anew.

        Args:
          more: tokens behind the question.
        """
        paid, skip = session_module.longest_paid(session, ids)
        alone = -(-(len(ids) + more) // self._pages.page_size)
        if paid and self._pages.num_free <= alone == self._pages.num_available:
            return None, 0
        return paid, skip

    def _ask(
        self, tail: Tail, ids: np.ndarray, paid: PaidTail | None, skip: int
    ) -> Generator[Need, Ran, NextToken]:
        """Forward what is not paid; return the distribution after the question."""
        if skip == len(ids):
            assert paid is not None
            return paid.behind(skip)[0]
        result = yield from tail.forward(ids[skip:], want_last=True)
        assert result is not None
        return NextToken.of(result, 0)

    def _keep(
        self,
        session: Session,
        version: int,
        tail: Tail,
        token_ids: Sequence[int],
        along: Sequence[NextToken],
    ) -> PaidTail:
        """Keep what a tail forwarded; a session that has changed meanwhile does not take it."""
        entries = tail.keep()
        self._pages.disown(tail.owner, None)
        kept = PaidTail(token_ids=tuple(token_ids), entries=entries, along=tuple(along))
        if session.version == version and self._sessions.get(session.session_id) is session:
            session.paid.append(kept)
        else:
            self._pages.drop(entries)
        return kept


def _logits_at(ready: NextToken, token_ids: Sequence[int]) -> list[float]:
    """Look tokens up in a kept distribution."""
    return np.asarray(ready.row_logits())[list(token_ids)].tolist()
