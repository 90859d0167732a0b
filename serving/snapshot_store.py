"""Sessions that clients have saved by name, each tenant's in a directory of its own."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pathlib
import re
import secrets
import shutil
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator

from jaxstate import session_snapshot
from jaxstate.errors import (
    InputError,
    SnapshotError,
    SnapshotSpaceError,
    UnknownSnapshotError,
)
from jaxstate.serving import quotas
from jaxstate.serving.local_service import LocalService
from jaxstate.serving.quotas import Quota, QuotaOf

KEPT_FREE = 256 << 20
"""Bytes of the disk that snapshots leave free: without any, the journal beside them fails."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedSnapshot:
    """What there is of a saved session.

    Attributes:
      name: of the snapshot.
      session_id: what its tenant called the session when it was saved.
      version, context_len: the session's, then.
      size_bytes: on disk.
      saved_at: seconds since 1970.
    """

    name: str
    session_id: str
    version: int
    context_len: int
    size_bytes: int
    saved_at: float


class SnapshotStore:
    """A directory of snapshots; what a name stands for never changes."""

    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        fingerprint: str,
        quota_of: QuotaOf | None = None,
    ):
        """Use a directory, which is made if need be; what was left half done is removed.

        Args:
          fingerprint: of the model, `LoadedModel.fingerprint`.
          quota_of: of a tenant, as it is now; None = nobody has one.
        """
        self._quota_of = quota_of or (lambda tenant: Quota(max_snapshots=None))
        self._saving: collections.Counter[str] = collections.Counter()
        self._bytes_coming = 0  # of what is being saved
        self._lock = threading.Lock()  # of both, several calls save at once
        self._directory = pathlib.Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._fingerprint = fingerprint
        for left in self._directory.glob(f"*/*{session_snapshot.ASIDE}"):
            shutil.rmtree(left, ignore_errors=True)

    def save(
        self, service: LocalService, session_id: str, name: str = "", *, tenant: str = ""
    ) -> SavedSnapshot:
        """Save a session; see LocalService.snapshot.

        Args:
          name: "" = one that tells when it was saved.
        Raises:
          InputError: a name that is none.
          SnapshotExistsError: the name is taken.
          QuotaError: the tenant has as many as it may have.
          SnapshotSpaceError: it cannot be written, or would leave less than KEPT_FREE bytes free.
          SessionError: unknown, or its cells leave the pool as soon as they come.
        """
        if not name:
            name = time.strftime("%Y-%m-%dT%H.%M.%S", time.gmtime()) + f"-{secrets.token_hex(3)}"
        path = self._path(tenant, name)
        size = service.describe(session_id).context_len * service.model.bytes_per_cell
        with self._room(tenant, size):
            service.snapshot(session_id, path, fingerprint=self._fingerprint)
        return self._described(path)

    def restore(
        self,
        service: LocalService,
        name: str,
        *,
        session_id: str | None,
        tenant: str = "",
        unless: Callable[[], bool] | None = None,
    ) -> str:
        """Open a session from what was saved, or have it replace one; see LocalService.restore.

        Args:
          unless: nothing is restored where this is so when it could be.
        Raises:
          CancelledError: `unless` was so.
          InputError: a name that is none.
          UnknownSnapshotError: nothing has it.
          SnapshotError: it is damaged, or of another model.
          SessionError, PoolFullError: see LocalService.restore.
        """
        return service.restore(
            self._known(tenant, name), fingerprint=self._fingerprint, session_id=session_id,
            tenant=tenant, unless=unless,
        )  # fmt: skip

    def find(self, name: str, tenant: str = "") -> SavedSnapshot:
        """Return what there is of a saved session.

        Raises:
          InputError: a name that is none.
          UnknownSnapshotError: nothing has it.
          SnapshotError: it is damaged.
        """
        return self._described(self._known(tenant, name))

    def saved(self, *, tenant: str = "") -> tuple[list[SavedSnapshot], list[str]]:
        """Return a tenant's snapshots by name, and the names of those that are damaged."""
        found, damaged = [], []
        for path in sorted(self._of(tenant).glob("*")):
            if not _NAME.fullmatch(path.name) or path.name.endswith(session_snapshot.ASIDE):
                continue
            try:
                found.append(self._described(path))
            except (SnapshotError, FileNotFoundError):
                if path.exists():  # it was not deleted meanwhile
                    damaged.append(path.name)
        return found, damaged

    def delete(self, name: str, *, tenant: str = "") -> None:
        """Forget what was saved.

        Raises:
          InputError: a name that is none.
          UnknownSnapshotError: nothing has it.
        """
        path = self._known(tenant, name)
        aside = session_snapshot.aside_of(path)
        try:
            os.replace(path, aside)  # at once: no half of it is ever seen
        except FileNotFoundError:  # another was faster
            raise _unknown(name) from None
        shutil.rmtree(aside)

    @contextlib.contextmanager
    def _room(self, tenant: str, size: int) -> Iterator[None]:
        """Hold room for one more of so many bytes while it is saved."""
        with self._lock:
            aside = session_snapshot.ASIDE
            num_saved = sum(path.suffix != aside for path in self._of(tenant).glob("*"))
            quotas.check_limit(
                tenant, "max_snapshots", self._quota_of(tenant).max_snapshots,
                num_saved + self._saving[tenant], 1, what="snapshots", remedy="delete one",
            )  # fmt: skip
            free = shutil.disk_usage(self._directory).free - self._bytes_coming
            if free - size < KEPT_FREE:
                raise SnapshotSpaceError(
                    f"snapshot of about {size} bytes: expected {KEPT_FREE} to stay free on the "
                    f"disk, got {free} that are free now; delete snapshots or free space"
                )
            self._saving[tenant] += 1
            self._bytes_coming += size
        try:
            yield
        finally:
            with self._lock:
                self._saving[tenant] -= 1
                self._bytes_coming -= size

    def _of(self, tenant: str) -> pathlib.Path:
        return self._directory / f"tenant-{urllib.parse.quote(tenant, safe='')}"

    def _path(self, tenant: str, name: str) -> pathlib.Path:
        if not _NAME.fullmatch(name) or name.endswith(session_snapshot.ASIDE):
            raise InputError(
                f"name: expected up to 128 letters, digits, and . _ : -, and a letter or digit "
                f'first, not "{session_snapshot.ASIDE}" last, got {name!r}'
            )
        return self._of(tenant) / name

    def _known(self, tenant: str, name: str) -> pathlib.Path:
        path = self._path(tenant, name)
        if not path.is_dir():
            raise _unknown(name)
        return path

    def _described(self, path: pathlib.Path) -> SavedSnapshot:
        about = session_snapshot.read_about(path)
        fields = about["session"]
        return SavedSnapshot(
            name=path.name, session_id=fields["session_id"].rpartition("/")[2],
            version=fields["version"], context_len=about["context_len"],
            size_bytes=sum(size for size, _ in about["files"].values()),
            saved_at=path.stat().st_mtime,
        )  # fmt: skip


def _unknown(name: str) -> UnknownSnapshotError:
    return UnknownSnapshotError(f"snapshot {name} is unknown; see ListSnapshots")
