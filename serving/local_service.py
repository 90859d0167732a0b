"""An engine and its worker thread in one process: verbs from any thread, many in each step.

    service = LocalService(engine)
    session = service.create(prompt_ids)
    service.append(session, row_ids)                      # goes on in the background
    flash = service.register(session, Question(token_ids=question_ids, max_new_tokens=4))
    for token in service.query(session, question): …     # Pending: tokens as they are drawn
    service.close()

One thread owns engine and scheduler; callers hand it commands and wait for what becomes of them.
Registered questions are answered in its idle time, all of a session's together, after every change
of the session; then what its next questions will begin with is forwarded ahead. An answer that is
there already is looked up by the caller's own thread.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import itertools
import logging
import math
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import numpy as np

from jaxstate import checks, drift, session_snapshot
from jaxstate.answer import Answer, Evidence, Source
from jaxstate.calibration import ShadowSample
from jaxstate.config import EngineConfig
from jaxstate.constraint import Constraint
from jaxstate.engine import Engine
from jaxstate.errors import (
    BusyError,
    CancelledError,
    CapacityError,
    ClosedError,
    ConflictError,
    InputError,
    JaxStateError,
    SessionError,
    UnknownSessionError,
)
from jaxstate.flash import FlashBoard, FlashQuery, Question
from jaxstate.gate import Gate, same_answer
from jaxstate.generation import RequestOptions
from jaxstate.metrics import Cells, Metrics, count_cells
from jaxstate.models.config import ModelConfig
from jaxstate.needs import Steps
from jaxstate.plan import JobClass, Limits
from jaxstate.prepositioning import Entry, Prepositions
from jaxstate.scheduler import Scheduler, State, Ticket
from jaxstate.serving import recovery, write_memory
from jaxstate.serving.answer_log import AnswerLog, FreshAnswer
from jaxstate.serving.bursts import BURST_GAP_S, Bursts
from jaxstate.serving.compilations import Compilations
from jaxstate.serving.description import Overview, ServiceInfo, SessionInfo
from jaxstate.serving.durable import Durable
from jaxstate.serving.evaluations import Evaluation, Evaluations
from jaxstate.serving.journal import Journal
from jaxstate.serving.journal_rows import SavedSession
from jaxstate.serving.pending import Pending
from jaxstate.serving.quotas import Holdings, QuotaOf, Usage
from jaxstate.serving.snapshots import Snapshots
from jaxstate.serving.write_memory import Number, WriteMemory
from jaxstate.session import WhenFull, common_len
from jaxstate.session_snapshot import SessionSnapshot

logger = logging.getLogger(__name__)

Stale = Literal["compute", "wait", "serve"]
"""What a query does whose registered answer is not of the newest version: compute it now, wait for
the one that is coming, or take the old one, which says its version."""

From = Literal["question", "header"]
"""What may answer at a risk: older answers to the question, or also the ready state that a declared
header leads to, whatever is asked."""


class LocalService:
    """Verbs of an engine for many threads at once."""

    def __init__(
        self,
        engine: Engine,
        *,
        step_tokens: int | None = None,
        max_waiting: int = 1024,
        preposition: int = 4,
        journal: Journal | None = None,
        snapshots: Snapshots | None = None,
        quota_of: QuotaOf | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Start the worker; from now on nobody else may use the engine.

        Args:
          step_tokens: most tokens of a step, what a question may have to wait for; None = the
            largest compiled step.
          max_waiting: verbs of a class that may wait; more are refused with BusyError.
          preposition: beginnings of questions of a session that are paid for in idle time, after
            every change of it; 0 = only headers that were declared.
          journal: what must not be lost is in it before a caller is told; sessions that are in it
            are opened again, and their cells computed in idle time or when somebody asks. Closed
            with the service.
          snapshots: where sessions' cells are saved once they rest and at the end, for the next
            start; needs a journal.
          quota_of: see Holdings; of what is computed unasked nothing is counted.
          clock: seconds, never going back.
        Raises:
          ValueError: snapshots without a journal.
          SnapshotError: the journal is damaged, or holds what this engine has no room for.
        """
        if snapshots is not None and journal is None:
            raise ValueError("snapshots: expected a journal that names them, got none")
        largest = engine.executor.config.step_shapes[-1]
        limits = Limits(
            tokens=min(step_tokens or largest.num_tokens, largest.num_tokens),
            rows=largest.num_rows,
        )
        self._engine = engine
        self._holdings = Holdings(engine.verbs.sessions, quota_of)
        self.metrics = Metrics()
        self._scheduler = Scheduler(
            engine.executor, engine.pages, limits, prefixes=engine.verbs.prefixes,
            on_end=self.metrics.note_end,
        )  # fmt: skip
        self._preposition = preposition
        self._max_waiting = max_waiting
        self._clock = clock
        self._changed = threading.Condition()
        self._commands: collections.deque[Callable[[], Any]] = collections.deque()
        self._submitting: collections.Counter[JobClass] = collections.Counter()
        self._boards: dict[str, FlashBoard] = {}
        self._logs: dict[str, AnswerLog] = {}
        self._memories: dict[str, WriteMemory] = {}
        self._listeners: list[Callable[[], None]] = []
        self._prepositions: dict[str, Prepositions] = {}
        self._advancing: dict[Ticket, tuple[Prepositions, Entry, int]] = {}  # version
        self._evaluations = Evaluations(self._scheduler)
        self._appending: dict[Ticket, int] = {}  # tokens
        self._bursts = Bursts()
        self._looked_after: dict[str, int] = {}  # versions that needed no repacking, or got it
        self._versions: dict[str, int] = {}  # computed, of open sessions
        self._news = itertools.count()
        self._reviving: dict[str, Ticket] = {}  # sessions whose cells are on their way
        self._closing = False
        self._durable = Durable(journal, snapshots, engine.verbs, self._soon)
        for saved in self._durable.recover():
            self._recover(saved)
        self._failure: BaseException | None = None
        self._step_s = 0.01  # of late
        self._thread = threading.Thread(target=self._run, name="jaxstate-worker", daemon=True)
        # A full collection over all that JAX has traced takes 100 ms, in which no step runs; what
        # is there by now stays.
        gc.collect()
        gc.freeze()
        self._thread.start()

    # Sessions

    def create(
        self,
        frozen: Sequence[int] = (),
        *,
        session_id: str | None = None,
        when_full: WhenFull = "error",
        tenant: str = "",
    ) -> str:
        """See Engine.create; returns when the prefix is computed, in steps shared with others."""
        return self.begin_create(
            frozen, session_id=session_id, when_full=when_full, tenant=tenant
        ).result()

    def begin_create(
        self,
        frozen: Sequence[int] = (),
        *,
        session_id: str | None = None,
        when_full: WhenFull = "error",
        tenant: str = "",
        deadline_s: float = math.inf,
    ) -> Pending:
        """Like create, without waiting; its result is the id. Cancelled, there is no session."""

        def begin() -> Steps:
            name = yield from self._engine.verbs.create(frozen, session_id, when_full, tenant)
            self._open(name)
            self._durable.created(self._engine.session(name))
            return name

        def submit(pending: Pending) -> None:
            self._submit_new(
                pending, begin, frozen, "frozen", JobClass.APPEND, cells=len(frozen), sessions=1,
                tenant=tenant, deadline_s=deadline_s, can_stop=True,
            )  # fmt: skip

        return self._pending(JobClass.APPEND, submit)

    def fork(self, session_id: str, *, new_id: str | None = None) -> str:
        """See Engine.fork; registered questions stay with the parent."""

        def fork() -> str:
            parent = self._engine.session(session_id)
            self._holdings.check(parent.tenant, sessions=1, cells=parent.context_len)
            name = self._engine.fork(session_id, new_id=new_id)
            self._open(name)
            self._durable.created(self._engine.session(name))
            return name

        return self._call(fork)

    def close_session(self, session_id: str) -> None:
        """Cancel what is under way on a session and free its cells; see Engine.close.

        Raises:
          SessionError: unknown, or an append is being computed.
        """

        def close() -> None:
            self._engine.session(session_id)
            if not self._scheduler.cancel_session(session_id, self._clock()):
                raise SessionError(
                    f"session {session_id}: an append is being computed; close it when it is done"
                )
            self._engine.close(session_id)
            self._durable.closed(session_id)
            self._forget(session_id)

        self._call(close)

    def snapshot(self, session_id: str, path: str | pathlib.Path, *, fingerprint: str) -> int:
        """Save a session, its cells and registered questions to a new directory.

        Args:
          fingerprint: of the model, `LoadedModel.fingerprint`.
        Returns:
          the version that was saved.
        Raises:
          SnapshotExistsError: the directory is there already.
          SnapshotSpaceError: it cannot be written.
          SessionError: unknown, or its cells leave the pool as soon as they come.
        """
        verbs = self._engine.verbs

        def submit(pending: Pending) -> None:
            self._submit_revival(pending, session_id, JobClass.QUERY, cells=0)

        def take() -> SessionSnapshot:
            board, prepositions = self._boards[session_id], self._prepositions[session_id]
            return session_snapshot.take(
                verbs, self._engine.session(session_id), fingerprint=fingerprint,
                registered=recovery.registered(board, prepositions),
            )  # fmt: skip

        self._pending(JobClass.QUERY, submit).result()
        snapshot = self._call(take)
        session_snapshot.write(path, snapshot)
        return snapshot.version

    def restore(
        self,
        path: str | pathlib.Path,
        *,
        fingerprint: str,
        session_id: str | None = None,
        tenant: str | None = None,
    ) -> str:
        """Open a session from a snapshot, or have it replace an open one, all or nothing.

        Of one that is replaced questions under way are cancelled, and its version goes on.

        Args:
          fingerprint: as for snapshot.
          session_id, tenant: of the session; None = as they were.
        Returns:
          its id.
        Raises:
          ForeignSnapshotError: it is of another model, dtype or format, or too long.
          SnapshotError: there is none, or it is damaged.
          SessionError: an append to the session that is to be replaced is being computed.
          PoolFullError, QuotaError: there is no room, or none for the tenant.
        """
        verbs = self._engine.verbs
        snapshot = session_snapshot.read(path, verbs, fingerprint=fingerprint)
        name = session_id if session_id is not None else snapshot.fields["session_id"]
        if tenant is not None:
            snapshot.fields["tenant"] = tenant
        board, prepositions = FlashBoard(), Prepositions(self._preposition)
        recovery.register(snapshot.registered, board, prepositions)

        def put() -> str:
            live = verbs.sessions.get(name)
            more = len(snapshot.token_ids) - (live.context_len if live else 0)
            self._holdings.check(
                snapshot.fields["tenant"], sessions=live is None, cells=max(more, 0)
            )
            if not self._scheduler.cancel_session(name, self._clock()):
                raise SessionError(
                    f"session {name}: an append is being computed; restore it when that is done"
                )
            session = session_snapshot.put(verbs, snapshot, name)
            memory = self._memories.get(name)
            with self._changed:
                if memory is not None:
                    self._forget(name)
                self._open(name)
                self._boards[name], self._prepositions[name] = board, prepositions
                self._memories[name] = memory or self._memories[name]
            self._durable.created(session)
            for query in board.queries:
                self._durable.registered(name, query)
            for header in prepositions.declared:
                self._durable.declared(name, header)
            return name

        return self._call(put)

    def describe(self, session_id: str) -> SessionInfo:
        """Say how a session stands between two steps."""
        return self._call(functools.partial(self._describe, session_id))

    def describe_all(self) -> list[SessionInfo]:
        """Say how all open sessions stand between two steps, by id."""
        return self._call(lambda: [self._describe(name) for name in sorted(self._versions)])

    def _describe(self, session_id: str) -> SessionInfo:
        session = self._engine.session(session_id)
        lagging = {one: n for one, n in self._appending.items() if one.session == session_id}
        now = self._clock()
        return SessionInfo.of(
            session, num_flash=len(self._boards[session_id].queries),
            lag_tokens=sum(lagging.values()),
            lag_s=max((now - ticket.asked for ticket in lagging), default=0.0),
        )  # fmt: skip

    def version(self, session_id: str) -> int:
        """Return a session's newest computed version."""
        with self._changed:
            if session_id not in self._versions:
                raise UnknownSessionError(session_id, self._versions)
            return self._versions[session_id]

    # Verbs

    def append(
        self,
        session_id: str,
        token_ids: Sequence[int],
        *,
        number: Number | None = None,
        behind: Pending | None = None,
        **how: Any,
    ) -> Pending:
        """See Engine.append; its result is the new version.

        Args:
          number: one that comes again with the same number is applied once, see WriteMemory.
          behind: an earlier append of the session, if that has to be done for this to be run.
          how: deadline_s.
        """
        count = len(token_ids)
        begin = self._engine.verbs.append
        if behind is not None:
            begin = functools.partial(_only_behind, behind, begin)

        def submit(pending: Pending) -> None:
            session = self._engine.session(session_id)
            ahead = sum(
                tokens for ticket, tokens in self._appending.items() if ticket.session == session_id
            )
            full = session.context_len + ahead + count > self._engine.config.context_len
            self._submit_numbered(
                pending, begin, session_id, token_ids, number, "append", cells=count,
                exclusive=full, **how,
            )  # fmt: skip

        return self._pending(JobClass.APPEND, submit)

    def update(
        self,
        session_id: str,
        token_ids: Sequence[int],
        *,
        number: Number | None = None,
        **how: Any,
    ) -> Pending:
        """See Engine.update; its result is the new version. `number`, `how`: as of append."""

        def submit(pending: Pending) -> None:
            session = self._engine.session(session_id)
            count = len(token_ids)
            if not any(ticket.session == session_id for ticket in self._appending):
                stream = np.asarray(session.token_ids[session.frozen_len :], np.int64)
                count -= common_len(stream, np.asarray(token_ids, np.int64))
            self._submit_numbered(
                pending, self._engine.verbs.update, session_id, token_ids, number, "update",
                cells=count, exclusive=True, **how,
            )  # fmt: skip

        return self._pending(JobClass.APPEND, submit)

    def rollback(
        self, session_id: str, count: int, *, number: Number | None = None, **how: Any
    ) -> Pending:
        """See Engine.rollback; its result is the new version. `number`, `how`: as of append."""

        def begin(session_id: str, token_ids: Sequence[int]) -> Steps:
            yield from ()  # a verb like the others, that needs nothing
            return self._engine.rollback(session_id, count)

        def submit(pending: Pending) -> None:
            self._engine.session(session_id)
            self._submit_numbered(
                pending, begin, session_id, (), number, f"rollback {count}", cells=0,
                exclusive=True, **how,
            )  # fmt: skip

        return self._pending(JobClass.APPEND, submit)

    def query(
        self,
        session_id: str,
        question: Question,
        *,
        stale: Stale = "compute",
        risk: float | None = None,
        entry: From = "question",
        commit: bool = False,
        stop: Sequence[str] = (),
        top_logprobs: int | None = None,
        **how: Any,
    ) -> Pending:
        """Ask; its result is the Answer, its tokens come as they are drawn.

        Args:
          stale: what to do where the registered answer is of an older version, see Stale.
          risk: of a registered question: how often an answer that is at hand may differ from the
            full one of the newest version, 0.001 to 0.3. Where shadow evaluations have shown with
            95 % confidence that it is not more often, it is given, with source GATED and its
            evidence; else, and always without a risk, the answer is the full one. None = as
            registered.
          entry: see From.
          commit: question and answer become part of the session, unless cancelled before the end.
          stop, top_logprobs: see generation.Request. With these or commit the answer is computed:
            what is at hand knows nothing of them.
          how: deadline_s, seconds after which it need not be begun any more.
        Raises:
          InputError: a risk that no gate can keep, choices with stop, top_logprobs or commit, or a
            constraint that cannot be kept.
          ConflictError: commit, and another such turn of the session is under way.
        """
        if commit or stop or top_logprobs is not None:
            return self._ask_apart(session_id, question, commit, stop, top_logprobs, **how)
        asked = self._clock()
        with self._changed:
            board = self._boards.get(session_id)
            query = board.find(question) if board else None
            if query and risk is None:
                risk = query.risk
            answer = self._look_up(session_id, question)
            if answer is None and query and risk is not None:
                answer = self._gated(session_id, query, risk, entry)
            if answer is None and stale == "serve":
                answer = self._look_up(session_id, question, stale=True)
            if answer is None and stale == "wait":
                self._changed.wait_for(lambda: not self._is_coming(session_id, question))
                answer = self._look_up(session_id, question)
            if answer is not None:
                took = self._clock() - asked
                self.metrics.note_answer(answer, took, took)
                return Pending(self._changed, None, answer)
        self._compile(question.constraint)

        def submit(pending: Pending) -> None:
            self._engine.session(session_id)
            if query is None or not board:
                self._prepositions[session_id].receive(question.token_ids)
                self._submit_question(pending, session_id, question, JobClass.QUERY, **how)
            elif risk is not None:
                gate = functools.partial(_first_token, query, risk)
                self._submit_evaluation(pending, session_id, query, asked=1, gate=gate, **how)
            elif not self._join(pending, session_id, query, **how):
                self._submit_evaluation(pending, session_id, query, asked=1, **how)

        return self._pending(JobClass.QUERY, submit)

    def _ask_apart(
        self,
        session_id: str,
        question: Question,
        commit: bool,
        stop: Sequence[str],
        top_logprobs: int | None,
        **how: Any,
    ) -> Pending:
        """Ask what no answer at hand can be the answer to."""
        if question.choices:
            raise InputError(
                "choices: expected none with commit, stop or top_logprobs; ask twice, or append "
                "the best choice"
            )
        begin = functools.partial(
            self._engine.verbs.stream, max_new_tokens=question.max_new_tokens, commit=commit,
            eos_ids=question.eos_ids, sampling=question.sampling, stop=stop,
            top_logprobs=top_logprobs, constraint=question.constraint,
        )  # fmt: skip
        self._compile(question.constraint)
        cells = len(question.token_ids) + question.max_new_tokens

        def submit(pending: Pending) -> None:
            if not commit:
                self._submit(
                    pending, begin, session_id, question.token_ids, JobClass.QUERY, cells=cells,
                    **how,
                )  # fmt: skip
                return
            turns = [one for one in self._appending if one.job_class is JobClass.QUERY]
            if any(turn.session == session_id for turn in turns):
                raise ConflictError(
                    f"session {session_id}: another turn that will be committed is under way; ask "
                    "when it is over"
                )
            self._submit_durable(
                pending, begin, session_id, question.token_ids, JobClass.QUERY, cells=cells,
                exclusive=True, **how,
            )  # fmt: skip

        return self._pending(JobClass.QUERY, submit)

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        tenant: str = "",
        deadline_s: float = math.inf,
        **options: Unpack[RequestOptions],
    ) -> Pending:
        """See Engine.generate; its result is the Answer, its tokens come as they are drawn.

        Of prompts with the same beginning that are under way together, one computes it.
        """
        self._compile(options.get("constraint"))

        def submit(pending: Pending) -> None:
            begin = functools.partial(
                self._engine.verbs.stream_generate, prompt, max_new_tokens=max_new_tokens,
                tenant=tenant, **options,
            )  # fmt: skip
            self._submit_new(
                pending, begin, prompt, "prompt", JobClass.QUERY,
                cells=len(prompt) + max_new_tokens, tenant=tenant, deadline_s=deadline_s,
            )  # fmt: skip

        return self._pending(JobClass.QUERY, submit)

    # Ahead of questions

    def declare(self, session_id: str, header: Entry) -> None:
        """Forward a header in idle time, now and after every change of the session.

        A question that begins with it forwards only the rest; one that is exactly the header is
        answered by what was decoded ahead.
        """

        def declare() -> None:
            self._engine.verbs.check_entry(session_id, header.token_ids)
            self._prepositions[session_id].declare(header)
            self._durable.declared(session_id, header)

        self._call(declare)

    def advance(self, session_id: str, entry: Entry, **how: Any) -> Pending:
        """See Engine.advance; once, in idle time. `how`: deadline_s."""

        def submit(pending: Pending) -> None:
            self._submit_entry(pending, session_id, entry, **how)

        return self._pending(JobClass.ADVANCE, submit)

    # Flash Queries

    def register(
        self, session_id: str, question: Question, *, risk: float | None = None
    ) -> FlashQuery:
        """Have a question answered in idle time, now and after every change of the session.

        Args:
          risk: of queries that do not say one, see query; None = they get full answers.
        """
        if risk is not None:
            drift.check_risk(risk)
        self._compile(question.constraint)

        def register() -> FlashQuery:
            self._engine.session(session_id)
            query = self._boards[session_id].register(question, risk)
            self._durable.registered(session_id, query)
            return query

        return self._call(register)

    def unregister(self, session_id: str, flash_id: int) -> None:
        """Forget a registered question."""

        def unregister() -> None:
            self._engine.session(session_id)
            self._boards[session_id].unregister(flash_id)
            self._durable.unregistered(session_id, flash_id)

        self._call(unregister)

    def flash_queries(self, session_id: str) -> list[FlashQuery]:
        """Return copies of a session's registered questions as they stand between two steps."""

        def copies() -> list[FlashQuery]:
            self._engine.session(session_id)
            return [dataclasses.replace(query) for query in self._boards[session_id].queries]

        return self._call(copies)

    def answers(self, session_id: str, cursor: str = "") -> tuple[list[FreshAnswer], str]:
        """Return fresh answers to registered questions behind a cursor, and the next cursor.

        Args:
          cursor: "" = begin with the newest answer of every question.
        Raises:
          CursorError: more has come behind it than is kept.
        """
        with self._changed:
            version = self.version(session_id)
            log = self._logs[session_id]
            if cursor:
                found = log.since(cursor)
            else:
                found = log.newest(self._boards[session_id].queries)
            aged = [
                dataclasses.replace(
                    one, answer=dataclasses.replace(one.answer, age=version - one.answer.version)
                )
                for one in found
            ]
            return aged, log.cursor

    def is_coming(self, session_id: str, question: Question) -> bool:
        """Say whether a registered question is going to have an answer of the newest version."""
        with self._changed:
            return self._is_coming(session_id, question)

    # All of it

    @property
    def model(self) -> ModelConfig:
        """The model that it runs."""
        return self._engine.model

    @property
    def config(self) -> EngineConfig:
        """The engine's sizes."""
        return self._engine.config

    @property
    def is_closed(self) -> bool:
        """Whether it runs nothing more: it was closed, or its worker has failed."""
        return self._closing

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode tokens; "" without a tokenizer."""
        return self._engine.verbs.text(token_ids)

    def stats(self) -> ServiceInfo:
        """Say how it stands between two steps."""
        return self._call(
            lambda: ServiceInfo.of(self._engine, self.metrics, self._scheduler.waiting)
        )

    def usage(self, tenant: str) -> Usage:
        """Say what a tenant has between two steps."""
        return self._call(lambda: self._holdings.usage(tenant))

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have the worker call back behind every step and change; returns what ends that.

        The callback must return at once and may use nothing of the service.
        """
        with self._changed:
            self._listeners.append(callback)

        def end() -> None:
            with self._changed:
                self._listeners.remove(callback)

        return end

    def wait_until_idle(self, timeout_s: float | None = None) -> None:
        """Wait until nothing runs or waits and all registered questions are answered.

        Raises:
          TimeoutError: it is not so yet.
          CancelledError: the service was closed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_idle() or self._closing, timeout_s):
                raise TimeoutError(f"{self._scheduler.num_waiting} verbs are under way")
            if self._closing:
                raise self._closed()

    def overview(self) -> Overview:
        """Say how all of it stands between two steps."""

        def overview() -> Overview:
            waiting, running = self._scheduler.waiting, self._scheduler.running
            return Overview(
                now=self._clock(),
                sessions=tuple(
                    (self._describe(name), tuple(map(dataclasses.replace, board.queries)))
                    for name, board in sorted(self._boards.items())
                ),
                cells=count_cells(self._engine.verbs),
                waiting={one: waiting[one] - running[one] for one in JobClass},
                running={one: running[one] for one in JobClass},
            )

        return self._call(overview)

    @property
    def failure(self) -> BaseException | None:
        """What ended the worker, by whose fault nothing runs any more; None = nothing."""
        return self._failure

    def cells(self) -> Cells:
        """Count cells by owner and tier, between two steps."""
        return self._call(lambda: count_cells(self._engine.verbs))

    def close(self) -> None:
        """End what is under way, and the worker; sessions stay in the engine."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        gc.unfreeze()

    # From callers to the worker

    def _compile(self, constraint: Constraint | None) -> None:
        """Compile what an answer has to be in the caller's thread: no step waits for it."""
        if constraint is not None:
            self._engine.verbs.compile(constraint)

    def _call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the worker and return what it returns once that is kept, or raise."""
        done: list[tuple[Any, BaseException | None]] = []

        def command() -> None:
            try:
                result = function()
                self._durable.commit()
                done.append((result, None))
            except Exception as error:
                done.append((None, error))

        with self._changed:
            self._enqueue(command)
            self._changed.wait_for(lambda: done or self._closing)
        if not done:
            raise self._closed()
        result, error = done[0]
        if error is not None:
            raise error
        return result

    def _pending(self, job_class: JobClass, submit: Callable[[Pending], None]) -> Pending:
        """Have the worker submit a verb and return when it has."""
        with self._changed:
            waiting = self._scheduler.waiting[job_class] + self._submitting[job_class]
            if waiting >= self._max_waiting:
                raise BusyError(
                    f"{self._max_waiting} verbs of class {job_class.name} wait already, which is "
                    "the limit; come again",
                    retry_after_s=self._max_waiting * self._step_s / self._scheduler.limits.rows,
                )
            self._submitting[job_class] += 1
        pending = Pending(self._changed, None, asked=self._clock())
        try:
            self._call(functools.partial(submit, pending))
        finally:
            with self._changed:
                self._submitting[job_class] -= 1
        return pending

    def _soon(self, command: Callable[[], None]) -> None:
        """Have the worker call a function, unless it ends first."""
        with self._changed:
            if not self._closing:
                self._enqueue(command)

    def _enqueue(self, command: Callable[[], None]) -> None:
        if self._closing:
            raise self._closed()
        self._commands.append(command)
        self._changed.notify_all()

    def _closed(self) -> ClosedError:
        why = f": {self._failure!r}" if self._failure else ""
        return ClosedError(f"the service is closed{why}")

    def _look_up(self, session_id: str, question: Question, stale: bool = False) -> Answer | None:
        board = self._boards.get(session_id)
        if board is None:
            return None
        return board.look_up(question, self._versions[session_id], stale=stale)

    def _gated(self, session_id: str, query: FlashQuery, risk: float, entry: From) -> Answer | None:
        """Answer at a risk from what is at hand, if its gate fires."""
        version = self._versions[session_id]
        answer = self._boards[session_id].gated(query, version, risk)
        if answer is not None or entry == "question":
            return answer
        ready = self._prepositions[session_id].ready
        for header, gate in query.headers.items():
            answer = ready[header].answer(query.question) if header in ready else None
            if answer is None:
                continue
            age = version - answer.version
            evidence = gate.decide(risk, answer.certainty, age=age)
            if evidence:
                query.fires += 1
                text = self._engine.verbs.text(answer.token_ids)
                return dataclasses.replace(answer, text=text, age=age, evidence=evidence)
        return None

    def _is_coming(self, session_id: str, question: Question) -> bool:
        """Whether a registered question is going to have an answer of the newest version."""
        board = self._boards.get(session_id)
        if self._closing or board is None:
            return False
        return board.find(question) in board.outdated(self._versions[session_id])

    # On the worker

    def _open(self, session_id: str) -> None:
        self._versions[session_id] = self._engine.session(session_id).version
        self._boards[session_id] = FlashBoard()
        self._prepositions[session_id] = Prepositions(self._preposition)
        self._logs[session_id] = AnswerLog()
        self._memories[session_id] = WriteMemory()

    def _forget(self, session_id: str) -> None:
        """Drop what there is of a session beside its record."""
        with self._changed:
            del self._versions[session_id], self._boards[session_id]
            del self._prepositions[session_id], self._logs[session_id]
            del self._memories[session_id]
            self._evaluations.note_fresh(session_id)
            self._bursts.forget(session_id)
            self._looked_after.pop(session_id, None)

    def _recover(self, saved: SavedSession) -> None:
        """Open a session as the journal has it, and bring its cells back in idle time."""
        name = saved.session_id
        recovery.recover(self._engine, saved)
        self._open(name)
        recovery.refill(saved, self._boards[name], self._prepositions[name], self._memories[name])
        self._revive(name)

    def _revive(self, session_id: str) -> None:
        """Bring a session's lost cells back in idle time; verbs on it wait for that."""
        cells = self._engine.session(session_id).context_len
        pending = Pending(self._changed, None)
        try:
            self._reviving[session_id] = self._submit_revival(pending, session_id, cells=cells)
        except CapacityError as error:
            logger.warning("session %s: its cells will not come back: %s", session_id, error)

    def _revive_all(self) -> None:
        """Bring back what was lost with the pool."""
        for name, session in self._engine.verbs.sessions.items():
            if name in self._versions and session.stored and session.stored.is_lost:
                self._revive(name)

    def _submit_revival(
        self, pending: Pending, session_id: str, job_class=JobClass.ADVANCE, *, cells: int
    ) -> Ticket:
        def begin(session_id: str, token_ids: Sequence[int]) -> Steps:
            return self._engine.verbs.revive(session_id)

        return self._submit(pending, begin, session_id, (), job_class, cells=cells)

    def _submit_question(
        self,
        pending: Pending,
        session_id: str,
        question: Question,
        job_class: JobClass,
        *,
        gate: Callable[[float], Evidence | None] | None = None,
        keep: bool = False,
        **how: Any,
    ) -> Ticket:
        verbs = self._engine.verbs
        if question.choices:
            begin = functools.partial(verbs.choose, choices=question.choices, gate=gate, keep=keep)
            cells = len(question.token_ids)
        else:
            begin = functools.partial(
                verbs.stream, max_new_tokens=question.max_new_tokens, eos_ids=question.eos_ids,
                sampling=question.sampling, keep=keep, constraint=question.constraint,
            )  # fmt: skip
            cells = len(question.token_ids) + question.max_new_tokens
        return self._submit(
            pending, begin, session_id, question.token_ids, job_class, cells=cells, **how
        )

    def _submit_evaluation(
        self, pending: Pending, session_id: str, query: FlashQuery, *, asked: int, **how: Any
    ) -> None:
        """Have a registered question answered, in idle time or for a caller who waits for it."""
        job_class = JobClass.QUERY if asked else JobClass.FLASH
        ticket = self._submit_question(
            pending, session_id, query.question, job_class, keep=True, **how
        )
        evaluation = Evaluation(
            board=self._boards[session_id], query=query, version=self._versions[session_id],
            asked=asked,
        )  # fmt: skip
        self._evaluations.add(ticket, evaluation)

    def _join(
        self, pending: Pending, session_id: str, query: FlashQuery, *, deadline_s: float = math.inf
    ) -> bool:
        """Let a caller wait for the evaluation that is under way, if there is one to wait for."""
        ticket = self._evaluations.join(
            query, self._versions[session_id], deadline_s, self._clock()
        )
        if ticket is not None:
            self._attach(pending, ticket)
        return ticket is not None

    def _submit_entry(self, pending: Pending, session_id: str, entry: Entry, **how: Any) -> Ticket:
        begin = functools.partial(
            self._engine.verbs.advance, max_new_tokens=entry.max_new_tokens,
            min_gap=entry.min_gap, eos_ids=entry.eos_ids, slot_ids=entry.slot_ids,
        )  # fmt: skip
        cells = len(entry.token_ids) + entry.max_new_tokens
        return self._submit(
            pending, begin, session_id, entry.token_ids, JobClass.ADVANCE, cells=cells, **how
        )

    def _submit_numbered(
        self,
        pending: Pending,
        begin: Callable[..., Steps],
        session_id: str,
        token_ids: Sequence[int],
        number: Number | None,
        verb: str,
        **how: Any,
    ) -> None:
        """Submit what will change a session; what has come before with its number only once."""
        if number is None:
            self._submit_durable(pending, begin, session_id, token_ids, **how)
            return
        memory, what = self._memories[session_id], write_memory.digest(verb, token_ids)
        known = memory.find(number, what)
        if known is not None:
            # Whoever sent it first may be gone and have little time left.
            known.joined = True
            self._scheduler.extend(known, pending.asked + how.get("deadline_s", math.inf))
            self._attach(pending, known)
            return

        def note(session_id: str, token_ids: Sequence[int]) -> Steps:
            return self._durable.numbered(begin(session_id, token_ids), session_id, number, what)

        ticket = self._submit_durable(pending, note, session_id, token_ids, **how)
        memory.note(number, what, ticket)

    def _submit_durable(
        self,
        pending: Pending,
        begin: Callable,
        session_id: str,
        token_ids: Sequence[int],
        job_class: JobClass = JobClass.APPEND,
        *,
        cells: int,
        **how: Any,
    ) -> Ticket:
        """Submit what will change a session."""
        ticket = self._submit(pending, begin, session_id, token_ids, job_class, cells=cells, **how)
        self._appending[ticket] = cells
        now = self._clock()
        self._bursts.submit(session_id, pending.asked, now)
        self._evaluations.drop(session_id, now)
        for ahead in [one for one in self._advancing if one.session == session_id]:
            self._scheduler.cancel(ahead, now)
        return ticket

    def _submit(
        self,
        pending: Pending,
        begin: Callable,
        session_id: str,
        token_ids: Sequence[int],
        job_class: JobClass,
        *,
        cells: int,
        exclusive: bool = False,
        deadline_s: float = math.inf,
    ) -> Ticket:
        tenant = self._engine.session(session_id).tenant  # known, or refused at once
        if pending.asked:
            self._holdings.check(tenant, cells=cells)
        now = self._clock()
        after: frozenset[int] = frozenset()
        if session_id in self._reviving:  # once is enough, and now somebody waits for it
            after = frozenset({self._reviving[session_id].job_id})
            self._scheduler.promote(self._reviving[session_id], job_class, now)
        ticket = self._scheduler.submit(
            functools.partial(begin, session_id, token_ids), job_class=job_class,
            session=session_id, tokens=len(token_ids), cells=cells, now=now,
            deadline=pending.asked + deadline_s, after=after, exclusive=exclusive,
        )  # fmt: skip
        if pending.asked:
            self._holdings.reserve(ticket, tenant, cells=cells)
        self._durable.hold(ticket)
        self._attach(pending, ticket)
        return ticket

    def _submit_new(
        self,
        pending: Pending,
        begin: Callable,
        token_ids: Sequence[int],
        what: str,
        job_class: JobClass,
        *,
        cells: int,
        sessions: int = 0,
        tenant: str,
        deadline_s: float = math.inf,
        can_stop: bool | None = None,
    ) -> Ticket:
        """Submit a verb that computes a context of its own from its start."""
        if len(token_ids):  # others' beginnings are compared with it before it is run
            checks.token_ids(token_ids, self._engine.model, what)
        self._holdings.check(tenant, sessions=sessions, cells=cells)
        now = self._clock()
        ticket = self._scheduler.submit(
            begin, job_class=job_class, session=f"new {next(self._news)}", tokens=len(token_ids),
            cells=cells, now=now, deadline=pending.asked + deadline_s, prefix=token_ids,
            tenant=tenant, can_stop=can_stop,
        )  # fmt: skip
        self._holdings.reserve(ticket, tenant, sessions=sessions, cells=cells)
        self._durable.hold(ticket)
        self._attach(pending, ticket)
        return ticket

    def _attach(self, pending: Pending, ticket: Ticket) -> None:
        pending._ticket = ticket
        if not ticket.asked:
            ticket.asked = pending.asked

        def give_up() -> None:
            if self._evaluations.leave(ticket) and not ticket.joined:
                self._scheduler.cancel(ticket, self._clock())

        def cancel() -> None:
            with self._changed:
                self._enqueue(give_up)
            pending._cancel = lambda: None  # it gives up its own part only, and once

        pending._cancel = cancel

    def _run(self) -> None:
        """Work; whatever ends it, nobody waits for ever."""
        try:
            with Compilations() as compilations:
                self._work(compilations)
            for session_id, board in self._boards.items():
                for query in board.queries:
                    self._durable.evaluated(session_id, query, least=1)
            self._scheduler.end(self._clock())  # what runs keeps a session from being saved
            self._durable.end()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._durable.close()
            with self._changed:
                self._closing = True
                self._scheduler.end(self._clock(), self._closed())
                self._durable.release(self._failure)
                self._notify()

    def _work(self, compilations: Compilations) -> None:
        """Run commands and steps until the service is closed."""
        rest_s = None  # until there is something to save
        pools_lost = self._engine.executor.pools_lost
        while True:
            with self._changed:
                self._notify()
                if not self._commands and not self._closing:
                    if self._is_idle():
                        if not self._maintain():
                            self._changed.wait(rest_s)
                    elif not self._scheduler.num_waiting:
                        self._changed.wait(BURST_GAP_S)  # until a burst is over
                commands = list(self._commands)
                self._commands.clear()
                if self._closing:
                    return
            for command in commands:
                command()
            if commands:
                with self._changed:  # nobody waits for a step to see his verb submitted
                    self._changed.notify_all()
            began = self._clock()
            step = self._scheduler.step(began, self._clock)
            if step.tokens:
                took = self._clock() - began
                self.metrics.note_step(took)
                self._step_s += 0.1 * (took - self._step_s)
            if self._engine.executor.pools_lost > pools_lost:
                pools_lost = self._engine.executor.pools_lost
                self._revive_all()
            self.metrics.compilations = compilations.count
            self._durable.commit()
            with self._changed:  # who is told of an end finds what follows from it
                self._durable.release()
                self._note_ends()
                changing = self._changing()
                self._evaluate(changing)
                self._preposition_all(changing)
            rest_s = self._durable.rest(self._clock()) if self._is_idle() else None

    def _notify(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.notify_all()
        for callback in self._listeners:
            callback()

    def _note_ends(self) -> None:
        for ticket in [ticket for ticket in self._appending if ticket.is_over]:
            del self._appending[ticket]
            if ticket.state is State.DONE:
                self._boards[ticket.session].forget_errors()
            self._bursts.end(ticket.session, self._clock())
        for name in [name for name, ticket in self._reviving.items() if ticket.is_over]:
            del self._reviving[name]
        # From here on no answer of a version before is served as current.
        for session_id in self._versions:
            self._versions[session_id] = self._engine.session(session_id).version
        for ticket, evaluation in self._evaluations.take_ended():
            if ticket.state is State.DONE:
                self._note_evaluation(ticket, evaluation)
            elif ticket.error is not None:
                evaluation.query.error = ticket.error
            if not evaluation.board.outdated(self._versions.get(ticket.session, -1)):
                self._evaluations.note_fresh(ticket.session)
        for ticket in [ticket for ticket in self._advancing if ticket.is_over]:
            prepositions, entry, version = self._advancing.pop(ticket)
            session = self._engine.verbs.sessions.get(ticket.session)
            if ticket.state is State.DONE and session and session.version == version:
                prepositions.note(entry, version, session.context_len, ticket.result)
            elif ticket.error is not None:
                prepositions.fail(entry, version)

    def _note_evaluation(self, ticket: Ticket, evaluation: Evaluation) -> None:
        """Keep what was computed in full as the registered question's answer."""
        answer: Answer = ticket.result
        if answer.source is Source.GATED:
            return
        if evaluation.board.note(evaluation.query, answer, self._clock()):
            if ticket.session in self._logs:
                self._logs[ticket.session].add(evaluation.query, answer)
            evaluation.query.served += evaluation.asked
            self._sample_headers(ticket.session, evaluation.query, answer)
            if evaluation.board.find(evaluation.query.question) is evaluation.query:
                self._durable.evaluated(ticket.session, evaluation.query)

    def _sample_headers(self, session_id: str, query: FlashQuery, fresh: Answer) -> None:
        """Compare what declared headers led to with a fresh answer."""
        prepositions = self._prepositions.get(session_id)
        for header, ready in prepositions.ready.items() if prepositions else ():
            found = ready.answer(query.question)
            if found is None or not prepositions or not prepositions.is_declared(header):
                continue
            sample = ShadowSample(
                gap=found.certainty, agreed=same_answer(found, fresh),
                stale_version=found.version, version=fresh.version,
            )  # fmt: skip
            query.headers.setdefault(header, Gate()).add(sample)

    def _preposition_all(self, changing: set[str]) -> None:
        """Submit what sessions lack ahead of their next questions, behind all else."""
        busy = changing | self._evaluations.sessions
        busy |= {ticket.session for ticket in self._advancing}
        for session_id, prepositions in self._prepositions.items():
            if session_id in busy:
                continue
            version = self._versions[session_id]
            for entry in prepositions.outdated(version):
                try:
                    ticket = self._submit_entry(Pending(self._changed, None), session_id, entry)
                except JaxStateError:
                    prepositions.fail(entry, version)  # does not fit; questions will say so
                    continue
                self._advancing[ticket] = (prepositions, entry, version)

    def _maintain(self) -> bool:
        """Submit the repacking of sessions that have changed and leave many cells dead."""
        sessions = self._engine.verbs.sessions
        for session_id, version in self._versions.items():
            if self._looked_after.get(session_id) == version:
                continue
            self._looked_after[session_id] = version
            if self._engine.verbs.tiers.is_scattered(sessions[session_id]):
                self._submit(
                    Pending(self._changed, None), lambda name, _: self._engine.verbs.repack(name),
                    session_id, (), JobClass.MAINTENANCE, cells=0,
                )  # fmt: skip
        return self._scheduler.num_waiting > 0

    def _evaluate(self, changing: set[str]) -> None:
        """Submit what registered questions lack, together, where no append is on its way."""
        for session_id, board in self._boards.items():
            if session_id in changing:
                continue
            for query in self._evaluations.lacking(board, self._versions[session_id]):
                try:
                    self._submit_evaluation(
                        Pending(self._changed, None), session_id, query, asked=0
                    )
                except JaxStateError as error:
                    query.error = error

    def _changing(self) -> set[str]:
        """Sessions whose next version is on its way or, within a burst, to be expected."""
        appending = {ticket.session for ticket in self._appending}
        return appending | self._bursts.expecting(self._clock())

    def _is_idle(self) -> bool:
        return not self._scheduler.num_waiting and not any(
            board.outdated(self._versions[session_id])
            or self._prepositions[session_id].outdated(self._versions[session_id])
            for session_id, board in self._boards.items()
        )


def _only_behind(
    earlier: Pending, begin: Callable[..., Steps], session_id: str, token_ids: Sequence[int]
) -> Steps:
    """Run an append if the one before it is done, so that a series has no holes."""
    if earlier._ticket is None or earlier._ticket.state is not State.DONE:
        raise CancelledError(f"session {session_id}: the append before this one was not done")
    return (yield from begin(session_id, token_ids))


def _first_token(query: FlashQuery, risk: float, gap: float) -> Evidence | None:
    """Whether the first token alone may decide between a question's choices."""
    evidence = query.first.decide(risk, gap, age=0)
    query.fires += evidence is not None
    return evidence
