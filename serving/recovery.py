"""From what a journal or a snapshot has to a service's sessions as they were."""

from __future__ import annotations

import zlib
from typing import Any

from jaxstate.engine import Engine
from jaxstate.errors import CapacityError, SnapshotError
from jaxstate.flash import FlashBoard
from jaxstate.prepositioning import Prepositions
from jaxstate.serving import journal_rows
from jaxstate.serving.journal_rows import SavedSession
from jaxstate.serving.write_memory import WriteMemory
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


def refill(
    saved: SavedSession, board: FlashBoard, prepositions: Prepositions, memory: WriteMemory
) -> None:
    """Bring back what a session was registered for and which numbered verbs it has had."""
    for query in saved.queries:
        board.recall(query)
    for header in saved.headers:
        prepositions.declare(header)
    for one in saved.numbers:
        memory.recall((one.writer, one.sequence), one.digest, saved.session_id, one.version)


def registered(board: FlashBoard, prepositions: Prepositions) -> dict[str, Any]:
    """Return what a session was registered for, with gates, as json can write it."""
    return {
        "questions": [
            [
                query.flash_id, journal_rows.question_to_json(query.question), query.risk,
                journal_rows.gates_to_bytes(query).hex(),
            ]
            for query in board.queries
        ],
        "headers": [journal_rows.entry_to_json(header) for header in prepositions.declared],
    }  # fmt: skip


def register(saved: dict[str, Any], board: FlashBoard, prepositions: Prepositions) -> None:
    """Bring back what `registered` returned.

    Raises:
      SnapshotError: it did not return this.
    """
    try:
        for flash_id, question, risk, gates in saved["questions"]:
            asked = journal_rows.question_from_json(question)
            board.recall(journal_rows.query_of(flash_id, asked, risk, bytes.fromhex(gates)))
        for header in saved["headers"]:
            prepositions.declare(journal_rows.entry_from_json(header))
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise SnapshotError(f"snapshot: its registrations are damaged: {error}") from error
