"""Clients of a server, each with a session of his own, some of whose calls are cut off or wrong."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from served import CALL_S, tokens

from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving.jaxstate_pb2_grpc import JaxStateStub

PREFIX, ROW, QUESTION, ANSWER = 300, 14, 12, 4
LONGEST = 900  # tokens of a context, then its session is closed and another opened
CANCELLED, EXPIRED, WRONG = 0.05, 0.05, 0.01  # shares of the calls
MOST_REGISTERED = 2
_CUT_S = 0.04  # calls are cut off within this time
Code = grpc.StatusCode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """An answer, and the context that it is to be the answer to."""

    context: tuple[int, ...]
    question: tuple[int, ...]
    answer: pb.Answer


@dataclasses.dataclass(kw_only=True)
class Tally:
    """What all clients have seen.

    Attributes:
      answers: every one.
      calls: by method, those that were cut off included.
      ended: by why and with which status.
      unexpected: failures that should have had another status, or none, in words.
    """

    answers: list[Given] = dataclasses.field(default_factory=list)
    calls: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    ended: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    unexpected: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(kw_only=True)
class Pace:
    """Seconds that a client thinks between two calls, in the mean; whoever steers it changes it."""

    think_s: float


class Client:
    """One of many; its session's tokens at each version are known to it."""

    def __init__(self, name: str, stub: JaxStateStub, tally: Tally, *, vocab_size: int, seed: int):
        """Start without a session."""
        self._name = name
        self._stub: Any = stub
        self._tally = tally
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)
        self._opened = 0
        self._session = ""
        self._context: list[int] = []
        self._lengths: list[int] = []  # of the context, by version
        self._registered: list[tuple[int, tuple[int, ...]]] = []
        shared = random.Random(0)  # what prompts without a session begin with
        self._beginning = [shared.randrange(vocab_size) for _ in range(64)]

    async def run(self, pace: Pace, over: asyncio.Event) -> None:
        """Make calls until it is over, then close the session."""
        await self._open()
        while not over.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(over.wait(), self._rng.expovariate(1 / pace.think_s))
            if len(self._context) + 2 * ROW > LONGEST:
                await self._close()
                await self._open()
            kinds: Sequence[Callable] = (self._append, self._ask, self._generate, self._register)
            [kind] = self._rng.choices(kinds, (0.45, 0.4, 0.05, 0.1))
            await (self._wrong() if self._rng.random() < WRONG else kind())
        await self._close()

    # Verbs

    async def _open(self) -> None:
        self._opened += 1
        self._session = f"{self._name}-{self._opened}"
        self._context = self._draw(self._rng.randint(PREFIX // 2, PREFIX))
        self._lengths = [len(self._context)]
        self._registered.clear()
        request = pb.CreateSessionRequest(session_id=self._session, prefix=tokens(self._context))
        await self._call("CreateSession", request)

    async def _close(self) -> None:
        await self._call("CloseSession", pb.CloseSessionRequest(session_id=self._session))

    async def _append(self) -> None:
        """Append a row; one that was cut off is sent again until it is acknowledged."""
        row = self._draw(ROW)
        self._context += row
        self._lengths.append(len(self._context))
        version = len(self._lengths) - 1
        request = pb.AppendRequest(
            session_id=self._session, prompt=tokens(row), writer="w", sequence=version
        )
        done = await self._maybe_cut("Append", request)
        done = done or await self._call("Append", request)
        if done is not None and done.version != version:
            self._tally.unexpected.append(f"Append: version {done.version} for {version}")

    async def _ask(self) -> None:
        """Ask something, maybe what is registered."""
        question = tuple(self._draw(QUESTION))
        if self._registered and self._rng.random() < 0.5:
            _, question = self._rng.choice(self._registered)
        request = pb.QueryRequest(session_id=self._session, question=_question(question))
        await self._maybe_cut("Query", request, functools.partial(self._note, question))

    async def _generate(self) -> None:
        """Ask without a session."""
        prompt = (*self._beginning, *self._draw(QUESTION))
        request = pb.GenerateRequest(question=_question(prompt))

        def note(answer: pb.Answer) -> None:
            self._tally.answers.append(Given(context=(), question=prompt, answer=answer))

        await self._maybe_cut("Generate", request, note)

    async def _register(self) -> None:
        if len(self._registered) == MOST_REGISTERED:
            flash_id, _ = self._registered.pop(0)
            request = pb.UnregisterRequest(session_id=self._session, flash_id=flash_id)
            await self._call("Unregister", request)
        question = tuple(self._draw(QUESTION))
        request = pb.RegisterRequest(session_id=self._session, question=_question(question))
        done = await self._call("Register", request)
        if done is not None:
            self._registered.append((done.flash_id, question))

    async def _wrong(self) -> None:
        """Send something that is wrong in a way with one right status."""
        mine = self._session
        question = _question(self._draw(QUESTION))
        method, request, code = self._rng.choice(
            (
                ("Append", pb.AppendRequest(session_id=mine), Code.INVALID_ARGUMENT),
                ("Rollback", pb.RollbackRequest(session_id=mine), Code.INVALID_ARGUMENT),
                ("GetSession", pb.GetSessionRequest(session_id="nobody's"), Code.NOT_FOUND),
                ("Query", pb.QueryRequest(session_id=mine), Code.INVALID_ARGUMENT),
                ("Query", pb.QueryRequest(session_id="no", question=question), Code.NOT_FOUND),
                ("CreateSession", pb.CreateSessionRequest(session_id=mine), Code.ALREADY_EXISTS),
                (
                    "Append",
                    pb.AppendRequest(session_id=mine, prompt=tokens([1] * 4000)),
                    Code.FAILED_PRECONDITION,
                ),
                (
                    "Append",
                    pb.AppendRequest(session_id=mine, prompt=tokens([2**31])),
                    Code.INVALID_ARGUMENT,
                ),
            )
        )
        await self._call(method, request, expected=code)

    # Calls

    def _note(self, question: tuple[int, ...], answer: pb.Answer) -> None:
        context = tuple(self._context[: self._lengths[answer.version]])
        if answer.usage.context_tokens != len(context):
            self._tally.unexpected.append(
                f"Query: {answer.usage.context_tokens} tokens of context at version "
                f"{answer.version} for {len(context)}"
            )
        self._tally.answers.append(Given(context=context, question=question, answer=answer))

    async def _maybe_cut(
        self, method: str, request: Any, note: Callable[[pb.Answer], None] = lambda answer: None
    ) -> Any:
        """Make a call that may be cancelled or have hardly any time; None = it came to nothing."""
        draw = self._rng.random()
        after_s = self._rng.uniform(0, _CUT_S)
        if draw < CANCELLED:
            return await self._call(method, request, note, cancel_s=after_s)
        if draw < CANCELLED + EXPIRED:
            return await self._call(
                method, request, note, timeout_s=after_s, expected=Code.DEADLINE_EXCEEDED
            )
        return await self._call(method, request, note)

    async def _call(
        self,
        method: str,
        request: Any,
        note: Callable[[pb.Answer], None] = lambda answer: None,
        *,
        cancel_s: float | None = None,
        timeout_s: float = CALL_S,
        expected: grpc.StatusCode | None = None,
    ) -> Any:
        """Make a call and return what it returned last; None if it ended as expected, or badly."""
        self._tally.calls[method] += 1
        call = getattr(self._stub, method)(request, timeout=timeout_s)
        if cancel_s is not None:
            asyncio.get_running_loop().call_later(cancel_s, call.cancel)
        try:
            last = None
            async for last in _parts(call):  # noqa: B007
                pass
        except asyncio.CancelledError:
            if cancel_s is None:
                raise
            self._tally.ended["cancelled"] += 1
            return None
        except grpc.aio.AioRpcError as error:
            cut = error.code() is Code.CANCELLED and cancel_s is not None
            self._tally.ended["cancelled" if cut else error.code().name] += 1
            if not cut and error.code() is not expected:
                self._tally.unexpected.append(f"{method}: {error.code().name}, {error.details()}")
            return None
        if isinstance(last, pb.AnswerPart):
            note(last.answer)
        if expected not in (None, Code.DEADLINE_EXCEEDED):
            self._tally.unexpected.append(f"{method}: an answer, not {expected}")
        return last

    def _draw(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(count)]


async def _parts(call: Any) -> AsyncIterator[Any]:
    """Read a call, whether it is a stream or not."""
    if hasattr(call, "__aiter__"):
        async for part in call:
            yield part
    else:
        yield await call


def _question(ids: Sequence[int]) -> pb.Question:
    return pb.Question(prompt=tokens(ids), max_new_tokens=ANSWER, ignore_model_eos=True)
