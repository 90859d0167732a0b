"""Sessions of an engine saved and restored with Orbax, whatever the page size and device count.

A snapshot holds a session's cells in order of position, the shift of each, its tokens and what the
host knows of it. It is written aside, read back, and then renamed: what has its name is whole.

    snapshot = take(engine.verbs, engine.session(name), fingerprint=model.fingerprint)
    write(path, snapshot)
    put(engine.verbs, read(path, engine.verbs, fingerprint=model.fingerprint), "copy")
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pathlib
import re
import secrets
import shutil
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxstate import cell_copy
from jaxstate.cell_copy import Cells
from jaxstate.errors import (
    ForeignSnapshotError,
    SessionError,
    SnapshotError,
    SnapshotExistsError,
    SnapshotSpaceError,
)
from jaxstate.session import Session
from jaxstate.verbs import Verbs

FORMAT = 1
ASIDE = ".part"  # ends the name of what is being written or removed
_ARRAYS = "arrays"
_ABOUT = "about.json"
_FIELDS = (
    "session_id", "tenant", "when_full", "frozen_len", "evicted", "stream_floor", "version",
    "rebuilt",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionSnapshot:
    """A session as it was.

    Attributes:
      fields: of its record, see Session.
      token_ids: frozen and kept stream tokens.
      shifts: [tokens] int32, see pages.Entry.
      cells: keys and values by layer, see cell_copy.
      fingerprint: of the model that computed them.
      registered: what else belongs to it, as json.
    """

    fields: dict[str, Any]
    token_ids: np.ndarray
    shifts: np.ndarray
    cells: Cells
    fingerprint: str
    registered: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def version(self) -> int:
        """The session's."""
        return self.fields["version"]

    def record(self) -> Session:
        """Return its record, without cells and with an owner of no meaning."""
        session = Session(owner=-1, token_ids=self.token_ids.tolist(), **self.fields)
        session.saved_len = session.stream_len
        return session


def take(
    verbs: Verbs, session: Session, *, fingerprint: str, registered: dict[str, Any] | None = None
) -> SessionSnapshot:
    """Copy a session whose cells are in the pool.

    Raises:
      SessionError: they are not.
    """
    if session.stored is not None:
        raise SessionError(
            f"session {session.session_id}: its cells are not in the pool; ask it something first"
        )
    cells, shifts = cell_copy.take(verbs.executor, session.entries)
    return SessionSnapshot(
        fields={name: getattr(session, name) for name in _FIELDS},
        token_ids=np.asarray(session.token_ids, np.int32), shifts=shifts, cells=cells,
        fingerprint=fingerprint, registered=registered or {},
    )  # fmt: skip


