"""How a service's verbs come to its scheduler, and callers to hear of them."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Sequence

from jaxstate import checks
from jaxstate.errors import CapacityError
from jaxstate.needs import Steps
from jaxstate.plan import JobClass
from jaxstate.scheduler import Scheduler, Ticket
from jaxstate.serving.commands import Commands
from jaxstate.serving.durable import Durable
from jaxstate.serving.evaluations import Evaluations
from jaxstate.serving.pending import Pending
from jaxstate.serving.quotas import Holdings
from jaxstate.verbs import Verbs

logger = logging.getLogger(__name__)


class Submissions:
    """Submits verbs; used by the worker."""

    def __init__(
        self,
        verbs: Verbs,
        scheduler: Scheduler,
        commands: Commands,
        durable: Durable,
        holdings: Holdings,
        evaluations: Evaluations,
        clock: Callable[[], float],
    ):
        """Start with none.

        Args:
          evaluations: verbs that others may wait for when a caller does no more.
        """
        self._verbs = verbs
        self._scheduler = scheduler
        self._commands = commands
        self._durable = durable
        self._holdings = holdings
        self._evaluations = evaluations
        self._clock = clock
        self._news = itertools.count()
        self._reviving: dict[str, Ticket] = {}  # sessions whose cells are on their way

    def unasked(self) -> Pending:
        """Return what stands for a caller where there is none."""
        return Pending(self._commands.changed, None)

    def submit(
        self,
        pending: Pending,
        begin: Callable,
        session_id: str,
        token_ids: Sequence[int],
        job_class: JobClass,
        *,
        cells: int,
        most: int | None = None,
        exclusive: bool = False,
        deadline_s: float = math.inf,
    ) -> Ticket:
        """Submit a verb of a session.

        Args:
          begin: the verb, of session id and tokens.
          cells: the most that it can add to the session.
          most: the longest that it can leave it, in tokens, if that is less, see Holdings.check.
          exclusive: see Scheduler.submit.
          deadline_s: seconds after which it need not be begun any more.
        Raises:
          UnknownSessionError: there is no such session.
          QuotaError: its tenant may not have so many cells more.
        """
        tenant = self._verbs.session(session_id).tenant  # known, or refused at once
        if pending.asked:
            self._holdings.check(tenant, cells=cells, session=session_id, most=most)
        now = self._clock()
        after: frozenset[int] = frozenset()
        if session_id in self._reviving:  # once is enough, and now somebody waits for it
            after = frozenset({self._reviving[session_id].job_id})
            self._scheduler.promote(self._reviving[session_id], job_class, now)
        ticket = self._scheduler.submit(
            functools.partial(begin, session_id, token_ids), job_class=job_class,
            session=session_id, tokens=len(token_ids), cells=cells, now=now,
            outputs=int(job_class in (JobClass.QUERY, JobClass.FLASH)),  # answers begin with one
            deadline=pending.asked + deadline_s, after=after, exclusive=exclusive,
        )  # fmt: skip
        if pending.asked:
            self._holdings.reserve(ticket, tenant, cells=cells, most=most)
        self._durable.hold(ticket)
        self.attach(pending, ticket)
        return ticket

    def submit_new(
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
            checks.token_ids(token_ids, self._verbs.model, what)
        self._holdings.check(tenant, sessions=sessions, cells=cells)
        now = self._clock()
        ticket = self._scheduler.submit(
            begin, job_class=job_class, session=f"new {next(self._news)}", tokens=len(token_ids),
            cells=cells, now=now, deadline=pending.asked + deadline_s, prefix=token_ids,
            tenant=tenant, can_stop=can_stop,
        )  # fmt: skip
        self._holdings.reserve(ticket, tenant, sessions=sessions, cells=cells)
        self._durable.hold(ticket)
        self.attach(pending, ticket)
        return ticket

    def attach(self, pending: Pending, ticket: Ticket) -> None:
        """Let a caller wait for a verb; it is cancelled when nobody is left who does."""
        pending._ticket = ticket
        if not ticket.asked:
            ticket.asked = pending.asked

        def give_up() -> None:
            if self._evaluations.leave(ticket) and not ticket.joined:
                self._scheduler.cancel(ticket, self._clock())

        def cancel() -> None:
            with self._commands.changed:  # it gives up its own part only, and once
                if pending._cancel is cancel:
                    pending._cancel = lambda: None
                    self._commands.enqueue(give_up)

        pending._cancel = cancel

    # Lost cells

    def revive(self, session_id: str) -> None:
        """Bring a session's lost cells back in idle time; verbs on it wait for that."""

        def begin(session_id: str, token_ids: Sequence[int]) -> Steps:
            return self._verbs.revive(session_id)

        cells = self._verbs.session(session_id).context_len
        try:
            self._reviving[session_id] = self.submit(
                self.unasked(), begin, session_id, (), JobClass.ADVANCE, cells=cells
            )
        except CapacityError as error:
            logger.warning("session %s: its cells will not come back: %s", session_id, error)

    def note_ends(self) -> None:
        """Forget revivals that are over."""
        for name in [name for name, ticket in self._reviving.items() if ticket.is_over]:
            del self._reviving[name]
