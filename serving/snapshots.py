"""Snapshots that a service takes of its sessions: once they have come to rest, and at its end."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import logging
import pathlib
import re
import secrets
import shutil
from collections.abc import Callable, Iterable

from jaxstate import session_snapshot
from jaxstate.errors import SnapshotError
from jaxstate.revival import Earlier
from jaxstate.serving.journal_rows import SavedSession
from jaxstate.session import Session
from jaxstate.session_snapshot import SessionSnapshot
from jaxstate.verbs import Verbs

logger = logging.getLogger(__name__)

_OURS = re.compile(r"[0-9a-f]{12}-\d+-[0-9a-f]{8}(\.|$)")  # a name that _write gives, or its aside


@dataclasses.dataclass(kw_only=True)
class _Rest:
    """A session's newest version that was seen, and since when it is so."""

    version: int
    since: float


class Snapshots:
    """A directory of snapshots; those that the journal names count, others are leftovers.

    Cells are copied by the worker between two steps and written by a thread of its own.
    """

    def __init__(self, directory: str | pathlib.Path, *, fingerprint: str, idle_s: float = 30.0):
        """Use a directory that belongs to one journal.

        Args:
          fingerprint: of the model, `LoadedModel.fingerprint`.
          idle_s: how long a session is to stay as it is before it is saved.
        """
        self._directory = pathlib.Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._fingerprint = fingerprint
        self._idle_s = idle_s
        self._rests: dict[str, _Rest] = {}
        self._saved: dict[str, int] = {}  # version of each session's newest, or of that under way
        self._names: dict[str, str] = {}
        self._writing: tuple[Session, concurrent.futures.Future[str]] | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jaxstate-snapshots")

    def recall(self, saved: Iterable[SavedSession]) -> None:
        """Take over what the journal names, and remove all else from the directory."""
        self._names = {one.session_id: one.snapshot for one in saved if one.snapshot}
        for path in self._directory.iterdir():
            if path.name not in self._names.values() and _OURS.match(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def earlier(self, saved: SavedSession, verbs: Verbs) -> Earlier | None:
        """Read a session's newest snapshot, if there is one, and what has changed since.

        Raises:
          SnapshotError: it is damaged, foreign, or older than what the journal keeps one by one.
        """
        if not saved.snapshot:
            return None
        path = self._directory / saved.snapshot
        snapshot = session_snapshot.read(path, verbs, fingerprint=self._fingerprint)
        past = snapshot.record()
        changes = [one for one in saved.changes if one.version > past.version]
        if past.version + len(changes) != saved.tokens.version:
            raise SnapshotError(f"snapshot {path}: not all changes since are kept one by one")
        self._saved[saved.session_id] = past.version
        return past, snapshot.cells, snapshot.shifts, changes

    def next_due(self, sessions: Iterable[Session], now: float) -> tuple[Session | None, float]:
        """Return a session that is to be saved now, or None and seconds until one may be."""
        soonest = float("inf")
        if self._writing is not None:
            return None, soonest
        for session in sessions:
            rest = self._rests.get(session.session_id)
            if rest is None or rest.version != session.version:
                rest = self._rests[session.session_id] = _Rest(version=session.version, since=now)
            if self._is_new(session):
                wait = rest.since + self._idle_s - now
                if wait <= 0:
                    return session, 0.0
                soonest = min(soonest, wait)
        return None, soonest

    def begin(self, verbs: Verbs, session: Session, then: Callable[[], None]) -> None:
        """Save a session in the background; `then` is called from the thread just before its end.

        See `end` for what comes of it. What cannot be saved is not tried again before it changes.
        """
        self._saved[session.session_id] = session.version
        snapshot = self._take(verbs, session)

        def write() -> str:
            try:
                return self._write(snapshot)
            finally:
                then()

        self._writing = session, self._thread.submit(write)

    def end(self) -> tuple[Session, str] | None:
        """Wait for what is being written; the next one may begin.

        Returns:
          the session and the snapshot's name, "" if it could not be written; None if nothing was.
        """
        if self._writing is None:
            return None
        (session, future), self._writing = self._writing, None
        return session, future.result()

    def save(self, verbs: Verbs, session: Session) -> str:
        """Save a session now if it has changed since it was saved; returns the snapshot's name."""
        return self._write(self._take(verbs, session)) if self._is_new(session) else ""

    def note(self, session_id: str, name: str) -> None:
        """Let go of a session's snapshot for a newer one that the journal names, or for none."""
        self.remove(self._names.pop(session_id, ""))
        if name:
            self._names[session_id] = name

    def remove(self, name: str) -> None:
        """Remove a snapshot that the journal does not name; "" = none."""
        if name:
            shutil.rmtree(self._directory / name, ignore_errors=True)

    def forget(self, session_id: str) -> None:
        """Remove what there is of a session that the journal does not know any more."""
        self.note(session_id, "")
        self._rests.pop(session_id, None)
        self._saved.pop(session_id, None)

    def close(self) -> None:
        """Wait for the thread."""
        self._thread.shutdown()

    def _is_new(self, session: Session) -> bool:
        """Whether a session can be saved and has changed since."""
        at_rest = not session.running and session.stored is None and session.context_len
        return bool(at_rest) and self._saved.get(session.session_id) != session.version

    def _take(self, verbs: Verbs, session: Session) -> SessionSnapshot | None:
        """Copy a session; None if that is not possible, which is logged."""
        try:
            return session_snapshot.take(verbs, session, fingerprint=self._fingerprint)
        except Exception as error:  # of memory, of the device: the session itself is well
            _log_unsaved(session.session_id, error)
            return None

    def _write(self, snapshot: SessionSnapshot | None) -> str:
        """Write a snapshot and return its name, or "" if that is not possible, which is logged."""
        if snapshot is None:
            return ""
        session_id = snapshot.fields["session_id"]
        digest = hashlib.sha256(session_id.encode()).hexdigest()[:12]
        name = f"{digest}-{snapshot.version}-{secrets.token_hex(4)}"
        try:
            session_snapshot.write(self._directory / name, snapshot)
        except Exception as error:  # whatever it is, the next one may succeed
            _log_unsaved(session_id, error)
            return ""
        return name


def _log_unsaved(session_id: str, error: Exception) -> None:
    logger.warning("session %s is not saved: %s", session_id, str(error) or repr(error))
