"""What runs in the next step: a pure function of what waits, what is free, and the time.

No arrays, threads or clock. The worker turns requests into jobs, asks for a plan, runs it, and
asks again; a simulator drives the same function with recorded arrivals.

The order: running answers first, each its next token; then what has waited for a good part of its
class's limit; then by class, questions before appends before what nobody waits for. Answers leave
single steps to what has been overdue longest and would get nothing beside them. Work that
nobody waits for (Flash evaluations, pre-positioning, maintenance) runs in steps that hold nothing
else, until it is overdue. A step is bounded in tokens, and one that begins questions holds no
appends but what is overdue, so that a question waits for one step and for its own.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence


class JobClass(enum.IntEnum):
    """Who waits for a job; lower values go first."""

    QUERY = 0
    APPEND = 1
    FLASH = 2
    ADVANCE = 3
    MAINTENANCE = 4

    @property
    def is_background(self) -> bool:
        """Whether nobody waits for it."""
        return self >= JobClass.FLASH


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Tokens that wait to be forwarded.

    Attributes:
      job_id: unique; later jobs have larger ids.
      job_class: see JobClass.
      session: its session; appends of one session run in the order of their ids.
      tokens: to be forwarded, at least 1.
      least: fewest that can be forwarded at once.
      started: some of it has run.
      decodes: it is a running answer, whose next token is all it can forward.
      gave_way: a running answer that has been left out of a step since its last token was drawn,
        see StepPlan.
      outputs: rows of output it needs in the step that forwards its last token.
      pages: to be reserved before it starts, all that it can ever need; 0 once it has started.
      arrived: seconds on any clock; of a running answer, when its last token was drawn.
      ran: on the same clock, when some of it ran last; only of one that has started.
      deadline: on the same clock; a job that has not started by then is not run.
      after: jobs that must be done before.
      exclusive: it runs beside nothing else of its session, behind what came before it there and
        before what came later.
    """

    job_id: int
    job_class: JobClass
    session: str
    tokens: int
    least: int = 1
    started: bool = False
    decodes: bool = False
    gave_way: bool = False
    outputs: int = 1
    pages: int = 0
    arrived: float
    ran: float = 0.0
    deadline: float = math.inf
    after: frozenset[int] = frozenset()
    exclusive: bool = False


AGE_S: Mapping[JobClass, float] = {
    JobClass.QUERY: 1.0,
    JobClass.APPEND: 2.0,
    JobClass.FLASH: 1.0,
    JobClass.ADVANCE: 60.0,
    JobClass.MAINTENANCE: 300.0,
}
"""Seconds within which a waiting job is to begin, see OVERDUE."""

OVERDUE: Mapping[JobClass, float] = {
    JobClass.QUERY: 0.3,
    JobClass.APPEND: 0.75,
    JobClass.FLASH: 0.15,
    JobClass.ADVANCE: 0.3,
    JobClass.MAINTENANCE: 0.3,
}
"""Of its class's limit, after which a waiting job is overdue and goes before those that are not:
early enough to begin within the limit, though others are overdue as well. Appends are later, since
overdue ones take part of the steps in which questions begin, and a long one runs for a while. Flash
evaluations are earlier, since at a high load there are no idle steps to begin in."""

