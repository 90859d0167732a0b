"""One call of a client: what it may use, how it waits for the worker, and how it ends.

The event loop never waits for the worker: verbs are submitted from a few threads, and the worker
wakes the loop behind every step. A client that goes away, or whose deadline passes, cancels what
was begun for it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import grpc.aio

from jaxstate.errors import InputError, JaxStateError, UnavailableError
from jaxstate.models.tokenizer import Tokenizer
from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving import messages, prompts
from jaxstate.serving.auth import Access
from jaxstate.serving.local_service import LocalService
from jaxstate.serving.pending import Pending
from jaxstate.serving.snapshot_store import SnapshotStore

NUM_THREADS = 64  # that may wait for the worker to take a verb
NUM_TEXT_THREADS = 8  # that encode and decode text, and may take seconds for it
NUM_SNAPSHOT_THREADS = 2  # that save and restore: each holds a session's cells in host memory
Undo = Callable[[Any], Any]
LONG_TEXT = 4096  # bytes of a message that is worth a thread


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """What a server serves.

    Attributes:
      service: runs the verbs; whoever made it closes it.
      tokenizer: of its engine; None = clients send token ids.
      name: the model's.
      snapshots: where clients' snapshots are; None = there are none.
    """

    service: LocalService
    tokenizer: Tokenizer | None
    name: str
    snapshots: SnapshotStore | None = None


class Backend:
    """What is served to the calls of one event loop: nothing at first, nothing more in the end."""

    def __init__(self, on_lost: Callable[[], Any], access: Access | None = None):
        """Start closed, in the event loop that will run the calls.

        Args:
          on_lost: called when the service ends by itself.
          access: who may call; None = whoever reaches the server, all as one tenant.
        """
        self.access = access
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._served: Served | None = None
        self._draining = False
        pool = concurrent.futures.ThreadPoolExecutor
        self._threads = pool(NUM_THREADS, "jaxstate-call")
        self.text_threads = pool(NUM_TEXT_THREADS, "jaxstate-text")
        self.snapshot_threads = pool(NUM_SNAPSHOT_THREADS, "jaxstate-snapshot")
        self._changed: asyncio.Future[None] = self._loop.create_future()
        self._told = False
        self._unlisten: Callable[[], None] = lambda: None
        self.num_calls = 0

    @property
    def served(self) -> Served:
        """What is served.

        Raises:
          UnavailableError: nothing yet, or nothing more.
        """
        if self._draining:
            raise UnavailableError("the server is going down; try another, or later", 1.0)
        if self._served is None:
            raise UnavailableError("the model is not loaded yet; come again", 1.0)
        if self._served.service.is_closed:
            raise UnavailableError("the service has ended; see the server's log", 1.0)
        return self._served

    def open(self, served: Served) -> None:
        """Serve from now on."""
        self._served = served
        self._unlisten = served.service.listen(self._tell)

    def drain(self) -> None:
        """Refuse new calls and end those that have no end of their own."""
        self._draining = True
        self._wake()

    def close(self) -> None:
        """Let go of the service."""
        unlisten, self._unlisten = self._unlisten, lambda: None
        unlisten()
        for threads in (self._threads, self.text_threads, self.snapshot_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def change(self) -> asyncio.Future[None]:
        """Return what is done at the worker's next step or change from now on."""
        return asyncio.shield(self._changed)

    async def run(
        self,
        function: Callable[..., Any],
        *args,
        undo: Undo | None = None,
        threads: concurrent.futures.Executor | None = None,
        **kwargs,
    ) -> Any:
        """Run what may wait for the worker; if nobody waits any more, not at all, or it is undone.

        Args:
          undo: gets the result of what had begun by then.
          threads: that run it; None = those for verbs.
        """
        call = functools.partial(function, *args, **kwargs)
        begun = (threads or self._threads).submit(call)
        running = asyncio.wrap_future(begun)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if not begun.cancel() and undo is not None:
                running.add_done_callback(functools.partial(self._undo, undo))
            raise

    def later(self, function: Callable[..., Any], *args: Any) -> None:
        """Run what nobody waits for."""
        self._threads.submit(function, *args)

    def _undo(self, undo: Undo, done: asyncio.Future) -> None:
        if not done.cancelled() and done.exception() is None:
            self.later(undo, done.result())

    def _tell(self) -> None:
        """Called by the worker: wake the loop, once for all that happens until it wakes."""
        if not self._told and not self._loop.is_closed():
            self._told = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._told = False
        if self._served is not None and self._served.service.is_closed:
            self._on_lost()
        changed, self._changed = self._changed, self._loop.create_future()
        changed.set_result(None)


