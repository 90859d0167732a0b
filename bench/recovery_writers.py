"""Clients that change sessions of a server that may die, and what must be true of it afterwards."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Sequence
from typing import Any

import common
import grpc
from served import CALL_S, answer_of, tokens

from jaxstate.engine import Engine
from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving.jaxstate_pb2_grpc import JaxStateStub

LONGEST = 320  # tokens of a stream, then it is begun anew
PREFIX, ANSWER = 24, 4
GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED)
Verb = pb.AppendRequest | pb.UpdateRequest | pb.RollbackRequest


@dataclasses.dataclass(kw_only=True)
class Writer:
    """Who changes one session, and what he was told.

    Attributes:
      stream: the session's tokens behind its prefix, as acknowledged.
      pending: sent and not acknowledged, so that it may have been applied or not.
      acknowledged: verbs, all in all.
    """

    session: str
    prefix: list[int]
    vocab_size: int
    stream: list[int] = dataclasses.field(default_factory=list)
    version: int = 0
    sequence: int = 0
    pending: Verb | None = None
    acknowledged: int = 0
    asked: int = 0
    failure: BaseException | None = None

    def open(self, stub: JaxStateStub) -> None:
        """Open the session."""
        request = pb.CreateSessionRequest(session_id=self.session, prefix=tokens(self.prefix))
        stub.CreateSession(request, timeout=CALL_S)

    def write(self, stub: JaxStateStub, rng: random.Random, over: threading.Event) -> None:
        """Do verbs until the server dies, or it is over; any other error is a failure."""
        try:
            while not over.is_set():
                if rng.random() < 0.2:
                    self.ask(stub, self.draw(rng, 8))
                    continue
                self.pending = self.next(rng)
                self.send(stub)
        except grpc.RpcError as error:
            if error.code() not in GONE:
                self.failure = error
        except BaseException as error:
            self.failure = error

    def draw(self, rng: random.Random, count: int) -> list[int]:
        """Draw token ids."""
        return [rng.randrange(self.vocab_size) for _ in range(count)]

    def ask(self, stub: JaxStateStub, question: Sequence[int]) -> pb.Answer:
        """Ask something."""
        asked = pb.Question(prompt=tokens(question), max_new_tokens=ANSWER, ignore_model_eos=True)
        request = pb.QueryRequest(session_id=self.session, question=asked, top_logprobs=2)
        self.asked += 1
        return answer_of(stub.Query(request, timeout=CALL_S))

    def send(self, stub: JaxStateStub) -> None:
        """Send what is pending, be it again, and note that it is done."""
        verb = self.pending
        assert verb is not None
        name = type(verb).__name__.removesuffix("Request")
        version = getattr(stub, name)(verb, timeout=CALL_S).version
        assert version == self.version + 1, (self.session, name, version, self.version)
        self.stream, self.version, self.pending = self.expected(), version, None
        self.acknowledged += 1

    def expected(self) -> list[int]:
        """Return the stream as it is once what is pending is applied."""
        match self.pending:
            case pb.AppendRequest(prompt=prompt):
                return [*self.stream, *prompt.tokens.ids]
            case pb.UpdateRequest(prompt=prompt):
                return list(prompt.tokens.ids)
            case pb.RollbackRequest(tokens=count):
                return self.stream[: len(self.stream) - count]
        return self.stream

    def append(self, ids: Sequence[int]) -> Verb:
        """Return an append, not yet sent."""
        return pb.AppendRequest(prompt=tokens(ids), **self._who())

    def _who(self) -> dict[str, Any]:
        self.sequence += 1
        return {"session_id": self.session, "writer": "bench", "sequence": self.sequence}

    def next(self, rng: random.Random) -> Verb:
        """Return a verb at random, not yet sent."""
        kind = rng.random()
        if len(self.stream) > LONGEST or (kind < 0.1 and self.stream):
            kept = self.stream[: rng.randrange(min(len(self.stream), LONGEST // 2))]
            return pb.UpdateRequest(prompt=tokens([*kept, *self.draw(rng, 8)]), **self._who())
        if kind < 0.2 and len(self.stream) > 4:
            return pb.RollbackRequest(tokens=rng.randint(1, 4), **self._who())
        return self.append(self.draw(rng, rng.randint(1, 24)))


@dataclasses.dataclass(kw_only=True)
class Losses:
    """What was found wrong: acknowledged verbs lost, verbs doubled, sessions corrupt."""

    lost: int = 0
    doubled: int = 0
    corrupt: int = 0
    checked: int = 0

    @property
    def count(self) -> int:
        """All of it."""
        return self.lost + self.doubled + self.corrupt


def check(writer: Writer, stub: JaxStateStub, losses: Losses) -> None:
    """Compare a session with what its writer was told, and send again what was pending."""
    losses.checked += 1
    found = stub.GetSession(pb.GetSessionRequest(session_id=writer.session), timeout=CALL_S)
    most = writer.version + (writer.pending is not None)
    losses.lost += max(writer.version - found.version, 0)
    losses.doubled += max(found.version - most, 0)
    applied = writer.expected() if found.version == most else writer.stream
    losses.corrupt += found.context_tokens != len(writer.prefix) + len(applied)
    if writer.pending is not None:
        writer.send(stub)  # refuses another version than the next
        again = stub.GetSession(pb.GetSessionRequest(session_id=writer.session), timeout=CALL_S)
        losses.doubled += again.version != writer.version


def compare(
    writer: Writer, stub: JaxStateStub, engine: Engine, rng: random.Random, losses: Losses
) -> None:
    """Ask a session something, and another engine behind the tokens that it should have."""
    question = writer.draw(rng, 8)
    answer = writer.ask(stub, question)
    session = engine.create([*writer.prefix, *writer.stream])
    again = engine.query(session, question, max_new_tokens=ANSWER, top_logprobs=2)
    engine.close(session)
    sure = common.sure_len(again)
    losses.corrupt += list(answer.token_ids[:sure]) != list(again.token_ids[:sure])
