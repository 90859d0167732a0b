"""The verbs: small edits of tables around the same step, each a generator of what it needs.

`Engine` runs them one at a time; a scheduler drives many of them in shared steps. What each takes,
returns and raises is written there. A verb takes effect when its last need is met: a question that
runs beside an append sees the session as it was. Whoever drives verbs side by side lets a durable
verb run beside questions of its session at most, and beside nothing of it if it evicts or rolls
back: that frees cells when it begins.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Unpack

import numpy as np

from jaxstate import cell_copy, checks, generation
from jaxstate import constraint as constraint_module
from jaxstate import pages as pages_module
from jaxstate import rows as rows_module
from jaxstate import session as session_module
from jaxstate.answer import Answer, Evidence, FinishReason, Source
from jaxstate.cell_copy import Cells
from jaxstate.choices import ChoiceTree
from jaxstate.config import EngineConfig
from jaxstate.constraint import Constraint
from jaxstate.errors import (
    CapacityError,
    ConflictError,
    InputError,
    SessionError,
    SessionExistsError,
    SnapshotError,
    UnknownSessionError,
)
from jaxstate.executor import Executor
from jaxstate.generation import Request, RequestOptions
from jaxstate.models.config import ModelConfig
from jaxstate.models.tokenizer import Tokenizer
from jaxstate.needs import Need, Ran, Steps, TokenSteps
from jaxstate.pages import Pages
from jaxstate.prefixes import Prefixes
from jaxstate.session import Change, PaidTail, Session, WhenFull
from jaxstate.tail import NextToken, Tail
from jaxstate.tiers import Tiers

logger = logging.getLogger(__name__)

Earlier = tuple[Session, Cells, np.ndarray, Sequence[Change]]
"""An earlier state of a session: its record, cells and their shifts, and all changes since."""

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
        """Start without sessions.

        `on_change` is called with every session that is changed. `earlier` returns what was saved
        of one whose cells are lost, None if nothing was; SnapshotError if that is worth nothing.
        """
        self.model = model
        self.config = config
        self.executor = executor
        self.pages = Pages(config.num_pages, config.page_size)
        self.sessions: dict[str, Session] = {}
        self.prefixes = Prefixes(self.pages, self.sessions, config.prefix_share)
        self.tiers = Tiers(executor, self.pages, self.sessions, kept=self.prefixes.tree)
        self.on_change: Callable[[Session], None] = lambda session: None
        self.earlier: Callable[[Session], Earlier | None] = lambda session: None
        self._blocks_kept = config.selector.kept if config.selector else None
        self._tokenizer = tokenizer
        executor.on_pool_lost = self._lose_all
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
            yield from self._begin(session, ids)
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
        self._bring_back(parent)
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
        self._put_cells(session, cells, shifts)
        if session.session_id in self.sessions:
            self.close(session.session_id)
        self.tiers.touch(session)
        self.sessions[session.session_id] = session

    def revive(self, session_id: str) -> Steps:
        """Bring a session's cells into the pool before anybody asks; lost ones are computed."""
        session = self.session(session_id)
        with self._using(session):
            yield from self._resident(session)

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
        with self._using(session):
            yield from self._resident(session)
            yield from self._append(session, ids)
            self._advance_version(session)
        return session.version

    def update(self, session_id: str, token_ids: Sequence[int]) -> Steps:
        """See Engine.update."""
        session = self.session(session_id)
        ids = checks.token_ids(token_ids, self.model, "update")
        with self._using(session):
            yield from self._resident(session)
            yield from self._update(session, ids)
            self._advance_version(session)
        return session.version

    def _update(self, session: Session, ids: np.ndarray) -> Steps:
        stream = np.asarray(session.token_ids[session.frozen_len :], np.int32)
        common = session_module.common_len(stream, ids)
        if common < len(stream):
            session_module.rolled_back(session, len(stream) - common)  # may refuse
        if len(ids) > self.config.context_len - session.frozen_len:
            raise CapacityError(
                f"update of {len(ids)} tokens is longer than the stream's window of "
                f"{self.config.context_len - session.frozen_len}; shorten it or raise context_len"
            )
        if common < len(ids):
            position = session.frozen_len + common
            begin = session.stream_len - (len(stream) - common)
            self._check_room(
                session, pages_module.cut_end(session.entries, position), position,
                self._shifts(session, begin, len(ids) - common),
            )  # fmt: skip
        if common < len(stream):
            self._roll_back(session, len(stream) - common)
        if common < len(ids):
            yield from self._append(session, ids[common:])

    def rollback(self, session_id: str, count: int) -> int:
        """See Engine.rollback."""
        session = self.session(session_id)
        checks.count(count, "rollback", least=1)
        self._bring_back(session)
        self._roll_back(session, count)
        self._advance_version(session)
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
        with self._using(session):
            yield from self._resident(session, len(ids) + max_new_tokens)
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
        with self._using(session):
            yield from self._resident(session, len(ids))
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

    def _advance_version(self, session: Session) -> None:
        """Note a change; what was paid for beside it saw the session as it was."""
        self.tiers.forget_paid(session)
        session.version += 1
        self.on_change(session)

    @contextlib.contextmanager
    def _using(self, session: Session) -> Iterator[None]:
        """Keep a session where it is while a verb runs on it."""
        session.running += 1
        try:
            yield
        finally:
            session.running -= 1

    def _resident(self, session: Session, count: int = 0) -> Steps:
        """Bring a session's cells into the pool; those that are lost are computed anew.

        Args:
          count: tokens that are to go on pages behind it.
        """
        if self._bring_back(session, count):
            return
        try:
            earlier = self.earlier(session)
            if earlier is not None:
                yield from self._replay(session, *earlier)
                return
        except SnapshotError as error:
            logger.warning("session %s: %s", session.session_id, error)
        yield from self._rebuild(session)

    def _bring_back(self, session: Session, count: int = 0) -> bool:
        """Bring a session's cells into the pool at once; False where they are lost."""
        self.tiers.touch(session)
        if session.stored and session.stored.is_lost:
            return False
        with self._using(session):
            try:
                self.tiers.bring_back(session, -(-count // self.config.page_size))
            except SnapshotError as error:
                logger.warning("%s", error)
                self.tiers.lose(session)
                return False
        return True

    def _rebuild(self, session: Session) -> Steps:
        """Compute a session's cells anew from its tokens.

        Where nothing was evicted they are what they were. Else the kept tokens never saw what was
        evicted: its version advances, and its answers say `rebuilt`.
        """
        ids = np.asarray(session.token_ids, np.int32)
        kept = session.context_len - session.frozen_len
        shifts = np.concatenate(
            [np.zeros(session.frozen_len, np.int32), self._shifts(session, session.evicted, kept)]
        )
        tail = Tail(self.executor, self.pages, session.owner, (), 0, shifts, growing=True)
        try:
            yield from tail.forward(ids, want_last=False)
            if session.stored is None:
                return  # another verb has done it meanwhile
            session.entries, session.stored = tail.keep(), None
        finally:
            tail.close()
        if session.evicted:
            session.rebuilt = True
            self._advance_version(session)

    def _put_cells(self, session: Session, cells: Cells, shifts: np.ndarray) -> None:
        """Give a session cells on pages of its own, in order of position."""
        if len(shifts):
            growth = pages_module.plan_growth(
                self.pages, session.owner, (), 0, shifts, growing=True
            )
            self.pages.hold(growth.entries)
            cell_copy.put(self.executor, growth, cells)
            session.entries = growth.entries

    def _lose_all(self) -> None:
        """Note that the pool is empty. Verbs that have begun must not go on."""
        self.prefixes.forget_all()
        for session in self.sessions.values():
            self.tiers.forget_paid(session)
            if session.entries:
                self.tiers.lose(session)

    def _replay(
        self, session: Session, past: Session, cells: Cells, shifts: np.ndarray,
        changes: Sequence[Change],
    ) -> Steps:  # fmt: skip
        """Give a session the cells of an earlier state of it, and do again what came after.

        Each change evicts when it did, so that every token sees what it saw.

        Raises:
          SnapshotError: that is not what the session has become.
        """
        past.owner = session.owner
        try:
            self._put_cells(past, cells, shifts)
            for change in changes:
                yield from self._redo(past, change)
            if past.token_ids != session.token_ids or past.evicted != session.evicted:
                raise SnapshotError("what its changes led to is not what it has become")
            if session.stored is None:
                return
            session.entries, past.entries, session.stored = past.entries, (), None
        finally:
            self.pages.drop(past.entries)

    def _redo(self, past: Session, change: Change) -> Steps:
        """Change a state as a durable verb did."""
        if past.stream_len > change.begin:
            self._roll_back(past, past.stream_len - change.begin)
        dropped = change.evicted - past.evicted
        # A committed turn was computed before it evicted anything, an append after it.
        is_turn = change.stream_floor > change.begin
        if dropped and not is_turn:
            self._drop_oldest(past, dropped)
        if change.token_ids:
            ids = np.asarray(change.token_ids, np.int32)
            yield from self._extend(past, ids, self._shifts(past, past.stream_len, len(ids)))
        if dropped and is_turn:
            self._drop_oldest(past, dropped)
        past.stream_floor = change.stream_floor

    def _begin(self, session: Session, ids: np.ndarray) -> Steps:
        """Make `ids` the context of a new session, forwarding what nobody has computed."""
        count, entries = self.prefixes.match(session.tenant, ids, len(ids))
        self.pages.hold(entries)
        session.entries, session.token_ids = entries, ids[:count].tolist()
        session.cached_tokens = count
        if count == len(ids):
            return
        shifts = np.zeros(len(ids) - count, np.int32)
        try:
            yield from self._extend(session, ids[count:], shifts, beginning=ids)
        except BaseException:
            self.pages.drop(session.entries)
            raise

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

    def _shifts(self, session: Session, first: int, count: int, evicting: int = 0) -> np.ndarray:
        """Shifts of stream tokens `first` and following after `evicting` more are dropped."""
        epoch = session_module.rotation_epoch(
            self.model.max_positions, session.frozen_len, self.config.page_size
        )
        return session_module.stream_shifts(first, count, session.evicted + evicting, epoch)

    def _append(self, session: Session, ids: np.ndarray) -> Steps:
        dropped = session_module.overflow_evictions(
            session, len(ids), self.config.context_len, self.config.evict_quantum
        )
        shifts = self._shifts(session, session.stream_len, len(ids), dropped)
        entries = session_module.evict(session, dropped) if dropped else session.entries
        position = session.context_len - dropped
        self._check_room(session, entries, position, shifts)
        self.tiers.forget_paid(session)
        if dropped:
            self._drop_oldest(session, dropped)
        yield from self._extend(session, ids, shifts)

    def _extend(
        self,
        session: Session,
        ids: np.ndarray,
        shifts: np.ndarray,
        beginning: np.ndarray | None = None,
    ) -> Steps:
        """Forward tokens behind the context and make them part of it.

        Args:
          beginning: the whole context to be, where others may share it meanwhile.
        """
        tail = Tail(
            self.executor,
            self.pages,
            session.owner,
            session.entries,
            session.context_len,
            shifts,
            growing=True,
        )
        if beginning is not None:
            self.prefixes.begin(tail, session.tenant, beginning)
        try:
            yield from tail.forward(ids, want_last=False)
            self.prefixes.end(tail, keep=False)  # the session has it
            entries = tail.keep()
        except BaseException:
            self.prefixes.end(tail)
            tail.close()
            raise
        self.pages.drop(session.entries)
        session.entries = entries
        session.token_ids.extend(ids.tolist())

    def _drop_oldest(self, session: Session, count: int) -> None:
        entries = session_module.evict(session, count)
        self.pages.replace(session.entries, entries)
        session.entries = entries
        session.stream_floor = session.stream_len
        del session.token_ids[session.frozen_len : session.frozen_len + count]
        session.evicted += count

    def _roll_back(self, session: Session, count: int) -> None:
        entries = session_module.rolled_back(session, count)
        self.tiers.forget_paid(session)
        self.pages.replace(session.entries, entries)
        session.entries = entries
        del session.token_ids[session.context_len - count :]
        session.saved_len = min(session.saved_len, session.stream_len)

    def _check_room(self, session: Session, entries, position: int, shifts: np.ndarray) -> None:
        """Refuse tokens that pool or step table cannot hold behind `entries`.

        What paid tails, eviction and rollback give back counts as free.
        """
        needed = pages_module.pages_needed(self.pages, session.owner, entries, position, shifts)
        self.pages.require(needed, session.entries, staying=entries)
        one_step = len(shifts) <= self.executor.longest_step  # reads only what is there already
        rows_module.check_context(
            pages_module.stretches(entries, self.config.page_size), 0 if one_step else needed,
            self.executor.config.step_shapes[-1], self.executor.config,
        )  # fmt: skip

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
        shifts = self._shifts(session, session.stream_len + skip, count)
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
        with self._using(session):
            yield from self._resident(session, len(ids) + request.max_new_tokens - (not commit))
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
            self._drop_oldest(session, dropped)
        self._advance_version(session)


def _logits_at(ready: NextToken, token_ids: Sequence[int]) -> list[float]:
    """Look tokens up in a kept distribution."""
    return np.asarray(ready.row_logits())[list(token_ids)].tolist()