class Call:
    """One call of a client."""

    def __init__(self, backend: Backend, context: grpc.aio.ServicerContext):
        """Admit it.

        Raises:
          UnauthenticatedError, DeniedError: not this caller.
          UnavailableError: nothing is served.
        """
        self._backend = backend
        self._context = context
        self.tenant = tenant_of(context, backend.access)
        served = backend.served
        self.service = served.service
        self.tokenizer = served.tokenizer
        self.model_name = served.name
        self.snapshots = served.snapshots

    @property
    def deadline_s(self) -> float:
        """Seconds that are left to it; inf without a deadline."""
        left = self._context.time_remaining()
        return math.inf if left is None else left

    def session_id(self, given: str) -> str:
        """Return what the engine calls the caller's session, see messages.session_id."""
        return messages.session_id(given, self.tenant)

    def new_session_id(self, given: str, field: str = "session_id") -> str | None:
        """Return what it shall call a new one, see messages.new_session_id."""
        return messages.new_session_id(given, self.tenant, field)

    async def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        undo: Undo | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run what may wait for the worker, in a thread.

        Args:
          undo: gets the result if the client has gone away meanwhile.
        """
        return await self._backend.run(function, *args, undo=undo, **kwargs)

    async def run_text(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run what encodes or decodes text: of whatever length, no verb waits for a thread."""
        threads = self._backend.text_threads
        return await self._backend.run(function, *args, threads=threads, **kwargs)

    async def run_snapshot(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run what saves or restores a session; a few do at once, the others wait."""
        threads = self._backend.snapshot_threads
        return await self._backend.run(function, *args, threads=threads, **kwargs)

    async def begin(
        self,
        function: Callable[..., Pending],
        *args: Any,
        undo: Undo | None = None,
        **kwargs: Any,
    ) -> Pending:
        """Submit a verb with what is left of the deadline, and return when the worker has it.

        Args:
          undo: gets the verb's result if the client has gone away meanwhile, and it was too late
            to cancel it.
        """
        cancel = functools.partial(_cancel, undo=undo)
        return await self.run(function, *args, undo=cancel, deadline_s=self.deadline_s, **kwargs)

    async def result(
        self,
        pending: Pending,
        *,
        cancels: bool = True,
        undo: Undo | None = None,
    ) -> Any:
        """Wait for the end of a verb and return its result.

        Args:
          cancels: it is cancelled if the client goes away.
          undo: see begin.
        """
        try:
            while not pending.is_over:
                await self.change()
        except asyncio.CancelledError:
            if cancels:
                self.later(_cancel, pending, undo)
            raise
        return pending.result(0)

    def cancel(self, pending: Pending) -> None:
        """End a verb that is not over at the next step."""
        if not pending.is_over:
            self.later(_cancel, pending)

    def later(self, function: Callable[..., Any], *args: Any) -> None:
        """Run what may wait for the worker and what nobody waits for."""
        self._backend.later(function, *args)

    def change(self) -> asyncio.Future[None]:
        """Return what to await for the worker's next step or change from now on.

        Whoever awaits anything else between reading and waiting takes it before reading.
        """
        return self._backend.change()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the worker makes something true.

        Raises:
          JaxStateError: see check_served.
        """
        while not condition():
            await self.change()
            self.check_served()

    def check_caller(self) -> None:
        """See that the caller of a long call is still let in.

        Raises:
          UnauthenticatedError, DeniedError: see tenant_of.
        """
        tenant_of(self._context, self._backend.access)

    def check_served(self) -> None:
        """See that a call without an end of its own may go on.

        Raises:
          UnauthenticatedError, DeniedError: see check_caller.
          UnavailableError: the server goes down.
        """
        self.check_caller()
        _ = self._backend.served

    async def ids(self, prompt: pb.Prompt, field: str, *, begins: bool = False) -> list[int]:
        """Return a prompt's token ids, see prompts.ids."""
        encode = functools.partial(prompts.ids, prompt, field, self.tokenizer, begins=begins)
        is_long = prompt.WhichOneof("kind") != "tokens" and prompt.ByteSize() > LONG_TEXT
        return await self.run_text(encode) if is_long else encode()

    def with_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
          InputError: there is none.
        """
        if self.tokenizer is None:
            raise InputError("text: expected a server with a tokenizer, this has none; send ids")
        return self.tokenizer


def tenant_of(context: grpc.aio.ServicerContext, access: Access | None) -> str:
    """Return who calls; the one place that decides. Without authentication all are one tenant, "".

    Raises:
      UnauthenticatedError, DeniedError: see Access.tenant_of.
    """
    if access is None:
        return ""
    return access.tenant_of(context.invocation_metadata() or (), context.peer_identities() or ())


def _cancel(pending: Pending, undo: Undo | None = None) -> None:
    """End a verb that nobody waits for; undo it if that came too late."""
    try:
        pending.cancel()
        if undo is not None:
            undo(pending.result())
    except JaxStateError:
        return  # nothing came of it, or nothing is left of it