def write(path: str | pathlib.Path, snapshot: SessionSnapshot) -> None:
    """Write a snapshot to a new directory: aside, then read back, then renamed.

    Raises:
      SnapshotExistsError: the directory is there already.
      SnapshotSpaceError: it cannot be written.
      SnapshotError: it does not hold what was written.
    """
    path = pathlib.Path(path).absolute()
    if path.exists():
        raise _taken(path)
    aside = aside_of(path)
    tree = _tree(snapshot)
    about: dict[str, Any] = {
        "format": FORMAT,
        "fingerprint": snapshot.fingerprint,
        "session": snapshot.fields,
        "context_len": len(snapshot.token_ids),
        "registered": snapshot.registered,
        "arrays": [_described(array) for array in jax.tree.leaves(tree)],
        "num_layers": len(snapshot.cells),
    }
    try:
        aside.mkdir(parents=True)
        _write_arrays(aside / _ARRAYS, tree)
        about["files"] = _files(aside / _ARRAYS)
        about["crc32"] = _checksum(about)
        (aside / _ABOUT).write_text(json.dumps(about))
        _check_arrays(_read_arrays(aside, about), about)
        _sync(aside)
        os.replace(aside, path)
        _sync_one(path.parent)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):  # another was written meanwhile
            raise _taken(path) from error
        raise SnapshotSpaceError(
            f"snapshot {path.name} cannot be written: {error.strerror or error}; free space or "
            "repair the disk"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def read(path: str | pathlib.Path, verbs: Verbs, *, fingerprint: str) -> SessionSnapshot:
    """Read and verify a snapshot; nothing of the engine is touched.

    Raises:
      ForeignSnapshotError: it is of another format, model or dtype, or longer than context_len.
      SnapshotError: there is none, or it is damaged.
    """
    path = pathlib.Path(path).absolute()
    about = read_about(path)
    for name, expected in (("format", FORMAT), ("fingerprint", fingerprint)):
        if about.get(name) != expected:
            raise ForeignSnapshotError(
                f"snapshot {path.name}: {name} expected {expected}, got {about.get(name)}; "
                "restore it with the model that it is of"
            )
    arrays = _read_arrays(path, about)
    count = about["context_len"]
    token_ids, shifts = arrays["token_ids"][:count], arrays["shifts"][:count]
    cells = [(keys[:, :count], values[:, :count]) for keys, values in arrays["cells"]]
    limit = verbs.config.context_len
    if len(token_ids) > limit:
        raise ForeignSnapshotError(
            f"snapshot {path.name}: expected at most context_len={limit} tokens, got "
            f"{len(token_ids)}; start with a longer context"
        )
    expected = cell_copy.described(verbs.model, len(token_ids))
    found = [[(array.shape, array.dtype) for array in layer] for layer in cells]
    if found != expected:
        raise ForeignSnapshotError(
            f"snapshot {path.name}: cells expected {expected[:1]} in {len(expected)} layers, got "
            f"{found[:1]} in {len(found)}; restore it with the dtype that it is of"
        )
    return SessionSnapshot(
        fields=about["session"], token_ids=token_ids, shifts=shifts, cells=cells,
        fingerprint=fingerprint, registered=about["registered"],
    )  # fmt: skip


def read_about(path: pathlib.Path) -> dict[str, Any]:
    """Read what a snapshot says of itself; its arrays are not looked at.

    Raises:
      SnapshotError: there is none, or that is damaged.
    """
    try:
        about = json.loads((path / _ABOUT).read_text())
        if about.pop("crc32") != _checksum(about):
            raise ValueError("its checksum is another")
    except FileNotFoundError:
        raise SnapshotError(
            f"{path.name} holds no finished snapshot ({_ABOUT} is missing)"
        ) from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise SnapshotError(f"snapshot {path.name}: {_ABOUT} is damaged: {error}") from error
    return about


def put(
    verbs: Verbs,
    snapshot: SessionSnapshot,
    session_id: str,
    end_verbs: Callable[[], None] | None = None,
) -> Session:
    """Open a session from a snapshot, or have it replace the one of this id, all or nothing.

    Args:
      end_verbs: ends what runs on the one that is replaced, called when nothing can go wrong any
        more; None = nothing may run on it.
    Raises:
      SessionError: a verb runs on the session that is to be replaced, or it is being created.
      PoolFullError: there is no room; nothing has changed.
    """
    live = verbs.sessions.get(session_id)
    if live is not None and live.running and end_verbs is None:
        raise SessionError(f"session {session_id}: {live.running} verbs run on it; wait")
    session = snapshot.record()
    session.session_id = session_id
    if live is not None:  # a version is of one state only
        session.version = max(session.version, live.version) + 1
    verbs.open_with(session, snapshot.cells, snapshot.shifts, end_verbs or (lambda: None))
    return session


def aside_of(path: pathlib.Path) -> pathlib.Path:
    """Return where something is made before it gets its path, or removed behind that."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{ASIDE}")


def _taken(path: pathlib.Path) -> SnapshotExistsError:
    return SnapshotExistsError(
        f"snapshot {path.name} exists already; choose another name or remove it"
    )


def _tree(snapshot: SessionSnapshot) -> dict[str, Any]:
    """Return what is written; of nothing one cell, since Orbax saves no empty arrays."""
    tree = {
        "token_ids": snapshot.token_ids,
        "shifts": snapshot.shifts,
        "cells": [list(layer) for layer in snapshot.cells],
    }
    if len(snapshot.token_ids):
        return tree
    return jax.tree.map(lambda array: np.zeros([n or 1 for n in array.shape], array.dtype), tree)


def _write_arrays(path: pathlib.Path, tree: dict[str, Any]) -> None:
    try:
        # Keys and values hardly get smaller, and take twice as long to be read.
        handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
    except ValueError as error:  # what a disk refuses comes as one, with the system's code in it
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


def _read_arrays(path: pathlib.Path, about: dict[str, Any]) -> dict[str, Any]:
    """Read the arrays of a snapshot as they were described; SnapshotError if they are not so.

    Files are looked at first: what reads the arrays does not take damage well.
    """
    try:
        files = _files(path / _ARRAYS)
    except OSError as error:
        raise SnapshotError(f"snapshot {path.name} cannot be read: {error}") from error
    for name in sorted({*files, *about["files"]}):
        expected, got = about["files"].get(name), files.get(name)
        if got != expected:
            raise SnapshotError(
                f"snapshot {path.name} is damaged: {name} expected bytes and crc32 {expected}, got "
                f"{got}"
            )
    leaves = [np.empty(shape, np.dtype(dtype)) for shape, dtype, _ in about["arrays"]]
    empty = {"token_ids": 0, "shifts": 0, "cells": [[0, 0] for _ in range(about["num_layers"])]}
    target = jax.tree.unflatten(jax.tree.structure(empty), leaves)
    how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), target)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        args = ocp.args.PyTreeRestore(item=target, restore_args=how)
        arrays = checkpointer.restore(path / _ARRAYS, args=args)
    return arrays


def _check_arrays(arrays: dict[str, Any], about: dict[str, Any]) -> None:
    """See that what was written can be read; later its files' checksums say as much."""
    found = [_described(array) for array in jax.tree.leaves(arrays)]
    if found != about["arrays"]:
        raise SnapshotError("what was read of a new snapshot is not what was written; write again")


def _files(directory: pathlib.Path) -> dict[str, list[int]]:
    """Size and CRC-32 of every file in a directory, by its path in there."""
    found = {}
    buffer = memoryview(bytearray(1 << 20))
    for path in directory.rglob("*"):
        if path.is_file():
            size, crc = 0, 0
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    size, crc = size + count, zlib.crc32(buffer[:count], crc)
            found[str(path.relative_to(directory))] = [size, crc]
    return found


def _described(array: np.ndarray) -> list[Any]:
    """Shape, dtype and CRC-32 of an array's bytes."""
    data = np.ascontiguousarray(array).view(np.uint8).reshape(-1).data
    return [list(array.shape), str(array.dtype), zlib.crc32(data)]


def _checksum(about: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _sync(directory: pathlib.Path) -> None:
    """Have the disk write a directory and all that is in it."""
    for path in directory.rglob("*"):
        _sync_one(path)
    _sync_one(directory)


def _sync_one(path: pathlib.Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
