"""What a journal's rows mean: a session's tokens, and what it was registered for."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxstate.constraint import Constraint
from jaxstate.errors import SnapshotError
from jaxstate.flash import FlashQuery, Question
from jaxstate.gate import Gate
from jaxstate.prepositioning import Entry
from jaxstate.sampling import Sampling
from jaxstate.session import Change, Session, WhenFull


@dataclasses.dataclass(kw_only=True)
class Tokens:
    """A session's tokens at a version; see Session for the attributes.

    Attributes:
      frozen: the first `frozen_len`.
      stream: those kept of the stream.
    """

    frozen: list[int]
    stream: list[int]
    evicted: int
    stream_floor: int
    version: int
    rebuilt: bool

    @classmethod
    def of(cls, session: Session) -> Tokens:
        """Copy them from a session's record."""
        return cls(
            frozen=session.token_ids[: session.frozen_len],
            stream=session.token_ids[session.frozen_len :],
            evicted=session.evicted,
            stream_floor=session.stream_floor,
            version=session.version,
            rebuilt=session.rebuilt,
        )

    def apply(self, change: Change, name: str) -> None:
        """Edit them as a change did.

        Raises:
          SnapshotError: it cannot have been the next one.
        """
        end = self.evicted + len(self.stream)
        follows = change.version == self.version + 1
        if not follows or not self.evicted <= change.evicted <= change.begin <= end:
            raise SnapshotError(
                f"{name}: expected a change to version {self.version + 1} between stream tokens "
                f"{self.evicted} and {end}, got one to {change.version} at {change.begin} that "
                f"evicts up to {change.evicted}; the journal is damaged, restore a copy of it"
            )
        kept = self.stream[change.evicted - self.evicted : change.begin - self.evicted]
        self.stream = [*kept, *change.token_ids]
        self.evicted, self.stream_floor = change.evicted, change.stream_floor
        self.version, self.rebuilt = change.version, change.rebuilt


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumberedWrite:
    """A verb that had a number, see WriteMemory; `version` is what it led to."""

    writer: str
    sequence: int
    digest: bytes
    version: int


@dataclasses.dataclass(kw_only=True)
class SavedSession:
    """A session as a journal has it.

    Attributes:
      tokens: as they were last.
      changes: the newest of those that led there, without a gap.
      numbers: numbered verbs, oldest first.
      queries: registered questions with their gates.
      last_flash_id: the highest that one had, whether it is still registered or not.
      headers: declared ones.
      snapshot: name of its newest snapshot; "" = none.
    """

    session_id: str
    tenant: str
    when_full: WhenFull
    tokens: Tokens
    changes: list[Change] = dataclasses.field(default_factory=list)
    numbers: list[NumberedWrite] = dataclasses.field(default_factory=list)
    queries: list[FlashQuery] = dataclasses.field(default_factory=list)
    last_flash_id: int = 0
    headers: list[Entry] = dataclasses.field(default_factory=list)
    snapshot: str = ""


def checksum(values: Iterable[Any]) -> int:
    """Return the CRC-32 of a row's values and of where each of them ends."""
    crc = 0
    for value in values:
        data = value if isinstance(value, bytes) else repr(value).encode()
        crc = zlib.crc32(data, zlib.crc32(f"{type(value).__name__} {len(data)} ".encode(), crc))
    return crc


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Write token ids as little-endian int32."""
    return np.asarray(token_ids, "<i4").tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Read what `pack_ids` wrote."""
    return np.frombuffer(data, "<i4").tolist()


def question_to_json(question: Question) -> str:
    """Write a question; a logit bias may be -Infinity, which Python's json reads again."""
    sampling = dataclasses.asdict(question.sampling)
    sampling["logit_bias"] = sorted(sampling["logit_bias"].items())
    return json.dumps(dataclasses.asdict(question) | {"sampling": sampling}, default=int)


def question_from_json(text: str) -> Question:
    """Read what `question_to_json` wrote."""
    saved = json.loads(text)
    sampling = saved["sampling"]
    constraint = saved.get("constraint")  # older ones know none
    bias = {token_id: value for token_id, value in sampling["logit_bias"]}
    return Question(
        token_ids=tuple(saved["token_ids"]),
        max_new_tokens=saved["max_new_tokens"],
        choices=tuple(tuple(choice) for choice in saved["choices"]),
        eos_ids=tuple(saved["eos_ids"]),
        sampling=Sampling(**(sampling | {"logit_bias": bias})),
        constraint=Constraint(**constraint) if constraint else None,
    )


def gates_to_bytes(query: FlashQuery) -> bytes:
    """Write a registered question's gates; b"" if they know nothing yet."""
    headers = [[list(header), gate.to_json()] for header, gate in query.headers.items()]
    if not (query.stale.samples or query.first.samples or headers):
        return b""
    gates = {"stale": query.stale.to_json(), "first": query.first.to_json(), "headers": headers}
    return zlib.compress(json.dumps(gates).encode(), 1)


def query_of(flash_id: int, question: Question, risk: float | None, gates: bytes) -> FlashQuery:
    """Return a registered question with the gates that `gates_to_bytes` wrote.

    Raises:
      SnapshotError: it did not write these.
    """
    query = FlashQuery(flash_id=flash_id, question=question, risk=risk)
    if gates:
        saved = json.loads(zlib.decompress(gates))
        query.stale = Gate.from_json(saved["stale"])
        query.first = Gate.from_json(saved["first"])
        query.headers = {tuple(header): Gate.from_json(gate) for header, gate in saved["headers"]}
    return query


def entry_to_json(entry: Entry) -> str:
    """Write a declared header."""
    return json.dumps(dataclasses.asdict(entry), default=int)


def entry_from_json(text: str) -> Entry:
    """Read what `entry_to_json` wrote."""
    saved = json.loads(text)
    return Entry(**{k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})
