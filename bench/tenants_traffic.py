"""Many tenants of one service: random appends, questions and registrations at random times."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Sequence

import numpy as np

from jaxstate.flash import FlashQuery, Question
from jaxstate.plan import JobClass
from jaxstate.serving.local_service import LocalService
from jaxstate.serving.pending import Pending

WAIT_S = 600.0
ROW_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 14, 12, 4
KINDS, SHARES = ("append", "query", "register"), (0.45, 0.45, 0.1)
MOST_REGISTERED = 2  # of a session; the oldest goes for a third
STEER_S = 5.0
CALLERS = 16  # threads that submit; each has sessions of its own


@dataclasses.dataclass(kw_only=True)
class Tenant:
    """A session and all that was given to it.

    Attributes:
      token_ids: in order.
      first_version: when it held `first_len` tokens.
      registered: questions that are answered ahead.
    """

    session: str
    token_ids: list[int]
    first_version: int
    first_len: int
    registered: list[FlashQuery] = dataclasses.field(default_factory=list)

    def len_at(self, version: int) -> int:
        """Tokens it had at a version: each append is one row."""
        return self.first_len + ROW_TOKENS * (version - self.first_version)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sent:
    """A verb that was submitted: `due` seconds on the service's clock, from which it counts."""

    tenant: Tenant
    job_class: JobClass
    due: float
    pending: Pending
    question: Question | None = None

    @property
    def was_there(self) -> bool:
        """Whether the answer was there already, so that nothing was begun."""
        return self.pending._ticket is None

    @property
    def sojourn_s(self) -> float:
        """Seconds until it was done, of what was begun."""
        ticket = self.pending._ticket
        assert ticket is not None and ticket.ended is not None
        return ticket.ended - self.due

    @property
    def wait_s(self) -> float:
        """Seconds until it was begun."""
        ticket = self.pending._ticket
        assert ticket is not None and ticket.started is not None
        return ticket.started - self.due


class Traffic:
    """What tenants do; `sent` holds all of it."""

    def __init__(
        self, service: LocalService, tenants: Sequence[Tenant], *, vocab_size: int, context_len: int
    ):
        """Start with nothing sent; the service must run on time.perf_counter."""
        self.sent: list[Sent] = []
        self._service = service
        self._tenants = tenants
        self._vocab_size = vocab_size
        self._context_len = context_len

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Draw token ids."""
        return rng.integers(0, self._vocab_size, count).tolist()

    def act(self, tenant: Tenant, rng: np.random.Generator, due: float) -> None:
        """Do something at random; raises what the service does."""
        kind = rng.choice(KINDS, p=SHARES)
        if kind == "append" and len(tenant.token_ids) + ROW_TOKENS <= self._context_len:
            row = self.draw(rng, ROW_TOKENS)
            pending = self._service.append(tenant.session, row)
            tenant.token_ids += row
            self.sent.append(
                Sent(tenant=tenant, job_class=JobClass.APPEND, due=due, pending=pending)
            )
            return
        if kind == "register":
            if len(tenant.registered) == MOST_REGISTERED:
                self._service.unregister(tenant.session, tenant.registered.pop(0).flash_id)
            tenant.registered.append(self._service.register(tenant.session, self._question(rng)))
            return
        # Every other one was registered, if any are.
        known = tenant.registered and rng.random() < 0.5
        question = rng.choice(np.array(tenant.registered)).question if known else None
        question = question or self._question(rng)
        pending = self._service.query(tenant.session, question)
        self.sent.append(
            Sent(
                tenant=tenant, job_class=JobClass.QUERY, due=due, pending=pending,
                question=question,
            )
        )  # fmt: skip

    def one_by_one(self, count: int, seed: int) -> float:
        """Do things, each when all before is done and answered: seconds of steps for each."""
        rng = np.random.default_rng(seed)
        before = self._service.metrics.busy_s
        for _ in range(count):
            tenant = self._tenants[int(rng.integers(len(self._tenants)))]
            self.act(tenant, rng, time.perf_counter())
            self._service.wait_until_idle(WAIT_S)
        return (self._service.metrics.busy_s - before) / count

    def play(self, rate: float, seconds: float, seed: int, keep_busy: float = 0.0) -> float:
        """Do things at random times, whether or not those before are done.

        Args:
          rate: of Poisson arrivals of all tenants together, a second.
          keep_busy: where given, the rate is set anew every few seconds so that steps run for that
            share of the time: contexts grow, and verbs on them take longer.
        Returns:
          the share of the time in which steps ran.
        Raises:
          what the service raised, first of all.
        """
        callers = min(CALLERS, len(self._tenants))
        before = self._service.metrics.busy_s
        began = time.perf_counter()
        over = threading.Event()

        def steer() -> None:
            nonlocal rate
            at, busy_s = began, before
            while not over.wait(STEER_S):
                now, busy_now = time.perf_counter(), self._service.metrics.busy_s
                share = max((busy_now - busy_s) / (now - at), 0.1)
                rate *= (keep_busy / share) ** 0.5
                at, busy_s = now, busy_now

        def call(caller: int) -> None:
            rng = np.random.default_rng((seed, caller))
            mine = self._tenants[caller::callers]
            due = began
            while (due := due + rng.exponential(callers / rate)) < began + seconds:
                time.sleep(max(due - time.perf_counter(), 0))
                self.act(mine[int(rng.integers(len(mine)))], rng, due)

        with concurrent.futures.ThreadPoolExecutor(callers + 1) as pool:
            calls = [pool.submit(call, caller) for caller in range(callers)]
            steering = pool.submit(steer) if keep_busy else None
            try:
                for future in calls:
                    future.result()
            finally:
                over.set()
            if steering:
                steering.result()
        share = (self._service.metrics.busy_s - before) / (time.perf_counter() - began)
        for one in self.sent:
            one.pending.result(WAIT_S)
        self._service.wait_until_idle(WAIT_S)
        return share

    def _question(self, rng: np.random.Generator) -> Question:
        return Question(
            token_ids=tuple(self.draw(rng, QUESTION_TOKENS)), max_new_tokens=ANSWER_TOKENS
        )
