"""What a service must not lose, in an embedded SQLite database: a change is in it before its caller
is told that it is done.

    journal = Journal(path, durability="full", fingerprint=model.fingerprint)
    service = LocalService(engine, journal=journal)     # recovers what is in it

Changes gather and are written in one transaction per worker step. The database is in WAL mode and
locked for this process. Every row has a checksum, the changes of a session are a chain of versions,
and beside the database lies the number of the newest transaction that anybody was told of: what was
damaged or cut off is noticed when it is read.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import pathlib
import sqlite3
import struct
import zlib
from typing import Any, Literal

from jaxstate.errors import ForeignSnapshotError, JournalError, SnapshotError
from jaxstate.flash import FlashQuery
from jaxstate.prepositioning import Entry
from jaxstate.serving import journal_rows
from jaxstate.serving.journal_rows import NumberedWrite, SavedSession, Tokens
from jaxstate.serving.write_memory import REMEMBERED, Number
from jaxstate.session import Change, Session

logger = logging.getLogger(__name__)

Durability = Literal["full", "normal", "off"]
"""full: the disk has a change before its caller is told, power may fail. normal: the operating
system has it, so that a killed process loses nothing. off: there is no journal."""

FORMAT = 1
FOLD = 512  # changes of a session that are kept one by one before they become its row

_TABLES = {
    "about": ("name TEXT PRIMARY KEY", "value"),
    "sessions": (
        "session_id TEXT PRIMARY KEY", "tenant", "when_full", "frozen", "stream", "evicted",
        "stream_floor", "version", "rebuilt",
    ),
    "changes": (
        "session_id TEXT", "version INTEGER", "begin", "evicted", "stream_floor", "rebuilt",
        "tokens", "PRIMARY KEY (session_id, version)",
    ),
    "numbers": (
        "session_id TEXT", "writer TEXT", "sequence INTEGER", "digest", "version",
        "PRIMARY KEY (session_id, writer, sequence)",
    ),
    "questions": (
        "session_id TEXT", "flash_id INTEGER", "question", "risk", "gates",
        "PRIMARY KEY (session_id, flash_id)",
    ),
    "headers": (
        "session_id TEXT", "tokens BLOB", "entry", "PRIMARY KEY (session_id, tokens)",
    ),
    "snapshots": ("session_id TEXT PRIMARY KEY", "name"),
}  # fmt: skip
_OF_SESSIONS = ("sessions", "changes", "numbers", "questions", "headers", "snapshots")
_WITNESS = struct.Struct("<QI")


class Journal:
    """Owned by one thread at a time; whoever opens it reads it first, then writes."""

    def __init__(self, path: str | pathlib.Path, *, durability: Durability, fingerprint: str):
        """Open a journal, or begin one.

        Args:
          fingerprint: of the model, `LoadedModel.fingerprint`: tokens of another mean nothing here.
        Raises:
          ValueError: durability "off" has no journal; pass none.
          JournalError: another process uses it, or it cannot be opened.
          ForeignSnapshotError: it is of another model or format.
          SnapshotError: it is damaged, or has lost what somebody was told of.
        """
        if durability not in ("full", "normal"):
            raise ValueError(f'durability: expected "full" or "normal", got "{durability}"')
        self.path = pathlib.Path(path)
        self._witness = self.path.with_name(self.path.name + ".acknowledged")
        self._pending: list[tuple[str, tuple]] = []
        self._changes: collections.Counter[str] = collections.Counter()  # since the session's row
        self._transactions = 0
        self._failure: Exception | None = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._database = sqlite3.connect(
                self.path, isolation_level=None, check_same_thread=False, timeout=0.5
            )
        except sqlite3.Error as error:
            raise JournalError(f"journal {self.path}: cannot be opened: {error}") from error
        try:
            self._open(durability, fingerprint)
        except BaseException:
            self._database.close()
            raise

    def _open(self, durability: Durability, fingerprint: str) -> None:
        with self._reading():
            self._run("PRAGMA locking_mode = EXCLUSIVE")
            self._run("PRAGMA journal_mode = WAL")
            self._run(f"PRAGMA synchronous = {durability.upper()}")
            self._run("BEGIN IMMEDIATE")
            is_new = not self._run("SELECT 1 FROM sqlite_master").fetchone()
            if is_new:
                for table, columns in _TABLES.items():
                    keys = [one for one in columns if one.startswith("PRIMARY")]
                    fields = ", ".join([*columns[: len(columns) - len(keys)], "crc", *keys])
                    self._run(f"CREATE TABLE {table} ({fields})")
                for about in (("format", FORMAT), ("fingerprint", fingerprint), ("written", 0)):
                    self._run(*_put("about", *about))
            self._run("COMMIT")
            found = self._run("PRAGMA integrity_check").fetchone()[0]
        if found != "ok":
            raise self._damaged(found)
        about = dict(self._rows("about"))
        for name, expected in (("format", FORMAT), ("fingerprint", fingerprint)):
            if about.get(name) != expected:
                raise ForeignSnapshotError(
                    f"journal {self.path}: {name} expected {expected}, got {about.get(name)}; "
                    "start it with the model that it is of, or begin another journal"
                )
        self._transactions = about.get("written", -1)
        told = self._told()
        if told is not None and told > self._transactions:
            raise SnapshotError(
                f"journal {self.path}: transaction {told} was acknowledged, the newest there is "
                f"{self._transactions}; restore a copy, or remove {self._witness} to go on without"
            )

    # Reading

    def read(self, session_id: str | None = None) -> list[SavedSession]:
        """Return the sessions as they were last, or one of them, every row checked.

        Raises:
          SnapshotError: it is damaged.
        """
        with self._reading():
            found = {row[0]: _session(row) for row in self._rows("sessions", session_id)}
            rows = self._rows("changes", session_id)
            for name, version, begin, evicted, floor, rebuilt, ids in rows:
                change = Change(
                    version=version, begin=begin, evicted=evicted, stream_floor=floor,
                    rebuilt=bool(rebuilt), token_ids=journal_rows.unpack_ids(ids),
                )  # fmt: skip
                found[name].tokens.apply(change, f"journal {self.path}, session {name}")
                found[name].changes.append(change)
            for name, writer, sequence, digest, version in self._rows("numbers", session_id):
                found[name].numbers.append(
                    NumberedWrite(writer=writer, sequence=sequence, digest=digest, version=version)
                )
            for name, flash_id, question, risk, gates in self._rows("questions", session_id):
                found[name].last_flash_id = flash_id
                if question is None:
                    continue
                asked = journal_rows.question_from_json(question)
                query = journal_rows.query_of(flash_id, asked, risk, gates)
                found[name].queries.append(query)
            for name, _, entry in self._rows("headers", session_id):
                found[name].headers.append(journal_rows.entry_from_json(entry))
            for name, snapshot in self._rows("snapshots", session_id):
                found[name].snapshot = snapshot
            for name, session in found.items():
                self._changes[name] = len(session.changes)
        return list(found.values())

    # Writing; all of it is written by the next commit

    def create(self, session: Session) -> None:
        """Note a session, whatever it starts with; of one that was there its numbers stay."""
        for table in ("questions", "headers", "snapshots"):
            self._forget(table, session.session_id)
        self._put_session(session)

    def close_session(self, session_id: str) -> None:
        """Forget a session."""
        for table in _OF_SESSIONS:
            self._forget(table, session_id)
        self._changes.pop(session_id, None)

    def change(self, session: Session) -> None:
        """Note what a session has become; its `saved_len` says what of it is known."""
        name = session.session_id
        self._changes[name] += 1
        if self._changes[name] >= FOLD:
            self._put_session(session)
            return
        new = session.token_ids[session.frozen_len + session.saved_len - session.evicted :]
        self._pending.append(
            _put(
                "changes", name, session.version, session.saved_len, session.evicted,
                session.stream_floor, int(session.rebuilt), journal_rows.pack_ids(new),
            )
        )  # fmt: skip
        session.saved_len = session.stream_len

    def number(self, session_id: str, number: Number, digest: bytes, version: int) -> None:
        """Note a numbered verb beside the change that it made."""
        self._pending.append(_put("numbers", session_id, *number, digest, version))

    def question(self, session_id: str, query: FlashQuery) -> None:
        """Note a registered question, and what its gates have become."""
        question = journal_rows.question_to_json(query.question)
        gates = journal_rows.gates_to_bytes(query)
        self._pending.append(
            _put("questions", session_id, query.flash_id, question, query.risk, gates)
        )

    def unregister(self, session_id: str, flash_id: int) -> None:
        """Forget a registered question; the highest id stays, so that no other gets it."""
        self._pending.append(_put("questions", session_id, flash_id, None, None, None))
        self._pending.append(
            (
                "DELETE FROM questions WHERE session_id = ?1 AND question IS NULL AND flash_id < "
                "(SELECT MAX(flash_id) FROM questions WHERE session_id = ?1)",
                (session_id,),
            )
        )

    def declare(self, session_id: str, entry: Entry) -> None:
        """Note a declared header."""
        tokens = journal_rows.pack_ids(entry.token_ids)
        self._pending.append(_put("headers", session_id, tokens, journal_rows.entry_to_json(entry)))

    def snapshot(self, session_id: str, name: str) -> None:
        """Note a session's newest snapshot."""
        self._pending.append(_put("snapshots", session_id, name))

    def commit(self) -> None:
        """Write what was noted, all of it or nothing.

        Raises:
          JournalError: it could not be written; from now on nothing is.
        """
        if self._failure is not None:
            raise JournalError(f"{self._failure}; restart the service") from self._failure
        if not self._pending:
            return
        number = self._transactions + 1
        try:
            self._run("BEGIN IMMEDIATE")
            for statement in self._pending:
                self._run(*statement)
            self._run(*_put("about", "written", number))
            self._run("COMMIT")
            self._tell(number)
        except (sqlite3.Error, OSError) as error:
            self._failure = error
            failure = JournalError(
                f"journal {self.path}: {len(self._pending)} changes could not be written: {error}; "
                "free space or repair the disk, and restart the service"
            )
            logger.error("%s", failure)  # clients are not told of files
            raise failure from error
        self._transactions = number
        self._pending.clear()

    def close(self) -> None:
        """Close the file; what was not committed is lost."""
        self._database.close()

    # Inside

    def _put_session(self, session: Session) -> None:
        """Make all that a session is its row, and forget the changes that led there."""
        name, tokens = session.session_id, Tokens.of(session)
        self._forget("changes", name)
        self._pending.append(
            _put(
                "sessions", name, session.tenant, session.when_full,
                journal_rows.pack_ids(tokens.frozen), journal_rows.pack_ids(tokens.stream),
                tokens.evicted, tokens.stream_floor, tokens.version, int(tokens.rebuilt),
            )
        )  # fmt: skip
        # The highest number of every writer stays, however old.
        self._pending.append(
            (
                "DELETE FROM numbers WHERE session_id = ?1 AND rowid NOT IN (SELECT rowid FROM "
                "numbers WHERE session_id = ?1 ORDER BY rowid DESC LIMIT ?2) AND sequence < "
                "(SELECT MAX(sequence) FROM numbers AS other WHERE other.session_id = ?1 AND "
                "other.writer = numbers.writer)",
                (name, REMEMBERED),
            )
        )
        self._changes[name] = 0
        session.saved_len = session.stream_len

    def _forget(self, table: str, session_id: str) -> None:
        self._pending.append((f"DELETE FROM {table} WHERE session_id = ?", (session_id,)))

    def _run(self, statement: str, values: tuple = ()) -> sqlite3.Cursor:
        return self._database.execute(statement, values)

    def _rows(self, table: str, session_id: str | None = None) -> list[tuple[Any, ...]]:
        """Read a table, or what of it is a session's, in the order in which it was written.

        Without the checksums.
        """
        order = {"changes": "version", "questions": "flash_id"}.get(table, "rowid")
        where = "" if session_id is None else "WHERE session_id = ?"
        values = () if session_id is None else (session_id,)
        rows = self._run(f"SELECT * FROM {table} {where} ORDER BY {order}", values).fetchall()
        for index, (*row, crc) in enumerate(rows):
            if crc != journal_rows.checksum(row):
                raise self._damaged(f"row {index} of {table} is not what was written")
        return [row[:-1] for row in rows]

    @contextlib.contextmanager
    def _reading(self):
        """Say of what cannot be read that it is damaged."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise JournalError(
                    f"journal {self.path}: another process uses it; stop that one first"
                ) from error
            raise self._damaged(error) from error
        except (sqlite3.Error, KeyError, ValueError, TypeError, zlib.error) as error:
            raise self._damaged(error) from error

    def _damaged(self, why: object) -> SnapshotError:
        return SnapshotError(f"journal {self.path} is damaged: {why}; restore a copy of it")

    def _tell(self, number: int) -> None:
        """Note beside the database that callers are going to be told of a transaction.

        It survives the process without being synchronised, and the disk may lag behind.
        """
        data = struct.pack("<Q", number)
        flags = os.O_WRONLY | os.O_CREAT
        handle = os.open(self._witness, flags, 0o600)
        try:
            os.pwrite(handle, _WITNESS.pack(number, zlib.crc32(data)), 0)
        finally:
            os.close(handle)

    def _told(self) -> int | None:
        """Read the newest transaction that somebody may have been told of, if that can be read."""
        try:
            number, crc = _WITNESS.unpack(self._witness.read_bytes())
        except (FileNotFoundError, struct.error):
            return None
        return number if crc == zlib.crc32(struct.pack("<Q", number)) else None


def _put(table: str, *values: Any) -> tuple[str, tuple]:
    """Return the statement that writes a row with its checksum, and what goes into it."""
    marks = ", ".join("?" * (len(values) + 1))
    return (
        f"INSERT OR REPLACE INTO {table} VALUES ({marks})",
        (*values, journal_rows.checksum(values)),
    )


def _session(row: tuple[Any, ...]) -> SavedSession:
    session_id, tenant, when_full, frozen, stream, evicted, floor, version, rebuilt = row
    tokens = Tokens(
        frozen=journal_rows.unpack_ids(frozen), stream=journal_rows.unpack_ids(stream),
        evicted=evicted, stream_floor=floor, version=version, rebuilt=bool(rebuilt),
    )  # fmt: skip
    return SavedSession(session_id=session_id, tenant=tenant, when_full=when_full, tokens=tokens)
