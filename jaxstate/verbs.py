"""The verbs: small edits of tables around the same step, each a generator of what it needs.

`Engine` runs them one at a time; a scheduler drives many of them in shared steps. What each takes,
returns and raises is written there. A verb takes effect when its last need is met: a question that
runs beside an append sees the session as it was. Whoever drives verbs side by side lets a durable
verb run beside questions of its session at most, and beside nothing of it if it evicts or rolls
back: that frees cells when it begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Unpack

import numpy as np

from jaxstate import checks
from jaxstate import constraint as constraint_module
from jaxstate import session as session_module
from jaxstate.answer import Evidence
from jaxstate.asking import Asking
from jaxstate.cell_copy import Cells
from jaxstate.choices import ChoiceTree, tree_parts
from jaxstate.config import EngineConfig
from jaxstate.constraint import Constraint
from jaxstate.contexts import Contexts
from jaxstate.errors import (
    CapacityError,
    ConflictError,
    InputError,
    SessionExistsError,
    UnknownSessionError,
)
from jaxstate.executor import Executor
from jaxstate.flash import Question
from jaxstate.generation import Request, RequestOptions
from jaxstate.models.config import ModelConfig
from jaxstate.models.tokenizer import Tokenizer
from jaxstate.needs import Steps, TokenSteps
from jaxstate.pages import Pages
from jaxstate.prefixes import Prefixes
from jaxstate.prepositioning import Entry
from jaxstate.revival import Revival
from jaxstate.session import Session, WhenFull
from jaxstate.tiers import Tiers


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
        self._tokenizer = tokenizer
        self._owners = itertools.count()
        self._asking = Asking(
            executor, model, config, tokenizer, self.pages, self.sessions, self.prefixes,
            self.tiers, self.contexts, self.revival, self._owners,
        )  # fmt: skip
        self._names = itertools.count(1)
        self._opening: set[str] = set()  # ids of sessions whose prefixes are being computed

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
        name = self._new_name(session_id)
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
            self._opening.add(name)
            try:
                yield from self.contexts.begin(session, ids)
            finally:
                self._opening.remove(name)
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
        name = self._new_name(new_id)
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

    def open_with(
        self, session: Session, cells: Cells, shifts: np.ndarray, end_verbs: Callable[[], None]
    ) -> None:
        """Open a session with its cells; one of the same id is closed for it.

        Args:
          session: its tokens, with an owner of no meaning.
          cells, shifts: see cell_copy.take.
          end_verbs: called before the other one is closed.
        Raises:
          SessionExistsError: one of the same id is being created.
          PoolFullError: there is no room; nothing has changed.
        """
        if session.session_id not in self.sessions:
            self._new_name(session.session_id)
        session.owner = next(self._owners)
        self.revival.put_cells(session, cells, shifts)
        if session.session_id in self.sessions:
            end_verbs()
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
            self._check_open(session)
            self.contexts.advance_version(session)
        return session.version

    def update(self, session_id: str, token_ids: Sequence[int]) -> Steps:
        """See Engine.update."""
        session = self.session(session_id)
        ids = checks.token_ids(token_ids, self.model, "update")
        with session_module.using(session):
            yield from self.revival.resident(session)
            yield from self.contexts.update(session, ids)
            self._check_open(session)
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
        self._check_ahead(session.context_len, len(ids), max_new_tokens, eos_ids, slot_ids)
        with session_module.using(session):
            yield from self.revival.resident(session, len(ids) + max_new_tokens)
            steps = self._asking.advance(session, ids, max_new_tokens, min_gap, eos_ids, slot_ids)
            return (yield from steps)

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
        return self._asking.stream(session, ids, request, commit, keep)

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
        checked, tree = self._choices(choices, session.context_len, len(ids))
        with session_module.using(session):
            yield from self.revival.resident(session, len(ids))
            return (yield from self._asking.choose(session, ids, checked, tree, gate, keep))

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
        return self._asking.generate(ids, request, tenant)

    def check_length(self, question: Question) -> None:
        """Refuse a question by its length alone, which costs nothing; from any thread.

        Raises:
          CapacityError: it, or one of its choices, is longer than the model's positions.
        """
        checks.length(question.token_ids, self.model, "question")
        for choice in question.choices:
            checks.length(choice, self.model, "choices")

    def check_question(self, question: Question) -> None:
        """Refuse a question that no session can ever answer; from any thread.

        Its constraint is not looked at, see compile.

        Raises:
          InputError: no tokens, ids out of range, nothing to answer with, or choices that are none.
          CapacityError: it is too long even behind an empty context.
        """
        self.check_length(question)
        ids = checks.token_ids(question.token_ids, self.model, "question")
        if question.choices:
            _, tree = self._choices(question.choices, 0, len(ids))
            largest = self.config.step_shapes[-1]
            tree_parts(tree, largest.num_rows - 1, largest.num_tokens - 1)  # as Tail.split_tree
            return
        self._request(
            ids, 0, question.max_new_tokens, sampling=question.sampling, eos_ids=question.eos_ids
        )

    def check_entry(self, entry: Entry) -> None:
        """Refuse an entry that no session can ever pay for; from any thread.

        Raises:
          InputError: no tokens, or ids out of range.
          CapacityError: it is too long even behind an empty context.
        """
        checks.length(entry.token_ids, self.model, "header")
        ids = checks.token_ids(entry.token_ids, self.model, "header")
        self._check_ahead(0, len(ids), entry.max_new_tokens, entry.eos_ids, entry.slot_ids)

    def compile(self, constraint: Constraint) -> None:
        """Have a constraint compiled for whoever asks with it next; from any thread.

        Raises:
          InputError: see constraint.compiled.
        """
        constraint_module.compiled(constraint, self._tokenizer)

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode an answer's tokens; "" without a tokenizer."""
        return self._asking.text(token_ids)

    def _new_name(self, given: str | None) -> str:
        """Return the id of a new session: what is given, or one that is free."""

        def is_taken(name: str) -> bool:
            return name in self.sessions or name in self._opening

        if given is None:
            return next(name for n in self._names if not is_taken(name := f"s{n}"))
        if is_taken(given):
            raise SessionExistsError(
                f"session {given} exists already; choose another id or close it"
            )
        return given

    def _check_open(self, session: Session) -> None:
        """Refuse to note a change under an id that is another session's by now."""
        if self.sessions.get(session.session_id) is not session:
            raise ConflictError(
                f"session {session.session_id} was closed or replaced while it was changed; ask "
                "again"
            )

    def _choices(
        self, choices: Sequence[Sequence[int]], context_len: int, count: int
    ) -> tuple[list[tuple[int, ...]], ChoiceTree]:
        """Check choices behind a context and `count` more tokens."""
        checked = [
            tuple(checks.token_ids(choice, self.model, "choices").tolist()) for choice in choices
        ]
        tree = ChoiceTree(checked)
        longest = max(len(choice) for choice in checked)
        checks.positions(self.model, context_len, count, longest)
        return checked, tree

    def _check_ahead(
        self,
        context_len: int,
        count: int,
        max_new_tokens: int,
        eos_ids: Sequence[int],
        slot_ids: Sequence[int],
    ) -> None:
        """Check how far to decode behind an entry of `count` tokens, and where to stop."""
        checks.count(max_new_tokens, "max_new_tokens", least=0)
        checks.vocabulary(self.model, eos_ids, "eos_ids")
        checks.vocabulary(self.model, slot_ids, "slot_ids")
        checks.positions(self.model, context_len, count, max_new_tokens)

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
