"""Drives `plan` with recorded arrivals: no arrays, no threads, no clock but its own."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from jaxstate.plan import Job, JobClass, Limits, StepPlan, plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request: its tokens are forwarded, then its answer is decoded token by token."""

    at: float
    job_class: JobClass
    session: str
    tokens: int
    answer_tokens: int = 0
    pages: int = 0
    deadline_s: float = math.inf


@dataclasses.dataclass
class Outcome:
    """What became of a request; times in seconds from its arrival, None = never."""

    started: float | None = None
    first_output: float | None = None
    ended: float | None = None
    expired: bool = False


@dataclasses.dataclass
class Record:
    """What a simulation came to."""

    outcomes: list[Outcome]
    steps: list[tuple[float, StepPlan, list[Job]]]

    def sojourns(self, arrivals: Sequence[Arrival]) -> dict[JobClass, list[float]]:
        found = defaultdict(list)
        for arrival, outcome in zip(arrivals, self.outcomes, strict=True):
            if outcome.ended is not None:
                found[arrival.job_class].append(outcome.ended)
        return found


def simulate(
    arrivals: Sequence[Arrival],
    limits: Limits,
    *,
    pages: int = 10**6,
    seconds: Callable[[int], float] = lambda tokens: 0.004 + 0.001 * tokens,
    most_steps: int = 100_000,
) -> Record:
    """Run everything that arrives to its end.

    Args:
      seconds: what a step of so many tokens takes.
    """
    order = sorted(range(len(arrivals)), key=lambda index: arrivals[index].at)
    outcomes = [Outcome() for _ in arrivals]
    jobs: dict[int, Job] = {}
    held: dict[int, int] = {}
    left: dict[int, int] = {}
    steps = []
    now, next_arrival = 0.0, 0
    while next_arrival < len(order) or jobs:
        assert len(steps) < most_steps, "the simulation does not end"
        while next_arrival < len(order) and arrivals[order[next_arrival]].at <= now:
            index = order[next_arrival]
            arrival = arrivals[index]
            jobs[index] = Job(
                job_id=index, job_class=arrival.job_class, session=arrival.session,
                tokens=arrival.tokens, outputs=1 if arrival.answer_tokens else 0,
                pages=arrival.pages, arrived=arrival.at, deadline=arrival.at + arrival.deadline_s,
            )  # fmt: skip
            left[index] = arrival.answer_tokens
            next_arrival += 1
        waiting = list(jobs.values())
        step = plan(waiting, limits, pages - sum(held.values()), now)
        steps.append((now, step, waiting))
        for index in step.expired:
            outcomes[index].expired = True
            del jobs[index]
        if not step.tokens:
            if next_arrival == len(order) and not step.expired:
                assert not jobs, f"nothing runs, and {len(jobs)} wait"
                break
            if next_arrival < len(order) and not step.expired:
                now = max(now, arrivals[order[next_arrival]].at)
            continue
        for index in step.gave_way:
            jobs[index] = dataclasses.replace(jobs[index], gave_way=True)
        for piece in step.pieces:
            if outcomes[piece.job_id].started is None:
                outcomes[piece.job_id].started = now - arrivals[piece.job_id].at
        now += seconds(step.tokens)
        for piece in step.pieces:
            job = jobs[piece.job_id]
            held.setdefault(job.job_id, job.pages)
            jobs[job.job_id] = dataclasses.replace(
                job, tokens=job.tokens - piece.tokens, started=True, pages=0, ran=now
            )
        for index in (*step.decodes, *(piece.job_id for piece in step.pieces if piece.last)):
            outcome = outcomes[index]
            age = now - arrivals[index].at
            outcome.first_output = outcome.first_output or age
            left[index] -= 1
            if left[index] > 0:
                jobs[index] = dataclasses.replace(
                    jobs[index], tokens=1, decodes=True, gave_way=False, arrived=now, ran=now,
                    outputs=1,
                )  # fmt: skip
            else:
                outcome.ended = age
                del jobs[index]
                del held[index]
    return Record(outcomes=outcomes, steps=steps)
