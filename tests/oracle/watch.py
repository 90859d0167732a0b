"""What must hold of an engine around every verb: bits, tables, ownership and bookkeeping."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jaxstate.engine import Engine
from jaxstate.errors import CapacityError, JaxStateError
from jaxstate.pages import Entry
from jaxstate.session import PaidTail
from oracle.equality import Mismatch, Rule, require
from oracle.history import Context, History
from oracle.mirror import Mirror, Refusal

REFUSED = object()
"""What `Watch.attempt` returns for a verb that was refused."""


class Watch:
    """Runs verbs of an engine and looks at its whole state before and after."""

    def __init__(self, engine: Engine, history: History, rule: Rule, mirrors: Mapping[str, Mirror]):
        """Watch an engine whose sessions should be `mirrors`, which the caller keeps current."""
        self._engine = engine
        self._history = history
        self._rule = rule
        self._mirrors = mirrors
        self._first_bits: dict[int, tuple[bytes, int]] = {}  # record -> cell's bits and rotation
        self._open_tail: dict[int, int] = {}  # page -> references of a stream that is suspended
        self._open_cells: set[int] = set()  # cells of the context it sees
        self.is_sound = True  # no verb has failed so far

    # Around a verb

    def attempt(
        self,
        what: str,
        call: Callable[[], Any],
        *,
        refusal: Refusal = None,
        tokens: int = 0,
        writer: str | None = None,
        forwards: Callable[[Any], int] | None = None,
    ) -> Any:
        """Run a verb; REFUSED if it raised what it should, or the pool was really too full.

        Args:
          refusal: the error it must raise.
          tokens: new cells it needs; it may be refused if they might not fit the free pages.
          writer: session whose own pages it may write; it may always write free ones.
          forwards: how many tokens it must forward, given what it returns.
        """
        self.is_sound = False
        pages = self._engine.pages
        sessions = self._fingerprint()
        free = {page for page in range(pages.num_pages) if self._header(page) is None}
        may_write = free | set(self._open_tail)
        paid = self._paid()
        by_paid = _references(one.entries for tails in paid.values() for one in tails)
        references = {
            page: pages.header(page).references for page in range(pages.num_pages)
            if page not in free
        }  # fmt: skip
        spare = {page for page, count in by_paid.items() if references[page] == count}
        worst = -(-tokens // pages.page_size) + 2 if tokens else 0
        others = [name for name in self._engine.session_ids if name != writer]
        tables = {name: self._engine.session(name).entries for name in self._engine.session_ids}
        tails = {id(one): (one, one.entries) for all_of in paid.values() for one in all_of}
        alone = {
            name: {
                page
                for page, count in _references([table]).items()
                if references[page] == count + by_paid[page]
            }
            for name, table in tables.items()
        }
        owners = set()
        of_writer: collections.Counter[int] = collections.Counter()
        if writer is not None:
            owners.add(self._engine.session(writer).owner)
            may_write |= set(pages.owned_by(*owners))
            # What only the writer held, it may have given back and taken again.
            of_writer = _references(self._entries_of(writer))
            may_write |= {page for page, count in of_writer.items() if references[page] == count}
        pool = self._pool()
        before = self._engine.executor.tokens_forwarded
        try:
            result = call()
        except Mismatch:
            raise
        except JaxStateError as error:
            full = isinstance(error, CapacityError) and worst > len(free) + len(spare)
            if not full and (refusal is None or not isinstance(error, refusal)):
                raise Mismatch(f"{what}: unexpected {error!r}") from error
            require(self._fingerprint() == sessions, f"{what}: refused, but sessions changed")
            self._count("pool full" if refusal is None else f"{what} refused")
            result = REFUSED
        except Exception as error:
            raise Mismatch(f"{what}: unexpected {error!r}") from error
        else:
            require(refusal is None, f"{what}: expected {refusal}, but it was done")
            self._count(what)
            if forwards is not None:
                got, want = self._engine.executor.tokens_forwarded - before, forwards(result)
                require(got == want, f"{what}: expected {want} tokens forwarded, got {got}")
        given_back = self._note_given_back(paid)
        moved = [name for name in others if self._is_unchanged_but_elsewhere(name, tables[name])]
        require(
            not (given_back or moved) or worst > len(free) or what == "repack",
            f"{what}: gave paid tails back or moved cells without need",
        )
        if given_back:
            may_write |= spare
        for name in moved:
            self._count("moved cells")
            may_write |= alone[name]
            owners.add(self._engine.session(name).owner)
        if moved:  # what the writer shared with them both may have given up
            shared = of_writer + by_paid + _references(tables[name] for name in moved)
            may_write |= {page for page, count in shared.items() if references[page] == count}
        # What moved is compared bit by bit where it is now; the writer's own bits likewise.
        still = [
            set(tables[name]) & set(self._engine.session(name).entries)
            for name in others
            if name in self._engine.session_ids and name not in moved
        ]
        # A tail that is gone may have left its page to another just like it.
        for name in set(others) & set(self._engine.session_ids):
            for one in self._engine.session(name).paid:
                if id(one) in tails:
                    behind = tails[id(one)][1][len(tables[name]) :]
                    still.append(set(behind) & set(one.entries))
        seen = self._open_cells | {
            cell for entries in still for cell in self.table(entries)[0].tolist()
        }
        changed = {
            int(cell)
            for old, new in zip(pool, self._pool(), strict=True)
            for cell in np.flatnonzero((old != new).any(axis=(0, 2)))
        }
        require(not changed & seen, f"{what}: wrote cells {changed & seen}, which somebody sees")
        for page in {cell // pages.page_size for cell in changed}:
            header = self._header(page)
            is_own = writer is None or header is None or header.owner in owners
            require(page in may_write and is_own, f"{what}: wrote page {page}, not its own")
        return result

    def _is_unchanged_but_elsewhere(self, name: str, before: tuple[Entry, ...]) -> bool:
        """Whether a session's cells have moved, and it has not changed."""
        if name not in self._engine.session_ids:
            return False
        session = self._engine.session(name)
        return session.version == self._mirrors[name].version and session.entries != before

    def _note_given_back(self, before: Mapping[str, list[PaidTail]]) -> list[PaidTail]:
        """Find paid tails that are gone although their sessions have not changed, and forget them.

        Args:
          before: paid tails by session.
        """
        given_back = []
        for name, tails in before.items():
            mirror = self._mirrors[name]
            if name not in self._engine.session_ids:
                continue
            session = self._engine.session(name)
            there = {id(one) for one in session.paid}
            gone = [one for one in tails if id(one) not in there]
            if session.version == mirror.version and gone:
                mirror.paid = [
                    paid for paid, one in zip(mirror.paid, tails, strict=True) if id(one) in there
                ]
                given_back += gone
                self._count("paid tail given back")
        return given_back

    def suspend(self, context: Iterable[Entry]) -> None:
        """Note what a stream holds that was begun and is not finished.

        Args:
          context: table of the session it was asked of, as it was then.
        """
        expected = _references(self._all_entries())
        for page in range(self._engine.pages.num_pages):
            header = self._header(page)
            if header is not None and header.references != expected[page]:
                self._open_tail[page] = header.references - expected[page]
        self._open_cells = set(self.table(context)[0].tolist())

    def resumed(self) -> None:
        """Note that the stream holds nothing any more."""
        self._open_tail = {}
        self._open_cells = set()

    def check(self, what: str) -> None:
        """Check everything that is open."""
        engine = self._engine
        names = list(self._mirrors)
        require(
            engine.session_ids == names,
            f"{what}: expected sessions {names}, got {engine.session_ids}",
        )
        for session_id in names:
            self._check_session(session_id, f"{what}: session {session_id}")
        references = _references(self._all_entries())
        references.update(self._open_tail)
        fills: dict[int, int] = collections.defaultdict(int)
        for entries in self._all_entries():
            for entry in entries:
                fills[entry.page] = max(fills[entry.page], entry.fill)
        for page in range(engine.pages.num_pages):
            header = self._header(page)
            found = header.references if header else 0
            require(
                found == references[page],
                f"{what}: page {page}: expected {references[page]} references, got {found}",
            )
            require(
                header is None or header.high_water >= fills[page],
                f"{what}: page {page}: cells up to {fills[page]} are seen, past its high-water "
                "mark",
            )
        held = sum(count > 0 for count in references.values()) * engine.pages.page_size
        require(
            engine.cells_held == held,
            f"{what}: expected {held} cells held, got {engine.cells_held}",
        )
        tables = [engine.session(session_id).entries for session_id in names]
        used = len({cell for entries in tables for cell in self.table(entries)[0].tolist()})
        require(
            engine.cells_used == used,
            f"{what}: expected {used} cells used, got {engine.cells_used}",
        )
        self.is_sound = True

    # Sessions

    def _check_session(self, session_id: str, what: str) -> None:
        mirror, session = self._mirrors[session_id], self._engine.session(session_id)
        for name, got, want in (
            ("tokens", session.token_ids, self._history.token_ids(mirror.context)),
            ("frozen length", session.frozen_len, mirror.frozen_len),
            ("policy", session.when_full, mirror.when_full),
            ("evicted tokens", session.evicted, mirror.evicted),
            ("version", session.version, mirror.version),
            (
                "paid tails",
                [(list(paid.token_ids), paid.entry_len) for paid in session.paid],
                mirror.paid,
            ),
        ):
            require(got == want, f"{what}: expected {name} {want}, got {got}")
        count = len(mirror.context)
        limit = self._engine.config.context_len
        require(count <= limit, f"{what}: {count} tokens are held, context_len is {limit}")
        cells, positions, rotations = self.table(session.entries)
        require(
            positions.tolist() == list(range(count)),
            f"{what}: expected positions 0 ... {count - 1}, got {positions.tolist()}",
        )
        self._check_rotations(mirror, rotations, what)
        self._check_bits(mirror.context, cells, rotations, what)
        for paid in session.paid:
            tail_cells, positions, _ = self.table(paid.entries)
            require(
                positions.tolist() == list(range(count + len(paid.token_ids)))
                and tail_cells[:count].tolist() == cells.tolist(),
                f"{what}: a paid tail's table is not the session's with {len(paid.token_ids)} "
                "tokens behind it",
            )

    def _check_rotations(self, mirror: Mirror, rotations: np.ndarray, what: str) -> None:
        """Stored rotations follow the stream's count, modulo an epoch, whatever was evicted."""
        size = self._engine.config.page_size
        room = self._engine.model.max_positions - mirror.frozen_len
        epoch = max(room // size * size, size)
        index = np.arange(len(rotations))
        stream = (index - mirror.frozen_len + mirror.evicted) % epoch + mirror.frozen_len
        want = np.where(index < mirror.frozen_len, index, stream)
        if mirror.stream_len > 2 * epoch:
            self._count("past two rotation epochs")
        require(
            rotations.tolist() == want.tolist(),
            f"{what}: expected stored rotations {want.tolist()}, got {rotations.tolist()}",
        )

    def _check_bits(self, context: Context, cells, rotations, what: str) -> None:
        """Cells hold what the reference computed, and the same bits as when first seen."""
        if not context:
            return
        layers = self._engine.executor.read_cells(cells)
        keys = np.stack([k.swapaxes(0, 1) for k, _ in layers], axis=1)
        values = np.stack([v.swapaxes(0, 1) for _, v in layers], axis=1)
        new = [at for at, record in enumerate(context) if record not in self._first_bits]
        if new:
            records = tuple(context[at] for at in new)
            for name, got, want in (
                ("keys", keys, self._history.keys_at(records, rotations[new])),
                ("values", values, self._history.values(records)),
            ):
                self._rule.close(
                    got[new], want, self._rule.tolerance(want), f"{what}: {name} of new cells"
                )
        for at, record in enumerate(context):
            bits = (keys[at].tobytes() + values[at].tobytes(), int(rotations[at]))
            first = self._first_bits.setdefault(record, bits)
            require(
                first == bits,
                f"{what}: the cell at position {at} (cell {cells[at]} of the pool) changed",
            )

    # Reading the engine

    def table(self, entries: Iterable[Entry]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Spell out a table: pool cell, position and stored rotation of each cell it sees."""
        size, num_pages = self._engine.pages.page_size, self._engine.pages.num_pages
        cells: list[np.ndarray] = [np.zeros(0, np.int64)]
        positions: list[np.ndarray] = [np.zeros(0, np.int64)]
        rotations: list[np.ndarray] = [np.zeros(0, np.int64)]
        for page, first, fill, base, shift in entries:
            require(
                0 <= first < fill <= size and 0 <= page < num_pages,
                f"an entry sees cells {first} ... {fill - 1} of page {page}",
            )
            index = np.arange(first, fill)
            cells.append(page * size + index)
            positions.append(base + index)
            rotations.append(base + index - shift)
        return np.concatenate(cells), np.concatenate(positions), np.concatenate(rotations)

    def _entries_of(self, session_id: str) -> list[tuple[Entry, ...]]:
        """Return the tables of a session and its paid tails."""
        session = self._engine.session(session_id)
        return [session.entries, *(paid.entries for paid in session.paid)]

    def _paid(self) -> dict[str, list[PaidTail]]:
        return {name: list(self._engine.session(name).paid) for name in self._engine.session_ids}

    def _all_entries(self) -> list[tuple[Entry, ...]]:
        return [
            entries
            for session_id in self._engine.session_ids
            for entries in self._entries_of(session_id)
        ]

    def _header(self, page: int):
        """Return a page's header, None if it is free."""
        try:
            return self._engine.pages.header(page)
        except KeyError:
            return None

    def _pool(self) -> list[np.ndarray]:
        """Copy the pool: k and v of each layer, [heads, cells, head_dim]."""
        layers = self._engine.executor.read_cells(np.arange(self._engine.config.num_cells))
        return [array for layer in layers for array in layer]

    def _fingerprint(self) -> list:
        """Copy what the host knows of all sessions."""
        return [
            (
                name,
                session.owner,
                session.when_full,
                session.frozen_len,
                tuple(session.token_ids),
                session.entries,
                session.evicted,
                session.stream_floor,
                session.version,
                [(paid.token_ids, paid.entries) for paid in session.paid],
            )
            for name in self._engine.session_ids
            for session in [self._engine.session(name)]
        ]

    def _count(self, event: str) -> None:
        self._rule.tally.events[event] += 1


def _references(tables: Iterable[Iterable[Entry]]) -> collections.Counter[int]:
    """Count the entries that point to each page."""
    return collections.Counter(entry.page for entries in tables for entry in entries)
