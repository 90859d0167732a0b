"""Pages of the pool on the host: who may write where, and which cells a table sees."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxstate.errors import CapacityError, PoolFullError


class Entry(NamedTuple):
    """Cells first … fill - 1 of a page, visible to whoever holds the entry.

    Cell i stands at position base + i (base may be negative); its key was rotated at
    base + i - shift.
    """

    page: int
    first: int
    fill: int
    base: int
    shift: int


@dataclasses.dataclass(slots=True)
class PageHeader:
    """Who may write a page, and from where on.

    Attributes:
      owner: the only one who may write; None once it is gone.
      high_water: cells below it may be seen by an entry of anybody.
      references: entries that point here.
      content: a number of its own for what stands below high_water; another one once that may have
        been overwritten.
    """

    owner: int | None
    high_water: int
    references: int
    content: int


Stamp = tuple[int, int]
"""While it is the same, so is what anybody can see of a page, once what is held is written.

A tail holds its cells before it writes them: a stamp is worth something where none is under way.
"""


class Spare(Protocol):
    """Holds pages that it can do without."""

    def num_reclaimable(self, going: Mapping[int, int], enough: float) -> int:
        """Count the pages that would be free without it, once `going` is dropped as well.

        Args:
          going: page to references that others are about to give up.
          enough: to be counted; with so many or more, it may say less than there are.
        """
        ...

    def reclaim(self, count: int) -> None:
        """Give pages back until `count` are free or none is left to give."""
        ...


class Pages:
    """Allocates pages and keeps their headers; no arrays, no device."""

    def __init__(self, num_pages: int, page_size: int):
        """Start with all pages free."""
        self.num_pages = num_pages
        self.page_size = page_size
        self._headers: dict[int, PageHeader] = {}
        self._contents = itertools.count()
        self._free = np.ones(num_pages, bool)
        self.spare: Spare | None = None

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return self.num_pages - len(self._headers)

    @property
    def num_available(self) -> int:
        """Pages that can be had: free ones, and those that are given back where they lack."""
        return self.num_to_be_had(math.inf)

    def num_to_be_had(self, enough: float, going: Mapping[int, int] | None = None) -> int:
        """Like num_available; of `enough` or more it counts no further, which is much faster.

        Args:
          going: see Spare.num_reclaimable.
        """
        free = self.num_free
        if free >= enough:
            return free
        if self.spare is None:
            return free + self.num_freed(going or {})
        return free + self.spare.num_reclaimable(going or {}, enough - free)

    def header(self, page: int) -> PageHeader:
        """Return the header of an allocated page."""
        return self._headers[page]

    def stamp(self, page: int) -> Stamp:
        """Tell the content of an allocated page from any other, of whichever page."""
        header = self._headers[page]
        return header.content, header.high_water

    def num_freed(self, going: Mapping[int, int]) -> int:
        """Count the pages that nobody holds once references are given up, by page."""
        return sum(self._headers[page].references == times for page, times in going.items())

    def owned_by(self, owner: int) -> list[int]:
        """Return the pages an owner may write."""
        return [page for page, header in self._headers.items() if header.owner == owner]

    def allocate(self, owner: int, count: int, *, after: int | None, growing: bool) -> list[int]:
        """Take free pages, neighbours where possible, in ascending order if they are.

        Attention reads neighbouring pages as one stretch, so a growing session continues right
        after its last page, a new one starts where it has most room, and short-lived tails take
        the tightest gap from its far end.

        Args:
          after: continue behind this page if it is free there.
          growing: the owner will come back for more.
        Raises:
          PoolFullError: fewer than `count` pages can be had; nothing was taken or given back.
        """
        if self.spare and self.num_free < count <= self.num_to_be_had(count):
            self.spare.reclaim(count)
        if count > self.num_free:
            raise PoolFullError(
                f"needs {count} pages of {self.page_size} cells, {self.num_available} of "
                f"{self.num_pages} can be had; close a session or start with more num_pages"
            )
        taken: list[int] = []
        while len(taken) < count:
            last = taken[-1] if taken else after
            if last is not None and last + 1 < self.num_pages and self._free[last + 1]:
                page = last + 1
            else:
                page = self._place(count - len(taken), growing)
            self._free[page] = False
            self._headers[page] = PageHeader(
                owner=owner, high_water=0, references=0, content=next(self._contents)
            )
            taken.append(page)
        return taken

    def _place(self, count: int, growing: bool) -> int:
        """Choose where a new stretch of pages starts."""
        runs = self._free_runs()
        if growing:
            start, length = max(runs, key=lambda run: run[1])
            if start == 0:
                return 0
            return start + min(length // 2, length - min(count, length))
        fitting = [run for run in runs if run[1] >= count]
        if not fitting:
            return max(runs, key=lambda run: run[1])[0]
        start, length = min(fitting, key=lambda run: run[1])
        return start + length - count

    def _free_runs(self) -> list[tuple[int, int]]:
        """Return (start, length) of every maximal stretch of free pages."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], self._free, [False]])))
        return [
            (int(start), int(end - start))
            for start, end in zip(edges[::2], edges[1::2], strict=True)
        ]

    def require(self, count: int, released: Sequence[Entry], *, staying: Sequence[Entry]) -> None:
        """Refuse if `count` pages cannot be had once a `released` table gives way to `staying`.

        Raises:
          CapacityError: they and what stays would not fit an empty pool.
          PoolFullError: says how many can be had now.
        """
        if count <= self.num_free:
            return
        least = -(-cells_used(staying) // self.page_size)
        if count + least > self.num_pages:
            raise CapacityError(
                f"needs {count} pages of {self.page_size} cells behind a context of {least}, the "
                f"pool has {self.num_pages}; ask for less or start with more num_pages"
            )
        going = collections.Counter(entry.page for entry in released)
        for entry in staying:
            going.pop(entry.page, None)
        there = self.num_to_be_had(count, going)
        if count > there:
            raise PoolFullError(
                f"needs {count} pages of {self.page_size} cells, {there} of "
                f"{self.num_pages} can be had; close a session or start with more num_pages"
            )

    def hold(self, entries: Iterable[Entry]) -> None:
        """Count a reference for each entry and raise high-water marks to their fills."""
        for entry in entries:
            header = self._headers[entry.page]
            header.references += 1
            header.high_water = max(header.high_water, entry.fill)

    def drop(self, entries: Iterable[Entry]) -> None:
        """Give back a reference for each entry; a page without any is free."""
        for entry in entries:
            header = self._headers[entry.page]
            header.references -= 1
            if header.references == 0:
                self._release(entry.page)

    def replace(self, old: Sequence[Entry], new: Sequence[Entry]) -> None:
        """Hold `new` and drop `old`, so that shared pages never fall free in between."""
        self.hold(new)
        self.drop(old)

    def release_unused(self, pages: Iterable[int]) -> None:
        """Free pages that were allocated but never held by an entry."""
        for page in pages:
            if self._headers[page].references == 0:
                self._release(page)

    def _release(self, page: int) -> None:
        del self._headers[page]
        self._free[page] = True

    def disown(self, owner: int, heir: int | None) -> None:
        """End an ownership: the heir may write from now on, or nobody."""
        for header in self._headers.values():
            if header.owner == owner:
                header.owner = heir

    def can_continue(self, entry: Entry, owner: int) -> bool:
        """Tell whether `owner`, who holds `entry`, may write the page's cell `entry.fill`."""
        header = self._headers[entry.page]
        if header.owner != owner or entry.fill >= self.page_size:
            return False
        # Where nobody else sees the page, what was cut off is free again.
        return header.references == 1 or header.high_water <= entry.fill

    def continue_at(self, entry: Entry) -> None:
        """Note that the page's cell `entry.fill` and following are about to be written."""
        header = self._headers[entry.page]
        if entry.fill < header.high_water:
            header.content = next(self._contents)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growth:
    """Where the next tokens of a table go; nothing is visible until `entries` replace the old.

    Attributes:
      cells: [tokens] int32, page * page_size + cell.
      shifts: [tokens] int32, see Entry.
      entries: the table with the new tokens in it.
      new_pages: pages allocated for it.
    """

    cells: np.ndarray
    shifts: np.ndarray
    entries: tuple[Entry, ...]
    new_pages: tuple[int, ...]


class _Span(NamedTuple):
    """Consecutive new tokens of one shift; the first `room` continue the table's last page."""

    count: int
    shift: int
    room: int


def _spans(
    pages: Pages, owner: int, entries: Sequence[Entry], position: int, shifts: np.ndarray
) -> list[_Span]:
    """Split new tokens where the shift changes, and see what the last page still takes."""
    edges = np.flatnonzero(np.diff(shifts)) + 1
    counts = np.diff(np.concatenate([[0], edges, [len(shifts)]]))
    spans = [
        _Span(count=int(count), shift=int(shifts[end - 1]), room=0)
        for count, end in zip(counts, np.cumsum(counts), strict=True)
    ]
    last = entries[-1] if entries else None
    if (
        last is not None
        and last.shift == spans[0].shift
        and last.base + last.fill == position
        and pages.can_continue(last, owner)
    ):
        room = min(spans[0].count, pages.page_size - last.fill)
        spans[0] = spans[0]._replace(room=room)
    return spans


def pages_needed(
    pages: Pages, owner: int, entries: Sequence[Entry], position: int, shifts: np.ndarray
) -> int:
    """Count the pages that `plan_growth` with the same arguments would allocate."""
    spans = _spans(pages, owner, entries, position, shifts)
    return sum(-(-(span.count - span.room) // pages.page_size) for span in spans)


def plan_growth(
    pages: Pages,
    owner: int,
    entries: Sequence[Entry],
    position: int,
    shifts: np.ndarray,
    *,
    growing: bool,
) -> Growth:
    """Find cells for the next tokens of a table, which stand at `position` and following.

    Args:
      owner: who writes; continues its last page where nobody sees the next cell.
      entries: the table so far.
      shifts: [tokens] int32, the shift of each new token; a new entry begins where it changes.
      growing: see Pages.allocate.
    Raises:
      PoolFullError: not enough free pages; nothing was taken.
    """
    size = pages.page_size
    spans = _spans(pages, owner, entries, position, shifts)
    grown = list(entries)
    fresh = iter(
        pages.allocate(
            owner,
            sum(-(-(span.count - span.room) // size) for span in spans),
            after=grown[-1].page if grown and growing else None,
            growing=growing,
        )
    )
    new_pages: list[int] = []
    cells: list[np.ndarray] = []
    for span in spans:
        if span.room:
            last = grown[-1]
            pages.continue_at(last)
            cells.append(last.page * size + last.fill + np.arange(span.room))
            grown[-1] = last._replace(fill=last.fill + span.room)
            position += span.room
        left = span.count - span.room
        while left > 0:
            page, fill = next(fresh), min(left, size)
            cells.append(page * size + np.arange(fill))
            grown.append(Entry(page=page, first=0, fill=fill, base=position, shift=span.shift))
            new_pages.append(page)
            left -= fill
            position += fill
    return Growth(
        cells=np.concatenate(cells).astype(np.int32),
        shifts=shifts.astype(np.int32),
        entries=tuple(grown),
        new_pages=tuple(new_pages),
    )


def cut_end(entries: Sequence[Entry], position: int) -> tuple[Entry, ...]:
    """Return the table without the cells at `position` and beyond."""
    kept = []
    for entry in entries:
        fill = min(entry.fill, position - entry.base)
        if fill > entry.first:
            kept.append(entry._replace(fill=fill))
    return tuple(kept)


def cut_middle(entries: Sequence[Entry], position: int, count: int) -> tuple[Entry, ...]:
    """Drop `count` positions from `position` on and close the gap; no key moves.

    Entries before the gap stay; those behind it come `count` positions closer, their keys'
    rotation accounted for by the shift.
    """
    kept = []
    for entry in entries:
        fill = min(entry.fill, position - entry.base)
        if fill > entry.first:
            kept.append(entry._replace(fill=fill))
        first = max(entry.first, position + count - entry.base)
        if first < entry.fill:
            kept.append(
                entry._replace(first=first, base=entry.base - count, shift=entry.shift - count)
            )
    return tuple(kept)


class Stretch(NamedTuple):
    """Neighbouring cells of the flat pool with one base and shift; cell c is at base + c."""

    begin: int
    end: int
    base: int
    shift: int


def stretches(entries: Iterable[Entry], page_size: int) -> list[Stretch]:
    """Join entries whose cells are neighbours in the pool and in position."""
    joined: list[Stretch] = []
    for page, first, fill, base, shift in entries:
        begin, end = page * page_size + first, page * page_size + fill
        base = base - page * page_size
        last = joined[-1] if joined else None
        if last and last.end == begin and last.base == base and last.shift == shift:
            joined[-1] = last._replace(end=end)
        else:
            joined.append(Stretch(begin=begin, end=end, base=base, shift=shift))
    return joined


def cells_used(entries: Iterable[Entry]) -> int:
    """Count the cells a table sees."""
    return sum(entry.fill - entry.first for entry in entries)
