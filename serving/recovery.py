"""From what a journal or a snapshot has to a service's sessions as they were."""

from __future__ import annotations

import zlib
from typing import Any

from jaxstate.engine import Engine
from jaxstate.errors import CapacityError, SnapshotError
from jaxstate.serving import journal_rows
from jaxstate.serving.journal_rows import SavedSession
from jaxstate.serving.open_session import OpenSession
from jaxstate.session import Session


def recover(engine: Engine, saved: SavedSession) -> None:
    """Open a session as it was; its cells are lost until somebody asks or there is idle time.

    Raises:
      SnapshotError: it does not fit this engine.
    """
    tokens = saved.tokens
    session = Session(
        session_id=saved.session_id, owner=-1, when_full=saved.when_full, tenant=saved.tenant,
        frozen_len=len(tokens.frozen), token_ids=[*tokens.frozen, *tokens.stream],
        evicted=tokens.evicted, stream_floor=tokens.stream_floor, version=tokens.version,
        rebuilt=tokens.rebuilt,
    )  # fmt: skip
    session.saved_len = session.stream_len
    try:
        engine.verbs.adopt(session)
    except CapacityError as error:
        raise SnapshotError(f"journal: {error}") from error


def refill(saved: SavedSession, session: OpenSession) -> None:
    """Bring back what a session was registered for and which numbered verbs it has had."""
    for query in saved.queries:
        session.board.recall(query)
    session.board.recall_id(saved.last_flash_id)
    for header in saved.headers:
        session.prepositions.declare(header)
    for one in saved.numbers:
        number = one.writer, one.sequence
        session.memory.recall(number, one.digest, saved.session_id, one.version)


def registered(session: OpenSession) -> dict[str, Any]:
    """Return what a session was registered for, with gates, and its numbered verbs, for json."""
    return {
        "questions": [
            [
                query.flash_id, journal_rows.question_to_json(query.question), query.risk,
                journal_rows.gates_to_bytes(query).hex(),
            ]
            for query in session.board.queries
        ],
        "last_flash_id": session.board.last_id,
        "headers": [
            journal_rows.entry_to_json(header) for header in session.prepositions.declared
        ],
        "numbers": [
            [*number, digest.hex(), version] for number, digest, version in session.memory.done()
        ],
    }  # fmt: skip


def register(saved: dict[str, Any], session: OpenSession, session_id: str) -> None:
    """Bring back what `registered` returned, in a session of this id.

    Raises:
      SnapshotError: it did not return this.
    """
    try:
        for flash_id, question, risk, gates in saved["questions"]:
            asked = journal_rows.question_from_json(question)
            query = journal_rows.query_of(flash_id, asked, risk, bytes.fromhex(gates))
            session.board.recall(query)
        session.board.recall_id(saved.get("last_flash_id", 0))  # older ones do not know it
        for header in saved["headers"]:
            session.prepositions.declare(journal_rows.entry_from_json(header))
        for writer, sequence, digest, version in saved.get("numbers", ()):
            number = writer, sequence
            session.memory.recall(number, bytes.fromhex(digest), session_id, version)
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise SnapshotError(f"snapshot: its registrations are damaged: {error}") from error
