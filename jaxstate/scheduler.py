"""Many verbs at once: their needs are met in shared steps, in the order of `plan`.

One thread calls it; time comes in as an argument. A verb is submitted as a function that begins it,
so that nothing of it exists until its turn comes, and a ticket says how far it is.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxstate import grouped_prefill
from jaxstate.answer import Token
from jaxstate.errors import CapacityError, PoolFullError, PoolLostError
from jaxstate.executor import Executor
from jaxstate.grouped_prefill import Prefill
from jaxstate.needs import Need, Ran, Steps, TokenSteps, run_together
from jaxstate.pages import Pages
from jaxstate.plan import Job, JobClass, Limits, Piece, StepPlan, plan
from jaxstate.prefixes import Prefixes


class State(enum.Enum):
    """How far a submitted verb is."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # it raised, `error` says what
    EXPIRED = "expired"  # its deadline passed before it began
    CANCELLED = "cancelled"


@dataclasses.dataclass(kw_only=True, eq=False)
class Ticket:
    """A submitted verb.

    Attributes:
      job_id: its id; later ones are larger.
      job_class, session, deadline: see plan.Job.
      submitted: seconds on the caller's clock; of one that was promoted, when that was.
      asked: when its caller called, on the same clock; 0 = nobody waits for it.
      state: see State.
      held: that it is done is told later: what it did has to be saved first.
      joined: it was asked for again by another caller, so that the first one may not cancel it.
      tokens: drawn so far.
      result: what the verb returned, once DONE.
      error: what it raised, once FAILED, or why it will not be run, once CANCELLED.
      tokens_forwarded: for it.
      tokens_to_first: of these, up to its first output.
      started, first_output, ended: seconds on the same clock; None until then.
    """

    job_id: int
    job_class: JobClass
    session: str
    deadline: float
    submitted: float
    asked: float = 0.0
    state: State = State.WAITING
    held: bool = False
    joined: bool = False
    tokens: list[Token] = dataclasses.field(default_factory=list)
    result: Any = None
    error: BaseException | None = None
    tokens_forwarded: int = 0
    tokens_to_first: int = 0
    started: float | None = None
    first_output: float | None = None
    ended: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.has_ended and not (self.held and self.state is State.DONE)

    @property
    def has_ended(self) -> bool:
        """Whether it has run to its end, told or not."""
        return self.state not in (State.WAITING, State.RUNNING)


@dataclasses.dataclass(kw_only=True)
class _Running:
    """A verb and what it needs next."""

    ticket: Ticket
    begin: Callable[[], Steps | TokenSteps]
    job: Job
    queued: Job  # the job before it began
    steps: Steps | TokenSteps | None = None
    need: Need | None = None
    prefill: Prefill | None = None
    can_stop: bool = True