AGE_STARTED = 0.1
"""Of its class's limit, for which an overdue job that has got tokens is not overdue again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What one step may hold.

    Attributes:
      tokens: most tokens of a step; what an urgent question may have to wait for. A job that
        cannot run in so few (choices of many tokens) has a longer step of its own.
      rows: most rows of output.
      age_s: see AGE_S.
    """

    tokens: int
    rows: int
    age_s: Mapping[JobClass, float] = dataclasses.field(default_factory=lambda: dict(AGE_S))

    def __post_init__(self):
        """Check ranges."""
        for name in ("tokens", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        missing = [job_class.name for job_class in JobClass if job_class not in self.age_s]
        if missing:
            raise ValueError(f"age_s: expected a limit for every class, none for {missing}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Tokens of one job that run in the step, and whether they are its last."""

    job_id: int
    tokens: int
    last: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step.

    Attributes:
      decodes: jobs that forward their next token, in the order of their ids.
      gave_way: running answers left out for what has been overdue longest; where they are marked
        as such, they are in the next one.
      pieces: what else is forwarded.
      expired: jobs to be ended unrun: their deadline has passed.
      short_of_pages: jobs that would run now if pages were free, the first in line first.
    """

    decodes: tuple[int, ...] = ()
    gave_way: tuple[int, ...] = ()
    pieces: tuple[Piece, ...] = ()
    expired: tuple[int, ...] = ()
    short_of_pages: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens that the step forwards."""
        return len(self.decodes) + sum(piece.tokens for piece in self.pieces)


def plan(jobs: Sequence[Job], limits: Limits, free_pages: int, now: float) -> StepPlan:
    """Choose the next step; the order of `jobs` does not matter.

    With more running answers than rows, those go on whose last token is oldest; while questions
    wait, they leave a row and a quarter of the tokens to one. What has been overdue longest, or
    again since some of it ran, goes before them where it would get nothing otherwise (the parts of
    a choice need all their rows at once); an answer is left out for that once, then it runs.

    Overdue work that nobody waits for takes at most half of the tokens and rows that running
    answers leave, and overdue appends half of the tokens while questions wait, so that those go
    on. Appends that are not overdue leave a step to the questions that begin in it. Work that
    nobody waits for but an exclusive job is as urgent as that. Where the first in line is short of
    pages, others may pass it until it is overdue; from then on pages are kept for it.

    Args:
      free_pages: pages that no one holds or has reserved.
    """
    expired = {job.job_id for job in jobs if job.deadline <= now and not job.started}
    alive = [job for job in jobs if job.job_id not in expired]
    runnable = _waited_for(_runnable(alive), alive, limits)
    waiting = [job for job in runnable if not job.decodes]
    most_decodes = min(limits.rows, limits.tokens)
    asking = {job.job_id for job in waiting if job.job_class is JobClass.QUERY}
    if asking:
        most_decodes = max(min(limits.rows - 1, limits.tokens * 3 // 4), 1)
    decodes = sorted(
        (job for job in runnable if job.decodes), key=lambda job: (job.arrived, job.job_id)
    )[:most_decodes]
    turns = _turns(waiting)

    def overdue_since(job: Job) -> float:
        return job.arrived + _patience(job.job_class, limits)

    def due_since(job: Job) -> float:
        rested = job.ran + limits.age_s[job.job_class] * AGE_STARTED if job.started else -math.inf
        return max(overdue_since(job), rested)

    def by_class(job: Job):
        return job.job_class, job.deadline, turns[job.job_id], job.arrived, job.job_id

    overdue = [job for job in waiting if due_since(job) <= now]
    overdue.sort(key=lambda job: (overdue_since(job), job.job_id))
    fresh = sorted((job for job in waiting if due_since(job) > now), key=by_class)
    foreground = [job for job in fresh if not job.job_class.is_background]
    waited_for = any(not job.job_class.is_background for job in waiting)

    def is_bounded(job: Job) -> bool:
        if job.job_class.is_background:
            return waited_for
        return bool(asking) and job.job_class is not JobClass.QUERY

    # Pages are kept for one that is short of them.
    free = free_pages if all(job.pages <= free_pages for job in overdue) else 0
    first = min(
        (job for job in overdue if job.pages <= free and _rows_needed(job) <= limits.rows),
        key=lambda job: (due_since(job), job.job_id),
        default=None,
    )
    stay = _stay_beside(first, decodes, limits, is_bounded(first)) if first else None
    if stay is None:
        first, stay = None, len(decodes)
    decodes, gave_way = decodes[:stay], decodes[stay:]
    step = _Step(
        limits=limits,
        tokens=limits.tokens - len(decodes),
        rows=limits.rows - sum(job.outputs for job in decodes),
        pages=free_pages,
    )
    half, rows_kept = step.tokens // 2, step.rows // 2
    if first:
        most = max(half, first.least) if is_bounded(first) else None
        taken = step.take(first, most=most, keep_pages=True)
        half -= taken if is_bounded(first) else 0
    for job in overdue:
        if job is first:
            continue
        if not is_bounded(job):
            step.take(job, keep_pages=True)
        elif not job.outputs or step.rows > rows_kept:
            half -= step.take(job, most=half, keep_pages=True)
    for job in foreground:
        if job.job_class is not JobClass.QUERY and asking & {one.job_id for one in step.pieces}:
            break
        step.take(job, keep_pages=False)
    idle = not step.pieces and all(job.job_class.is_background for job in decodes)
    if idle:
        for job in fresh[len(foreground) :]:
            # Without a row its last token would wait for another idle step, and cost one.
            if not (decodes or step.pieces) or job.outputs <= step.rows:
                step.take(job, keep_pages=False)
    return StepPlan(
        decodes=tuple(sorted(job.job_id for job in decodes)),
        gave_way=tuple(sorted(job.job_id for job in gave_way)),
        pieces=tuple(step.pieces),
        expired=tuple(sorted(expired)),
        short_of_pages=tuple(step.short),
    )


def _patience(job_class: JobClass, limits: Limits) -> float:
    """Seconds after which a waiting job is overdue."""
    return limits.age_s[job_class] * OVERDUE[job_class]


def _waited_for(runnable: Sequence[Job], jobs: Sequence[Job], limits: Limits) -> list[Job]:
    """Runnable ones, background ones as urgent as the most urgent of the exclusive behind them.

    They are overdue when the first of these is; running answers need nothing of that.
    """
    exclusive: defaultdict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        if job.exclusive:
            exclusive[job.session].append(job)

    def as_urgent(job: Job) -> Job:
        if job.decodes or not job.job_class.is_background:
            return job
        behind = [one for one in exclusive[job.session] if one.job_id > job.job_id]
        urgent = min((job.job_class, *(one.job_class for one in behind)))
        if urgent is job.job_class:
            return job
        overdue = min(one.arrived + _patience(one.job_class, limits) for one in (job, *behind))
        arrived = overdue - _patience(urgent, limits)
        return dataclasses.replace(job, job_class=urgent, arrived=arrived)

    return [as_urgent(job) for job in runnable]


def _runnable(jobs: Sequence[Job]) -> list[Job]:
    """Jobs that wait for no other one, be it named or of their session."""
    alive = {job.job_id for job in jobs}
    oldest: dict[str, int] = {}
    oldest_append: dict[str, int] = {}
    barrier: dict[str, int] = {}
    for job in sorted(jobs, key=lambda job: job.job_id):
        oldest.setdefault(job.session, job.job_id)
        if job.job_class is JobClass.APPEND:
            oldest_append.setdefault(job.session, job.job_id)
        if job.exclusive:
            barrier.setdefault(job.session, job.job_id)

    def waits(job: Job) -> bool:
        if job.after & alive or job.job_id > barrier.get(job.session, job.job_id):
            return True
        if job.exclusive and oldest[job.session] != job.job_id:
            return True
        return job.job_class is JobClass.APPEND and oldest_append[job.session] != job.job_id

    return [job for job in jobs if not waits(job)]


def _rows_needed(job: Job) -> int:
    """Rows without which nothing of a job can run."""
    return job.outputs if job.least == job.tokens else 0


def _stay_beside(job: Job, decodes: Sequence[Job], limits: Limits, bounded: bool) -> int | None:
    """How many running answers run beside an overdue job that has to go first to get anything.

    None where it gets something in its turn, or where answers that gave way already leave too
    little.

    Args:
      bounded: it has at most half of what they leave.
    """
    tokens, rows = limits.tokens - len(decodes), limits.rows - len(decodes)
    has_row = not (bounded and job.outputs) or rows > 0
    if job.least <= tokens // 2 and _rows_needed(job) <= rows and has_row:
        return None
    tokens = max(limits.tokens - job.least, 0)  # with more at once it runs alone
    stay = min(limits.rows - _rows_needed(job), tokens, len(decodes))
    return stay if stay >= sum(one.gave_way for one in decodes) else None


def _turns(jobs: Sequence[Job]) -> dict[int, int]:
    """How many jobs of the same session and class stand before each: sessions take turns."""
    seen: defaultdict[tuple[str, JobClass], int] = defaultdict(int)
    turns = {}
    for job in sorted(jobs, key=lambda job: job.job_id):
        key = (job.session, job.job_class)
        turns[job.job_id] = seen[key]
        seen[key] += 1
    return turns


@dataclasses.dataclass
class _Step:
    """What is left of a step while it is filled."""

    limits: Limits
    tokens: int
    rows: int
    pages: int
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    short: list[int] = dataclasses.field(default_factory=list)

    def take(self, job: Job, *, most: int | None = None, keep_pages: bool) -> int:
        """Take what fits of a job and return its tokens.

        Args:
          most: tokens it may have; None = all that are left, and of an empty step its least.
          keep_pages: leave no pages to those behind it if there are too few for it.
        """
        if job.pages > self.pages:
            self.short.append(job.job_id)
            if keep_pages:
                self.pages = 0
            return 0
        is_empty = self.tokens == self.limits.tokens
        left = max(self.tokens, job.least) if is_empty else self.tokens
        tokens = min(job.tokens, left if most is None else min(most, left))
        last = tokens == job.tokens
        if last and job.outputs > self.rows:
            # All but its last token may run; the rest finds rows in a later step.
            tokens, last = tokens - 1, False
        if tokens < job.least:
            return 0
        self.pieces.append(Piece(job_id=job.job_id, tokens=tokens, last=last))
        self.tokens -= tokens
        self.rows -= job.outputs if last else 0
        self.pages -= job.pages
        return tokens
