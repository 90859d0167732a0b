"""The verbs: small edits of tables around the same step, each a generator of what it needs.

`Engine` runs them one at a time; a scheduler drives many of them in shared steps. What each takes,
returns and raises is written there. A verb takes effect when its last need is met: a question that
runs beside an append sees the session as it was. Whoever drives verbs side by side lets a durable
verb run beside questions of its session at most, and beside nothing of it if it evicts or rolls
back: that frees cells when it begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Unpack

import numpy as np

from jaxstate import checks, generation
from jaxstate import constraint as constraint_module
from jaxstate import pages as pages_module
from jaxstate import session as session_module
from jaxstate.answer import Answer, Evidence, FinishReason, Source
from jaxstate.cell_copy import Cells
from jaxstate.choices import ChoiceTree
from jaxstate.config import EngineConfig
from jaxstate.constraint import Constraint
from jaxstate.contexts import Contexts
from jaxstate.errors import (
    CapacityError,
    ConflictError,
    InputError,
    SessionError,
    SessionExistsError,
    UnknownSessionError,
)
from jaxstate.executor import Executor
from jaxstate.generation import Request, RequestOptions
from jaxstate.models.config import ModelConfig
from jaxstate.models.tokenizer import Tokenizer
from jaxstate.needs import Need, Ran, Steps, TokenSteps
from jaxstate.pages import Pages
from jaxstate.prefixes import Prefixes
from jaxstate.revival import Revival
from jaxstate.session import PaidTail, Session, WhenFull
from jaxstate.tail import NextToken, Tail
from jaxstate.tiers import Tiers

_TEXT_CONTEXT = 8  # ids before an answer that can hold the beginning of its first character


class Verbs:
    """Sessions and pages of an engine, and what can be done with them."""

    def __init__(
        self,
        executor: Executor,
        model: ModelConfig,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
    ):
        """Start without sessions."""
        self.model = model
        self.config = config
        self.executor = executor
        self.pages = Pages(config.num_pages, config.page_size)
        self.sessions: dict[str, Session] = {}
        self.prefixes = Prefixes(self.pages, self.sessions, config.prefix_share)
        self.tiers = Tiers(executor, self.pages, self.sessions, kept=self.prefixes.tree)
        self.contexts = Contexts(executor, model, config, self.pages, self.prefixes, self.tiers)
        self.revival = Revival(
            executor, config, self.pages, self.sessions, self.prefixes, self.tiers, self.contexts
        )
        self._blocks_kept = config.selector.kept if config.selector else None
        self._tokenizer = tokenizer
        self._owners = itertools.count()
        self._names = itertools.count(1)

    # Sessions

    def create(
        self,
        frozen: Sequence[int],
        session_id: str | None,
        when_full: WhenFull,
        tenant: str = "",
    ) -> Steps:
        """See Engine.create."""
        if when_full not in ("error", "slide"):
            raise InputError(f'when_full: expected "error" or "slide", got "{when_full}"')
        name = session_id if session_id is not None else self._free_name()
        if name in self.sessions:
            raise SessionExistsError(
                f"session {name} exists already; choose another id or close it"
            )
        session = Session(
            session_id=name, owner=next(self._owners), when_full=when_full, tenant=tenant
        )
        if len(frozen):
            ids = checks.token_ids(frozen, self.model, "frozen")
            if len(ids) >= self.config.context_len:
                raise CapacityError(
                    f"frozen: expected less than context_len={self.config.context_len} tokens, "
                    f"got {len(ids)}; shorten the prefix or raise context_len"
                )
            session.frozen_len = len(ids)
            yield from self.contexts.begin(session, ids)
        self.tiers.touch(session)
        self.sessions[name] = session
        return name

    def session(self, session_id: str) -> Session:
        """See Engine.session."""
        try:
            return self.sessions[session_id]
        except KeyError:
            raise UnknownSessionError(session_id, self.sessions) from None

    def fork(self, session_id: str, *, new_id: str | None = None) -> str:
        """See Engine.fork."""
        parent = self.session(session_id)
        name = new_id if new_id is not None else self._free_name()
        if name in self.sessions:
            raise SessionExistsError(
                f"session {name} exists already; choose another id or close it"
            )
        self.revival.bring_back(parent)
        self.pages.hold(parent.entries)
        child = self.sessions[name] = Session(
            session_id=name,
            owner=next(self._owners),
            when_full=parent.when_full,
            frozen_len=parent.frozen_len,
            token_ids=list(parent.token_ids),
            entries=parent.entries,
            evicted=parent.evicted,
            stream_floor=parent.stream_floor,
            version=parent.version,
            tenant=parent.tenant,
            rebuilt=parent.rebuilt,
        )
        self.tiers.touch(child)
        if parent.stored:
            self.tiers.lose(child)
        return name

    def adopt(self, session: Session) -> None:
        """Open a session that was before; its cells are lost until it is of use.

        Args:
          session: its tokens, with an owner of no meaning.
        Raises:
          CapacityError: its context is longer than a session's may be.
        """
        limit = self.config.context_len
        if session.context_len > limit:
            raise CapacityError(
                f"session {session.session_id}: expected at most context_len={limit} tokens, got "
                f"{session.context_len}; start with a longer context"
            )
        session.owner = next(self._owners)
        self.tiers.touch(session)
        self.tiers.lose(session)
        self.sessions[session.session_id] = session

    def open_with(self, session: Session, cells: Cells, shifts: np.ndarray) -> None:
        """Open a session with its cells; one of the same id is closed for it.

        Args:
          session: its tokens, with an owner of no meaning.
          cells, shifts: see cell_copy.take.
        Raises:
          PoolFullError: there is no room; nothing has changed.
        """
        session.owner = next(self._owners)
        self.revival.put_cells(session, cells, shifts)
        if session.session_id in self.sessions:
            self.close(session.session_id)
        self.tiers.touch(session)
        self.sessions[session.session_id] = session

    def revive(self, session_id: str) -> Steps:
        """Bring a session's cells into the pool before anybody asks; lost ones are computed."""
        session = self.session(session_id)
        with session_module.using(session):
            yield from self.revival.resident(session)

    def close(self, session_id: str) -> None:
        """See Engine.close."""
        session = self.session(session_id)
        self.tiers.forget_paid(session)
        self.prefixes.keep_session(session)
        self.tiers.discard(session)
        self.pages.drop(session.entries)
        self.pages.disown(session.owner, None)
        del self.sessions[session_id]

    # Durable verbs

    def append(self, session_id: str, token_ids: Sequence[int]) -> Steps:
        """See Engine.append."""
        session = self.session(session_id)
        ids = checks.token_ids(token_ids, self.model, "append")
        with session_module.using(session):
            yield from self.revival.resident(session)
            yield from self.contexts.append(session, ids)
            self.contexts.advance_version(session)
        return session.version

    def update(self, session_id: str, token_ids: Sequence[int]) -> Steps:
        """See Engine.update."""
        session = self.session(session_id)
        ids = checks.token_ids(token_ids, self.model, "update")
        with session_module.using(session):
            yield from self.revival.resident(session)
            yield from self.contexts.update(session, ids)
            self.contexts.advance_version(session)
        return session.version

    def rollback(self, session_id: str, count: int) -> int:
        """See Engine.rollback."""
        session = self.session(session_id)
        checks.count(count, "rollback", least=1)
        self.revival.bring_back(session)
        self.contexts.roll_back(session, count)
        self.contexts.advance_version(session)
        return session.version

    def repack(self, session_id: str) -> Steps:
        """Move an idle session's cells together, see Tiers.repack; returns the pages freed."""
        session = self.session(session_id)
        yield from ()  # it forwards nothing
        if session.running or session.stored:
            return 0
        return self.tiers.repack(session)

    # Asking

    def advance(
        self,
        session_id: str,
        entry: Sequence[int],
        *,
        max_new_tokens: int,
        min_gap: float,
        eos_ids: Sequence[int],
        slot_ids: Sequence[int],
    ) -> Steps:
        """See Engine.advance."""
        session = self.session(session_id)
        ids = checks.token_ids(entry, self.model, "entry")
        checks.count(max_new_tokens, "max_new_tokens", least=0)
        checks.vocabulary(self.model, eos_ids, "eos_ids")
        checks.vocabulary(self.model, slot_ids, "slot_ids")
        checks.positions(self.model, session.context_len, len(ids), max_new_tokens)
        with session_module.using(session):
            yield from self.revival.resident(session, len(ids) + max_new_tokens)
            return (
                yield from self._advance(session, ids, max_new_tokens, min_gap, eos_ids, slot_ids)
            )

    def _advance(
        self,
        session: Session,
        ids: np.ndarray,
        max_new_tokens: int,
        min_gap: float,
        eos_ids: Sequence[int],
        slot_ids: Sequence[int],
    ) -> Steps:
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

    def stream(
        self,
        session_id: str,
        question: Sequence[int],
        *,
        max_new_tokens: int,
        commit: bool = False,
        keep: bool = False,
        **options: Unpack[RequestOptions],
    ) -> TokenSteps:
        """See Engine.stream; arguments are checked at once.

        Args:
          keep: what was forwarded stays as a paid tail.
        """
        session = self.session(session_id)
        ids = checks.token_ids(question, self.model, "question")
        request = self._request(ids, session.context_len, max_new_tokens, **options)
        if commit:  # refuse now what could not be kept later
            session_module.overflow_evictions(
                session,
                len(ids) + max_new_tokens,
                self.config.context_len,
                self.config.evict_quantum,
            )
        return self._stream(session, ids, request, commit, keep)

    def choose(
        self,
        session_id: str,
        question: Sequence[int],
        choices: Sequence[Sequence[int]],
        *,
        gate: Callable[[float], Evidence | None] | None = None,
        keep: bool = False,
    ) -> Steps:
        """See Engine.choose.

        Args:
          gate: whether the first token alone may decide that leads by so many logits; it is asked
            where the question is paid for and the rest would need a step.
          keep: as for stream.
        """
        session = self.session(session_id)
        ids = checks.token_ids(question, self.model, "question")
        checked = [
            tuple(checks.token_ids(choice, self.model, "choices").tolist()) for choice in choices
        ]
        tree = ChoiceTree(checked)
        longest = max(len(choice) for choice in checked)
        checks.positions(self.model, session.context_len, len(ids), longest)
        with session_module.using(session):
            yield from self.revival.resident(session, len(ids))
            return (yield from self._choose(session, ids, checked, tree, gate, keep))

    def _choose(
        self,
        session: Session,
        ids: np.ndarray,
        checked: Sequence[tuple[int, ...]],
        tree: ChoiceTree,
        gate: Callable[[float], Evidence | None] | None,
        keep: bool,
    ) -> Steps:
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

    def stream_generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        tenant: str = "",
        **options: Unpack[RequestOptions],
    ) -> TokenSteps:
        """See Engine.stream_generate; arguments are checked at once."""
        ids = checks.token_ids(prompt, self.model, "prompt")
        request = self._request(ids, 0, max_new_tokens, **options)
        return self._generate(ids, request, tenant)

    def check_entry(self, session_id: str, token_ids: Sequence[int]) -> None:
        """Refuse an entry that `advance` would refuse whatever the session becomes.

        Raises:
          InputError: no tokens, or an id out of range.
        """
        self.session(session_id)
        checks.token_ids(token_ids, self.model, "header")

    def compile(self, constraint: Constraint) -> None:
        """Have a constraint compiled for whoever asks with it next; from any thread.

        Raises:
          InputError: see constraint.compiled.
        """
        constraint_module.compiled(constraint, self._tokenizer)

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode an answer's tokens; "" without a tokenizer."""
        return self._tokenizer.decode(token_ids) if self._tokenizer else ""

    # Inside

    def _generate(self, ids: np.ndarray, request: Request, tenant: str) -> TokenSteps:
        """Answer a prompt, whose beginning may be there as if it had been paid for."""
        nobody = Session(session_id="", owner=next(self._owners), when_full="error", tenant=tenant)
        count, entries = self.prefixes.match(tenant, ids, len(ids) - 1)
        if count:
            self.pages.hold(entries)
            nobody.paid.append(
                PaidTail(token_ids=tuple(ids[:count].tolist()), entries=entries, along=())
            )
        try:
            return (yield from self._stream(nobody, ids, request, commit=False, keep=False))
        finally:
            self.tiers.forget_paid(nobody)

    def _free_name(self) -> str:
        return next(name for n in self._names if (name := f"s{n}") not in self.sessions)

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
        shifts = self.contexts.shifts(session, session.stream_len + skip, count)
        on_paid = context if paid else ()
        self.pages.hold(on_paid)  # the paid tail may be given back for the new one's own pages
        try:
            return Tail(
                self.executor, self.pages, owner, context, position, shifts, selects=selects
            )
        finally:
            self.pages.drop(on_paid)

    def _longest_paid(
        self, session: Session, ids: np.ndarray, more: int
    ) -> tuple[PaidTail | None, int]:
        """Find the paid tail to go on behind, and the tokens it saves, unless it is in the way.

        Who goes on behind a part-filled page may need one page more than who starts anew.

        Args:
          more: tokens behind the question.
        """
        paid, skip = session_module.longest_paid(session, ids)
        alone = -(-(len(ids) + more) // self.pages.page_size)
        if paid and self.pages.num_free <= alone == self.pages.num_available:
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
        self.pages.disown(tail.owner, None)
        kept = PaidTail(token_ids=tuple(token_ids), entries=entries, along=tuple(along))
        if session.version == version and self.sessions.get(session.session_id) is session:
            session.paid.append(kept)
        else:
            self.pages.drop(entries)
        return kept

    def _request(
        self,
        ids: np.ndarray,
        context_len: int,
        max_new_tokens: int,
        **options: Unpack[RequestOptions],
    ) -> Request:
        request = checks.request(
            ids, self.model, max_new_tokens, tokenizer=self._tokenizer, **options
        )
        checks.positions(self.model, context_len, len(ids), max_new_tokens)
        return request

    def _stream(
        self, session: Session, ids: np.ndarray, request: Request, commit: bool, keep: bool
    ) -> TokenSteps:
        if session.session_id and self.sessions.get(session.session_id) is not session:
            raise SessionError(f"session {session.session_id} was closed before it was asked")
        checks.positions(
            self.model, session.context_len, len(ids), request.max_new_tokens
        )  # again: the session may have grown since it was asked
        with session_module.using(session):
            yield from self.revival.resident(
                session, len(ids) + request.max_new_tokens - (not commit)
            )
            return (yield from self._answer(session, ids, request, commit, keep))

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
            self.prefixes.begin(tail, session.tenant, ids)
        try:
            first = yield from self._ask(tail, ids, paid, skip)
            along = [first, *ahead]
            tokens, text, reason, gap = yield from generation.stream_tokens(
                tail, self.executor, request, along, self._tokenizer, before[-_TEXT_CONTEXT:]
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
            self.prefixes.end(tail)
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
        if session.version != version or self.sessions.get(session.session_id) is not session:
            raise ConflictError(
                f"session {session.session_id} changed while a turn to be committed was running; "
                "ask again"
            )
        dropped = session_module.overflow_evictions(  # may refuse: it may have grown since asked
            session, len(ids) + len(answer), self.config.context_len, self.config.evict_quantum
        )
        # The last token drawn was not forwarded yet.
        yield from tail.forward(answer[-1:], want_last=False)
        entries = tail.entries()
        self.pages.hold(entries)
        self.pages.drop(session.entries)
        session.entries = entries
        session.token_ids.extend([*ids.tolist(), *answer])
        if dropped:
            self.contexts.drop_oldest(session, dropped)
        self.contexts.advance_version(session)


def _logits_at(ready: NextToken, token_ids: Sequence[int]) -> list[float]:
    """Look tokens up in a kept distribution."""
    return np.asarray(ready.row_logits())[list(token_ids)].tolist()