class Scheduler:
    """Runs submitted verbs, many in one step."""

    def __init__(
        self,
        executor: Executor,
        pages: Pages,
        limits: Limits,
        *,
        prefixes: Prefixes | None = None,
        on_end: Callable[[Ticket], None] | None = None,
    ):
        """Start empty; `waiting` counts the verbs of each class that are not over.

        Args:
          limits: of a step; no more tokens and rows than the largest compiled shape takes.
          prefixes: what verbs find computed already; None = each computes all of its own.
          on_end: called with every ticket when it is over.
        """
        self._on_end = on_end
        self._prefixes = prefixes if prefixes and prefixes.is_on else None
        self.limits = limits
        self._executor = executor
        self._pages = pages
        self._ids = itertools.count()
        self._running: dict[int, _Running] = {}
        self.waiting: collections.Counter[JobClass] = collections.Counter()

    @property
    def num_waiting(self) -> int:
        """Verbs that are not over."""
        return len(self._running)

    @property
    def running(self) -> collections.Counter[JobClass]:
        """Verbs of each class that have begun and are not over."""
        return collections.Counter(
            one.ticket.job_class for one in self._running.values() if one.steps is not None
        )

    def submit(
        self,
        begin: Callable[[], Steps | TokenSteps],
        *,
        job_class: JobClass,
        session: str,
        tokens: int,
        cells: int,
        now: float,
        outputs: int = 0,
        deadline: float = math.inf,
        after: frozenset[int] = frozenset(),
        exclusive: bool = False,
        prefix: Sequence[int] = (),
        tenant: str = "",
        can_stop: bool | None = None,
    ) -> Ticket:
        """Queue a verb.

        Args:
          begin: begins it, `functools.partial(verbs.append, …)`; called when its turn comes.
          tokens: about how many it will forward first.
          cells: most cells that it can ever need.
          outputs: about how many rows of output it will need behind its first tokens.
          after: job ids of verbs that must be over first.
          exclusive: see plan.Job; for durable verbs that evict or roll back, see Verbs.
          prefix: the whole context that it computes from position 0; where others of the tenant
            compute the same beginning, one does and the others wait for it.
          can_stop: it may be cancelled when it has begun; None = unless it is an append, whose
            evictions are gone by then.
        Raises:
          CapacityError: it would not fit an empty pool.
        """
        pages = -(-cells // self._pages.page_size)
        if pages > self._pages.num_pages:
            raise CapacityError(
                f"{cells} cells of {self._pages.page_size} a page: expected at most the pool's "
                f"{self._pages.num_pages} pages, got {pages}; ask for less or start a larger pool"
            )
        job_id = next(self._ids)
        ticket = Ticket(
            job_id=job_id, job_class=job_class, session=session, deadline=deadline, submitted=now
        )
        job = Job(
            job_id=job_id, job_class=job_class, session=session, tokens=max(tokens, 1),
            outputs=outputs, pages=self._pages_of(cells), arrived=now, deadline=deadline,
            after=after, exclusive=exclusive,
        )  # fmt: skip
        running = _Running(ticket=ticket, begin=begin, job=job, queued=job)
        running.can_stop = job_class is not JobClass.APPEND if can_stop is None else can_stop
        if len(prefix) and self._prefixes:
            running.prefill = Prefill(
                job_id=job_id, tenant=tenant, token_ids=np.asarray(prefix, np.int32), cells=cells,
                most=len(prefix) - (cells > len(prefix)),
            ).beside(self._prefills())  # fmt: skip
        self._running[job_id] = running
        self.waiting[job_class] += 1
        return ticket

    def promote(self, ticket: Ticket, job_class: JobClass, now: float) -> None:
        """Let a verb go on as one of a more urgent class: from now on somebody waits for it."""
        running = self._running.get(ticket.job_id)
        if running is None or job_class >= ticket.job_class:
            return
        self.waiting[ticket.job_class] -= 1
        self.waiting[job_class] += 1
        ticket.job_class, ticket.submitted = job_class, now
        arrived = running.job.arrived if running.job.decodes else now
        running.job = dataclasses.replace(running.job, job_class=job_class, arrived=arrived)

    def extend(self, ticket: Ticket, deadline: float) -> None:
        """Let a verb begin until then, if that is later than before."""
        running = self._running.get(ticket.job_id)
        if running is not None and deadline > ticket.deadline:
            ticket.deadline = deadline
            running.job = dataclasses.replace(running.job, deadline=deadline)

    def cancel(self, ticket: Ticket, now: float) -> bool:
        """End a verb where it is and give its cells back at once; False if it goes on or is over.

        What has begun and cannot stop goes on, see submit.
        """
        running = self._running.get(ticket.job_id)
        if running is None or (running.steps is not None and not running.can_stop):
            return False
        self._end(running, State.CANCELLED, now)
        return True

    def can_cancel_session(self, session: str) -> bool:
        """Whether none of a session's verbs has to go on."""
        return all(
            one.can_stop or one.steps is None
            for one in self._running.values()
            if one.ticket.session == session
        )

    def cancel_session(self, session: str, now: float) -> None:
        """Cancel all verbs of a session that can be."""
        for ticket in self.tickets_of(session):
            self.cancel(ticket, now)

    def tickets_of(self, session: str) -> list[Ticket]:
        """Return the verbs of a session that are not over."""
        return [one.ticket for one in self._running.values() if one.ticket.session == session]

    def end(self, now: float, error: BaseException | None = None) -> None:
        """End everything where it is, appends too: nobody will run them; `error` says why."""
        for running in list(self._running.values()):
            running.ticket.error = error
            self._end(running, State.CANCELLED, now)

    def step(self, now: float, clock: Callable[[], float] | None = None) -> StepPlan:
        """Plan one step at `now` and run it; an empty plan means that nothing can run.

        Where nothing runs that would give pages back, the first in line for some begins with what
        can be had for it, or fails.
        A verb that raises ends FAILED; those beside it go on. If the step itself fails, so does
        every verb that had tokens in it; others begin anew, but for those that had begun to answer.

        Args:
          clock: tells when the step has ended; None = at once.
        """
        blocked: set[int] = set()
        while True:
            step, chosen = self._choose(now, blocked)
            # What could not begin after all must not keep those from running that give pages back.
            now_blocked = {
                piece.job_id
                for piece in step.pieces
                if (one := self._running.get(piece.job_id)) and one.steps is None
            }
            if chosen or now_blocked <= blocked:
                break
            blocked |= now_blocked
        if not chosen and step.short_of_pages and not self._gives_back():
            # Its pages are an estimate of the most; what can be had shows when it begins.
            step, chosen = self._choose(now, blocked, step.short_of_pages[0])
        if chosen:
            for job_id in step.gave_way:
                running = self._running[job_id]
                running.job = dataclasses.replace(running.job, gave_way=True)
            self._run(chosen, now, clock or (lambda: now))
        return step

    def _choose(
        self, now: float, blocked: set[int], sure: int | None = None
    ) -> tuple[StepPlan, list[tuple[_Running, Need, int]]]:
        """Plan a step and begin what begins in it.

        Args:
          blocked: verbs for which there are no pages, whatever is free.
          sure: a verb that begins whatever is free.
        """
        jobs = [
            dataclasses.replace(job, pages=0 if job.job_id == sure else self._pages.num_pages + 1)
            if job.job_id in blocked or job.job_id == sure
            else job
            for job in self._jobs()
        ]
        free = self._pages.num_to_be_had(sum(job.pages for job in jobs))
        step = plan(jobs, self.limits, free, now)
        for job_id in step.expired:
            self._end(self._running[job_id], State.EXPIRED, now)
        chosen: list[tuple[_Running, Need, int]] = []
        pieces = (
            *(Piece(job_id=job_id, tokens=1, last=True) for job_id in step.decodes),
            *step.pieces,
        )
        rows = self.limits.rows
        for piece in pieces:
            running = self._running[piece.job_id]
            if running.steps is None and not self._begin(running, now):
                continue
            need = running.need
            assert need is not None
            count = min(piece.tokens, need.tokens)
            if count == need.tokens and need.outputs > rows:
                count -= 1  # known only now that it has begun
            if count < need.least:
                continue
            rows -= need.outputs if count == need.tokens else 0
            chosen.append((running, need, count))
        return step, chosen

    def _pages_of(self, cells: int) -> int:
        """Most pages that so many cells take: their rotation may start over among them."""
        return -(-cells // self._pages.page_size) + 1 if cells else 0

    def _prefills(self) -> list[Prefill]:
        return [one.prefill for one in self._running.values() if one.prefill]

    def _jobs(self) -> list[Job]:
        """Jobs as they are now, given what is there of contexts that have not begun."""
        jobs = {job_id: running.job for job_id, running in self._running.items()}
        prefills = self._prefills()
        if not self._prefixes or not prefills:
            return list(jobs.values())
        there: dict[int, int] = {}
        for one in prefills:
            if self._running[one.job_id].steps is None:
                count, _ = self._prefixes.match(one.tenant, one.token_ids, one.most)
                there[one.job_id] = count
                jobs[one.job_id] = dataclasses.replace(
                    jobs[one.job_id], tokens=max(len(one.token_ids) - count, 1),
                    pages=self._pages_of(one.cells - count),
                )  # fmt: skip
        found = grouped_prefill.leaders(there, prefills, self._pages.page_size)
        for follower, leader in sorted(found.items(), reverse=True):
            job = jobs[follower]
            jobs[follower] = dataclasses.replace(job, after=job.after | {leader})
            # As urgent as whoever waits for it.
            urgent = min(jobs[leader].job_class, job.job_class)
            jobs[leader] = dataclasses.replace(jobs[leader], job_class=urgent)
        return list(jobs.values())

    def _gives_back(self) -> bool:
        """Whether some verb has begun, which gives its pages back one day."""
        return any(running.steps is not None for running in self._running.values())

    def _begin(self, running: _Running, now: float) -> bool:
        """Begin a verb: False if it did not come to a need."""
        running.ticket.state = State.RUNNING
        running.ticket.started = now
        try:
            running.steps = running.begin()  # some check their arguments at once
            self._next(running, None, now)
        except PoolFullError as error:
            running.steps = None  # it has taken nothing
            if not self._gives_back():
                self._fail(running, error, now)
                return False
            running.ticket.state, running.ticket.started = State.WAITING, None
            return False
        except Exception as error:
            self._fail(running, error, now)
            return False
        return running.ticket.job_id in self._running

    def _run(self, chosen: list[tuple[_Running, Need, int]], now: float, clock) -> None:
        # Rows of one session, or of one beginning, side by side: they share its context.
        chosen.sort(key=lambda one: (*_neighbours(one[0]), one[0].ticket.job_id))
        try:
            found = run_together(self._executor, [(need, count) for _, need, count in chosen])
        except Exception as error:
            if isinstance(error, CapacityError) and len(chosen) > 1:
                # Together they see more stretches than a step's table holds: nothing has run.
                for running, need, count in chosen:
                    # A pool lost on the way has ended the others, or put them back.
                    if running.need is need and running.ticket.job_id in self._running:
                        self._run([(running, need, count)], now, clock)
                return
            for running, _, _ in chosen:
                self._fail(running, error, now)
            if isinstance(error, PoolLostError):
                self._begin_anew(error, now)
            return
        ended = clock()
        for (running, need, _), ran in zip(chosen, found, strict=True):
            running.ticket.tokens_forwarded += ran.tokens
            if need.outputs and ran.tokens == need.tokens and running.ticket.first_output is None:
                running.ticket.first_output = ended
                running.ticket.tokens_to_first = running.ticket.tokens_forwarded
            try:
                self._next(running, ran, ended)
            except Exception as error:
                self._fail(running, error, ended)

    def _begin_anew(self, error: PoolLostError, now: float) -> None:
        """Put back what had begun, whose cells are gone as well; what had begun to answer fails."""
        for running in [one for one in self._running.values() if one.steps is not None]:
            if running.ticket.tokens:
                self._fail(running, error, now)
                continue
            assert running.steps is not None
            running.steps.close()
            running.steps = running.need = None
            running.job = dataclasses.replace(
                running.queued, job_class=running.job.job_class, arrived=running.job.arrived,
                deadline=running.ticket.deadline,
            )  # fmt: skip
            running.ticket.state, running.ticket.started = State.WAITING, None

    def _next(self, running: _Running, ran: Ran | None, now: float) -> None:
        """Go on to the verb's next need, noting tokens on the way, or to its end."""
        steps = running.steps
        assert steps is not None
        answering = False
        try:
            item = next(steps) if ran is None else steps.send(ran)
            while not isinstance(item, Need):
                running.ticket.tokens.append(item)
                answering = True
                item = next(steps)
        except StopIteration as end:
            running.ticket.result = end.value
            self._end(running, State.DONE, now)
            return
        running.need = item
        is_answer = answering and item.tokens == 1
        running.job = dataclasses.replace(
            running.job, tokens=item.tokens, least=item.least, outputs=item.outputs, pages=0,
            started=True, decodes=is_answer, gave_way=False, ran=now,
            arrived=now if is_answer else running.job.arrived,
        )  # fmt: skip

    def _fail(self, running: _Running, error: BaseException, now: float) -> None:
        running.ticket.error = error
        self._end(running, State.FAILED, now)

    def _end(self, running: _Running, state: State, now: float) -> None:
        if running.steps is not None:
            running.steps.close()
        running.ticket.state, running.ticket.ended = state, now
        del self._running[running.ticket.job_id]
        self.waiting[running.ticket.job_class] -= 1
        if self._on_end:
            self._on_end(running.ticket)


def _neighbours(running: _Running) -> tuple[str, list[int]]:
    """What brings verbs together that see much alike."""
    if running.prefill is None:
        return running.ticket.session, []
    return "", running.prefill.token_ids.tolist()
