"""Where sessions wait that nobody asks: host memory, then disk.

A session's pages that nobody else sees leave the pool and come back on fresh ones, bit by bit the
same: its entries keep everything but their page numbers. Pages that others see stay. It happens by
itself where pages lack, to the session that was not of use for longest, and never to one that a
verb is running on. What came back from host memory stays there as a copy until others need the
room.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import os
import pathlib
import zlib
from collections.abc import Mapping
from typing import Literal

import numpy as np

from jaxstate import host_copies
from jaxstate.errors import CapacityError, PoolFullError, SnapshotError
from jaxstate.executor import Executor
from jaxstate.host_copies import HostCopy
from jaxstate.page_copy import PAGES_AT_ONCE
from jaxstate.pages import Entry, Pages, cells_used
from jaxstate.prefix_tree import PrefixTree
from jaxstate.repack import Parts, Repacking, repacking
from jaxstate.session import Session

Tier = Literal["host", "disk"]


@dataclasses.dataclass(kw_only=True, eq=False)
class Stored:
    """Cells of a session that are not in the pool; without parts and path they are lost.

    Attributes:
      entries: the whole table as it was.
      pages: those of its pages that are stored, in the order of their content.
      parts: their content in host memory, see Executor.store_pages.
      path: the file that holds it.
      num_bytes: of the content.
    """

    entries: tuple[Entry, ...]
    pages: tuple[int, ...]
    parts: Parts | None
    path: pathlib.Path | None = None
    num_bytes: int

    @property
    def is_lost(self) -> bool:
        """Whether they have to be computed anew."""
        return self.parts is None and self.path is None


class Tiers:
    """Moves sessions out of the pool and back; `Pages.spare` of an engine."""

    def __init__(
        self,
        executor: Executor,
        pages: Pages,
        sessions: Mapping[str, Session],
        kept: PrefixTree,
    ):
        """Start with everything in the pool.

        Args:
          kept: what is given back before any session moves.
        """
        config = executor.config
        self.host_limit = config.host_bytes
        self.swap_dir = pathlib.Path(config.swap_dir) if config.swap_dir else None
        self.moved_out = 0
        self.repacked = 0
        self.brought_back = 0
        self._executor = executor
        self._pages = pages
        self._sessions = sessions
        self._kept = kept
        self._clock = itertools.count(1)
        self._names = itertools.count(1)
        if self.swap_dir:
            self.swap_dir.mkdir(parents=True, exist_ok=True)
        pages.spare = self

    def touch(self, session: Session) -> None:
        """Note that a session is of use."""
        session.used = next(self._clock)

    def bytes_held(self, tier: Tier) -> int:
        """Bytes of sessions' cells in a tier."""
        return sum(
            stored.num_bytes
            for session in self._sessions.values()
            if (stored := session.stored) and (stored.path is None) == (tier == "host")
        )

    @property
    def copied_bytes(self) -> int:
        """Bytes of host memory that hold copies of cells in the pool; they go before any other."""
        return sum(map(self._copied_bytes, self._sessions.values()))

    # As a spare of Pages

    def num_reclaimable(self, going: Mapping[int, int], enough: float) -> int:
        """See pages.Spare; exactly what `reclaim` can do, since verbs are refused by it."""
        given_up = self._kept.references + collections.Counter(going)
        for session in self._sessions.values():
            given_up.update(_references_of_paid(session))
        left = math.inf if self.swap_dir else self.host_limit - self.bytes_held("host")
        gained = self._pages.num_freed(given_up)
        for session in self._idle():
            if gained >= enough:
                break
            own = self._own_pages(session, given_up)
            size = len(own) * self._page_bytes
            if size <= left:
                left -= size
                gained += len(own)
            else:
                gained += self._repacking(session, own).gain
        return gained

    def reclaim(self, count: int) -> None:
        """Give pages back until `count` are free.

        First what is kept, then paid tails: they are worth less than what anybody asks for now.
        Then sessions move out, and those that stay are repacked.
        """
        self._kept.reclaim(count)
        for session in sorted(self._sessions.values(), key=lambda one: one.used):
            if self._pages.num_free < count:
                self.forget_paid(session)
        for session in self._idle():
            if self._pages.num_free >= count:
                return
            size = len(self._own_pages(session, {})) * self._page_bytes
            fits = self._make_room(size, session)
            if size and (fits or self.swap_dir):
                self.move_out(session, "host" if fits else "disk")
        for session in self._idle():
            if self._pages.num_free < count:
                self.repack(session)

    # Within the pool

    def is_scattered(self, session: Session) -> bool:
        """Whether more than a quarter of a session's cells are dead, and repacking helps."""
        held = len({entry.page for entry in session.entries}) * self._pages.page_size
        if 4 * (held - cells_used(session.entries)) <= held:
            return False
        own = self._own_pages(session, _references_of_paid(session))
        return self._repacking(session, own).gain > 0

    def repack(self, session: Session) -> int:
        """Move the cells of a session's part-filled pages together; return how many pages it freed.

        Paid tails go on behind it. Cells that others see stay where they are, and so do all of an
        engine with a selector, which knows blocks of cells by their place.
        """
        own = self._own_pages(session, _references_of_paid(session))
        found = self._repacking(session, own)
        if found.gain < 1:
            return 0
        parts = found.content(list(self._executor.read_pages(found.old_pages)))
        behind = [paid.entries[len(session.entries) :] for paid in session.paid]
        holders = [session, *session.paid]
        old = set(found.old_pages)
        for one in holders:
            self._pages.drop(entry for entry in one.entries if entry.page in old)
            one.entries = tuple(entry for entry in one.entries if entry.page not in old)
        pages = self._pages.allocate(session.owner, found.num_pages, after=None, growing=True)
        try:
            self._executor.write_pages(pages, parts)
        except BaseException:
            self._pages.release_unused(pages)
            self.forget_paid(session)
            if session.stored is None:
                self.lose(session)
            raise
        new = set(pages)
        session.entries = found.table(pages)
        for paid, tail in zip(session.paid, behind, strict=True):
            paid.entries = (*session.entries, *tail)
        for _ in holders:
            self._pages.hold(entry for entry in session.entries if entry.page in new)
        self.repacked += 1
        return found.gain

    def forget_paid(self, session: Session) -> None:
        """Give back what was forwarded ahead of questions."""
        for paid in session.paid:
            self._pages.drop(paid.entries)
        session.paid.clear()

    # Out and back

    def move_out(self, session: Session, tier: Tier) -> None:
        """Move a session that nothing runs on out of the pool, or from host memory to disk.

        Raises:
          CapacityError: there is no such tier, or host memory's limit is reached.
        """
        if tier == "disk" and self.swap_dir is None:
            raise CapacityError("tier: expected host, got disk; start with a swap_dir")
        stored = session.stored
        if stored is None:
            self.forget_paid(session)
            own = self._own_pages(session, {})
            size = len(own) * self._page_bytes
            if tier == "host" and not self._make_room(size, session):
                raise CapacityError(
                    f"host_bytes: {size} more are needed, {self.bytes_held('host')} of "
                    f"{self.host_limit} are in use; start with more, or with a swap_dir"
                )
            kept, parts = host_copies.unchanged(self._pages, own, session.copy)
            session.copy = None  # what changed leaves host memory before it is copied there
            rest = sorted(own.keys() - set(kept))
            parts += self._executor.store_pages(rest)
            stored = Stored(
                entries=session.entries, pages=(*kept, *rest), num_bytes=size, parts=parts
            )
            self._pages.drop(entry for entry in session.entries if entry.page in own)
            session.entries = tuple(entry for entry in session.entries if entry.page not in own)
            session.stored = stored
            self.moved_out += 1
        if tier == "disk" and stored.parts is not None:
            self._write(stored)

    def bring_back(self, session: Session, beside: int = 0) -> None:
        """Bring a session's cells back into the pool, if they are not there.

        Others may take their room in host memory meanwhile, which is over its limit by so much
        until they have changed places.

        Args:
          beside: pages that it comes back for; without room for them it stays where it is.
        Raises:
          CapacityError, PoolFullError: there is no room, see Pages.require; nothing has changed.
          SnapshotError: its file is missing or damaged: `lose` them. They are not lost already.
          PoolLostError: it failed on the device.
        """
        stored: Stored | None = session.stored
        if stored is None:
            return
        parts = stored.parts if stored.parts is not None else self._read(stored, session)
        session.stored = None
        count = len(stored.pages)
        new: list[int] = []
        try:
            self._pages.require(count + beside, (), staying=session.entries)
            new = self._pages.allocate(session.owner, count, after=None, growing=True)
            # Neighbours stay neighbours, whichever parts they are in.
            moved = dict(zip(sorted(stored.pages), new, strict=True))
            self._executor.write_pages([moved[page] for page in stored.pages], parts)
        except BaseException:
            self._pages.release_unused(new)
            if session.stored is None:
                session.stored = stored
            else:  # the pool was lost, and with it what others see as well
                _remove_file(stored)
            raise
        table = [
            Entry(moved.get(page, page), first, fill, base, shift)
            for page, first, fill, base, shift in stored.entries
        ]
        came = set(new)
        self._pages.hold(entry for entry in table if entry.page in came)
        session.entries = tuple(table)
        _remove_file(stored)
        if stored.parts is not None:
            stamps = {moved[page]: self._pages.stamp(moved[page]) for page in stored.pages}
            session.copy = HostCopy(stamps=stamps, parts=parts)
            self._drop_copies(self.host_limit)
        self.brought_back += 1

    def discard(self, session: Session) -> None:
        """Forget what is stored of a session."""
        if session.stored:
            _remove_file(session.stored)
        session.stored = session.copy = None

    def lose(self, session: Session) -> None:
        """Note that what is stored of a session is worth nothing."""
        self.discard(session)
        self._pages.drop(session.entries)
        session.entries = ()
        session.stored = Stored(entries=(), pages=(), parts=None, num_bytes=0)

    # Inside

    @property
    def _page_bytes(self) -> int:
        return self._pages.page_size * self._executor.model.bytes_per_cell

    def _make_room(self, size: int, moving: Session) -> bool:
        """Make room in host memory for `size` bytes of a session that moves: whether they fit.

        Copies go, and as far as there is a disk, others' cells.
        """
        held = 0 if self.swap_dir else self.bytes_held("host")
        if size + held > self.host_limit:
            return False
        self._drop_copies(self.host_limit - size, moving)
        in_host = [
            one for one in self._sessions.values() if one.stored and one.stored.parts is not None
        ]
        for session in sorted(in_host, key=lambda one: one.used):
            if self.swap_dir is None or self.bytes_held("host") + size <= self.host_limit:
                break
            assert session.stored is not None
            self._write(session.stored)
        return self.bytes_held("host") + size <= self.host_limit

    def _drop_copies(self, limit: int, moving: Session | None = None) -> None:
        """Drop copies until host memory holds no more than `limit`, as far as they are in the way.

        Whoever was of use last moves out last, and may have changed by then: its copy goes first.

        Args:
          moving: whose copy is about to become its cells; it counts as these.
        """
        copied = [one for one in self._sessions.values() if one.copy and one is not moving]
        over = self.bytes_held("host") + sum(map(self._copied_bytes, copied)) - limit
        for session in sorted(copied, key=lambda one: one.used, reverse=True):
            if over <= 0:
                return
            over -= self._copied_bytes(session)
            session.copy = None

    def _copied_bytes(self, session: Session) -> int:
        return len(session.copy.stamps) * self._page_bytes if session.copy else 0

    def _idle(self) -> list[Session]:
        """Sessions whose cells may move, longest unused first."""
        found = [
            session
            for session in self._sessions.values()
            if not session.running and session.stored is None and session.entries
        ]
        return sorted(found, key=lambda session: session.used)

    def _own_pages(self, session: Session, beside: Mapping[int, int]) -> collections.Counter[int]:
        """Pages that nobody sees but a session, how often, and `beside` so often besides."""
        seen = collections.Counter(entry.page for entry in session.entries)
        for page, times in list(seen.items()):
            if self._pages.header(page).references != times + beside.get(page, 0):
                del seen[page]
        return seen

    def _repacking(self, session: Session, own: Mapping[int, int]) -> Repacking:
        movable = {} if self._executor.config.selector else own
        return repacking(session.entries, movable, self._pages.page_size)

    def _write(self, stored: Stored) -> None:
        """Write a session's cells to a file of its own: aside, then renamed.

        Raises:
          PoolFullError: the disk takes no more; they stay in host memory.
        """
        assert self.swap_dir is not None and stored.parts is not None
        path = self.swap_dir / f"{os.getpid()}-{next(self._names)}.kv"
        aside = path.with_suffix(".part")
        checksum = 0
        try:
            with aside.open("wb") as file:
                file.write(bytes(64))
                for part in stored.parts:
                    for array in part:
                        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1).data
                        checksum = zlib.crc32(data, checksum)
                        file.write(data)
                file.seek(0)
                header = {"bytes": file.seek(0, os.SEEK_END) - 64, "crc32": checksum}
                file.seek(0)
                file.write(json.dumps(header).encode().ljust(64))
            os.replace(aside, path)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise PoolFullError(
                f"swap_dir {self.swap_dir}: what the pool has no room for cannot be written: "
                f"{error.strerror or error}; free space or repair the disk"
            ) from error
        stored.path, stored.parts = path, None

    def _read(self, stored: Stored, session: Session) -> Parts:
        """Read a session's cells; SnapshotError if that cannot be what was written."""
        name = f"session {session.session_id}"
        assert stored.path is not None
        shapes = self._executor.page_shapes
        try:
            whole = np.fromfile(stored.path, np.uint8)
            header = json.loads(whole[:64].tobytes())
            checksum = zlib.crc32(whole[64:].data)
        except (OSError, ValueError) as error:
            raise SnapshotError(f"{name}: {stored.path} cannot be read: {error}") from error
        if header != {"bytes": len(whole) - 64, "crc32": checksum}:
            raise SnapshotError(f"{name}: {stored.path} is damaged; its cells are to be rebuilt")
        parts: Parts = []
        at = 64
        for _ in range(-(-len(stored.pages) // PAGES_AT_ONCE)):
            part = []
            for shape, dtype in shapes:
                size = int(np.prod(shape)) * dtype.itemsize
                part.append(whole[at : at + size].view(dtype).reshape(shape))
                at += size
            parts.append(part)
        return parts


def _references_of_paid(session: Session) -> collections.Counter[int]:
    """Count the references of a session's paid tails by page: its own table, and theirs behind."""
    if not session.paid:
        return collections.Counter()
    count = len(session.entries)
    table = collections.Counter(entry.page for entry in session.entries)
    found = collections.Counter({page: n * len(session.paid) for page, n in table.items()})
    for paid in session.paid:
        found.update(entry.page for entry in paid.entries[count:])
    return found


def _remove_file(stored: Stored) -> None:
    if stored.path:
        stored.path.unlink(missing_ok=True)
