"""An engine whose every verb is compared with the history-true reference.

After each verb, refused ones included:

- what it answered equals the reference, by the rule of equality, and what it claims of itself
  (source, version, tokens forwarded, finish reason) is so;
- every session's table covers positions 0 ... len - 1 once each, and the bits of its cells are
  those that were there when their tokens were computed, rotated where the table says;
- no cell that anybody saw was written, and no page but a free one or one of the verb's session;
- pages, references and high-water marks agree with the tables, and nothing else is held;
- a refused verb changed nothing.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxstate import pages as pages_module
from jaxstate.answer import Answer, FinishReason, Source
from jaxstate.engine import Engine
from jaxstate.errors import CapacityError, InputError, JaxStateError, SessionError
from jaxstate.pages import Entry
from jaxstate.rows import Group, RowInput
from oracle.equality import Mismatch, Rule, log_softmax, require, top_gap
from oracle.history import Context, History
from oracle.tiny import Setup, params_of

REFUSED = object()


@dataclasses.dataclass(kw_only=True)
class Mirror:
    """What a session must be, by the reference.

    Attributes:
      context: its records, frozen ones first.
      frozen_len: how many of them are never evicted.
      when_full: "error" or "slide".
      evicted: stream tokens dropped so far.
      floor: length of the stream, evicted tokens included, at the last eviction.
      version: number of durable operations.
      paid: tokens of each tail forwarded ahead.
    """

    context: Context
    frozen_len: int
    when_full: str
    evicted: int = 0
    floor: int = 0
    version: int = 0
    paid: list[list[int]] = dataclasses.field(default_factory=list)

    @property
    def stream_len(self) -> int:
        """Stream tokens kept or evicted, rolled back ones excluded."""
        return self.evicted + len(self.context) - self.frozen_len

    def evict(self, count: int) -> None:
        """Drop the oldest stream records."""
        self.floor = self.stream_len
        self.context = (
            self.context[: self.frozen_len] + self.context[self.frozen_len + count :]
        )
        self.evicted += count


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSpec:
    """A row of a step run past the engine's verbs; see CheckedEngine.step_together.

    Attributes:
      session_id: whose context it sees.
      token_ids: its new tokens.
      position: where the first one stands; None = behind the context.
      parents: as in RowInput.
    """

    session_id: str
    token_ids: Sequence[int]
    position: int | None = None
    parents: Sequence[int] | None = None

    @property
    def is_sequence(self) -> bool:
        """Plain tokens behind the context, which could be kept."""
        return self.position is None and self.parents is None


class CheckedEngine:
    """The engine's verbs, each with its comparison; raises Mismatch where they disagree."""

    def __init__(self, engine: Engine, setup: Setup, *, dtype: str = "float32"):
        """Check an engine that has no sessions yet."""
        self.engine = engine
        self.history = History(params_of(setup), setup.model)
        self.rule = Rule(dtype)
        self.mirrors: dict[str, Mirror] = {}
        self._sizes = setup.sizes
        self._max_positions = setup.model.max_positions
        self._first_bits: dict[int, tuple[bytes, int]] = {}  # record -> cell's bits and rotation
        self._open_tail: dict[int, int] = {}  # page -> references of a stream that is suspended
        self._open_cells: set[int] = set()  # cells it sees
        self.counts_own_tokens = False
        self.is_sound = True  # no verb has failed so far

    # Sessions

    def create(self, frozen: Sequence[int], when_full: str) -> str | None:
        """Create a session; None if it was refused."""
        too_long = len(frozen) >= self._sizes.context_len
        name = self._attempt(
            "create", lambda: self.engine.create(frozen, when_full=when_full),
            refusal=CapacityError if too_long else None, tokens=len(frozen),
        )
        if name is not REFUSED:
            self.mirrors[name] = Mirror(
                context=self.history.extend((), frozen), frozen_len=len(frozen),
                when_full=when_full,
            )
        self.check("create")
        return None if name is REFUSED else name

    def fork(self, session_id: str) -> str:
        """Fork a session."""
        name = self._attempt("fork", lambda: self.engine.fork(session_id))
        self.mirrors[name] = dataclasses.replace(self.mirrors[session_id], paid=[])
        self.check("fork")
        return name

    def close(self, session_id: str) -> None:
        """Close a session; it is unknown from then on."""
        self._attempt("close", lambda: self.engine.close(session_id))
        del self.mirrors[session_id]
        self._attempt(
            "closed session", lambda: self.engine.session(session_id), refusal=SessionError
        )
        self.check("close")

    def close_all(self) -> None:
        """Close every session; nothing may be held then."""
        for session_id in list(self.mirrors):
            self.close(session_id)
        held = self.engine.cells_held
        require(held == 0, f"all sessions are closed and {held} cells are still held")

    # Durable verbs

    def append(self, session_id: str, token_ids: Sequence[int]) -> None:
        """Append, refused where it does not fit."""
        mirror = self.mirrors[session_id]
        refusal, dropped = self._overflow(mirror, len(token_ids))
        version = self._attempt(
            "append", lambda: self.engine.append(session_id, token_ids),
            refusal=InputError if not token_ids else refusal, tokens=len(token_ids),
            writer=session_id,
        )
        if version is not REFUSED:
            mirror.paid.clear()
            if dropped:
                mirror.evict(dropped)
                self._count("slid")
            mirror.context += self.history.extend(mirror.context, token_ids)
            self._next_version(mirror, version, "append")
        self.check("append")

    def update(self, session_id: str, token_ids: Sequence[int]) -> None:
        """Update the stream, refused where it would pass an eviction or does not fit."""
        mirror = self.mirrors[session_id]
        stream = self.history.token_ids(mirror.context)[mirror.frozen_len :]
        common = _common_len(stream, token_ids)
        refusal: Any = None
        if not token_ids:
            refusal = InputError
        elif common < len(stream) and mirror.evicted + common < mirror.floor:
            refusal = SessionError
        elif len(token_ids) > self._sizes.context_len - mirror.frozen_len:
            refusal = CapacityError
        new = token_ids[common:]
        version = self._attempt(
            "update", lambda: self.engine.update(session_id, token_ids), refusal=refusal,
            tokens=len(new), writer=session_id, forwards=len(new),
        )
        if version is not REFUSED:
            if common < len(stream) or new:
                mirror.paid.clear()
            mirror.context = mirror.context[: mirror.frozen_len + common]
            if new:
                mirror.context += self.history.extend(mirror.context, new)
            self._next_version(mirror, version, "update")
        self.check("update")

    def rollback(self, session_id: str, count: int) -> None:
        """Roll back, refused past the frozen prefix or an eviction."""
        mirror = self.mirrors[session_id]
        kept = len(mirror.context) - mirror.frozen_len
        refusal: Any = None
        if count < 1:
            refusal = InputError
        elif count > kept or mirror.stream_len - count < mirror.floor:
            refusal = SessionError
        version = self._attempt(
            "rollback", lambda: self.engine.rollback(session_id, count), refusal=refusal,
            forwards=0,
        )
        if version is not REFUSED:
            mirror.paid.clear()
            mirror.context = mirror.context[:-count]
            self._next_version(mirror, version, "rollback")
        self.check("rollback")

    # Asking

    def advance(
        self, session_id: str, entry: Sequence[int], *, max_new_tokens: int = 0,
        min_gap: float = 0.0, eos_ids: Sequence[int] = (),
    ) -> None:
        """Pay for tokens ahead; what is kept must be the reference's greedy continuation."""
        mirror = self.mirrors[session_id]
        skip = self._skipped(mirror, entry)
        before = self.engine.executor.tokens_forwarded
        paid = self._attempt(
            "advance",
            lambda: self.engine.advance(
                session_id, entry, max_new_tokens=max_new_tokens, min_gap=min_gap, eos_ids=eos_ids
            ),
            refusal=self._beyond_positions(mirror.context, len(entry) + max_new_tokens),
            tokens=len(entry) + max_new_tokens,
        )
        if paid is not REFUSED:
            token_ids = list(paid.token_ids)
            count = len(token_ids) - len(entry)
            require(
                token_ids[: len(entry)] == list(entry) and count <= max_new_tokens,
                f"advance: expected {list(entry)} and at most {max_new_tokens} more, "
                f"got {token_ids}",
            )
            self._forwarded("advance", before, len(entry) - skip + count)
            records = self.history.extend(mirror.context, token_ids)
            wants = [self.history.logits(record) for record in records[len(entry) - 1 :]]
            self.rule.greedy(token_ids[len(entry) :], wants[:-1], "advance")
            for index, want in enumerate(wants):
                stops = index == count < max_new_tokens
                self._check_decision(want, stops, index == count, min_gap, eos_ids)
            ready, want = paid.ready, wants[-1]
            self.rule.logits(np.asarray(ready.row_logits()), want, "advance")
            self.rule.greedy_token(ready.top_id, want, "advance: ready token")
            self._check_gap(ready.gap, want, "advance")
            mirror.paid.append(token_ids)
        self.check("advance")

    def query(
        self, session_id: str, question: Sequence[int], *, max_new_tokens: int,
        eos_ids: Sequence[int] = (), top_logprobs: int | None = None, commit: bool = False,
    ) -> None:
        """Ask greedily; the session is unchanged, or holds question and answer after a commit."""
        mirror = self.mirrors[session_id]
        total = len(question) + max_new_tokens
        refusal = self._beyond_positions(mirror.context, total)
        if commit and refusal is None:
            refusal, _ = self._overflow(mirror, total)
        skip = self._skipped(mirror, question)
        before = self.engine.executor.tokens_forwarded
        answer = self._attempt(
            "query",
            lambda: self.engine.query(
                session_id, question, max_new_tokens=max_new_tokens, eos_ids=eos_ids,
                top_logprobs=top_logprobs, commit=commit,
            ),
            refusal=refusal, tokens=total, writer=session_id if commit else None,
        )
        if answer is not REFUSED:
            records = self._check_answer(
                answer, mirror, question, skip=skip, max_new_tokens=max_new_tokens,
                eos_ids=eos_ids, top_logprobs=top_logprobs, committed=commit,
            )
            self._forwarded("query", before, answer.tokens_forwarded)
            if commit:
                self._commit(mirror, records, self.engine.session(session_id).version)
        self.check("query")

    def generate(self, prompt: Sequence[int], *, max_new_tokens: int) -> None:
        """Ask without a session."""
        nobody = Mirror(context=(), frozen_len=0, when_full="error")
        answer = self._attempt(
            "generate",
            lambda: self.engine.generate(prompt, max_new_tokens=max_new_tokens, top_logprobs=3),
            refusal=self._beyond_positions((), len(prompt) + max_new_tokens),
            tokens=len(prompt) + max_new_tokens,
        )
        if answer is not REFUSED:
            self._check_answer(
                answer, nobody, prompt, skip=0, max_new_tokens=max_new_tokens, top_logprobs=3
            )
        self.check("generate")

    def stream_around(
        self, session_id: str, question: Sequence[int], action: Callable[[], None], *,
        taken: int, max_new_tokens: int, commit: bool = False, finish: bool = True,
    ) -> None:
        """Take some tokens of a stream, do something else, then finish or abandon the stream.

        Args:
          action: another verb of this object, on whatever session.
          taken: at least 1 and less than max_new_tokens.
        """
        mirror = self.mirrors[session_id]
        total = len(question) + max_new_tokens
        refusal = self._beyond_positions(mirror.context, total)
        if commit and refusal is None:
            refusal, _ = self._overflow(mirror, total)
        skip = self._skipped(mirror, question)
        seen = copy.deepcopy(mirror)
        cells = set(self._table(self.engine.session(session_id).entries)[0].tolist())

        def start():
            stream = self.engine.stream(
                session_id, question, max_new_tokens=max_new_tokens, commit=commit
            )
            for _ in range(taken):
                next(stream)
            return stream

        stream = self._attempt(
            "stream", start, refusal=refusal, tokens=total, writer=session_id if commit else None
        )
        if stream is REFUSED:
            self.check("stream")
            return
        expected = self._references(self._all_entries())
        for page in range(self.engine.pages.num_pages):
            header = self._header(page)
            if header is not None and header.references != expected[page]:
                self._open_tail[page] = header.references - expected[page]
        self._open_cells = cells
        action()
        unchanged = self.mirrors.get(session_id) is mirror and mirror.version == seen.version
        answer = self._attempt(
            "rest of the stream" if finish else "abandoned stream",
            lambda: _exhaust(stream) if finish else stream.close(),
            refusal=SessionError if commit and finish and not unchanged else None,
        )
        self._open_tail = {}
        self._open_cells = set()
        if finish and answer is not REFUSED:
            records = self._check_answer(
                answer, seen, question, skip=skip, max_new_tokens=max_new_tokens,
                committed=commit, alone=self.counts_own_tokens,
            )
            if commit:
                self._commit(mirror, records, self.engine.session(session_id).version)
        self.check("stream")

    def choose(
        self, session_id: str, question: Sequence[int], choices: Sequence[Sequence[int]]
    ) -> None:
        """Choose among continuations; every choice's probability is compared."""
        mirror = self.mirrors[session_id]
        longest = max(len(choice) for choice in choices)
        skip = self._skipped(mirror, question)
        before = self.engine.executor.tokens_forwarded
        answer = self._attempt(
            "choose", lambda: self.engine.choose(session_id, question, choices),
            refusal=self._beyond_positions(mirror.context, len(question) + longest),
            tokens=len(question),
        )
        if answer is not REFUSED:
            root = self.history.extend(mirror.context, question)
            self._check_choices(answer, mirror.context + root, choices)
            self._check_gap(answer.gap, self.history.logits(root[-1]), "choose")
            self._check_origin(answer, mirror, skip, "choose")
            require(
                answer.token_ids == tuple(choices[answer.choice])
                and answer.finish_reason is FinishReason.CHOICE,
                f"choose: expected the ids of choice {answer.choice}, got {answer.token_ids}",
            )
            inner = {tuple(c[:n]) for c in choices for n in range(1, len(c))}
            least = len(question) - skip + len(inner)
            if len(inner) < self._sizes.step_shapes[-1].num_rows:
                self._forwarded("choose", before, least)
            require(
                answer.tokens_forwarded == self.engine.executor.tokens_forwarded - before >= least,
                f"choose: expected at least {least} tokens forwarded, "
                f"got {answer.tokens_forwarded}",
            )
        self.check("choose")

    def step_together(self, specs: Sequence[RowSpec], *, one_group: bool, write: bool) -> None:
        """Run rows of several sessions in one step, past the verbs.

        Args:
          specs: the rows; at most as many as a step has outputs, and few enough tokens.
          one_group: all rows share what their tables have in common and see the rest privately;
            otherwise rows of one session are a group.
          write: sequences are written to pages of their own and one more token of each is
            forwarded behind them in a second step; then they are dropped.
        """
        owners = [object() for _ in specs]  # equal to no session's owner
        tables = [self.engine.session(spec.session_id).entries for spec in specs]
        lengths = [len(self.mirrors[spec.session_id].context) for spec in specs]
        held: list[tuple[Entry, ...]] = []

        def run():
            cells, shifts, grown = [], [], []
            for spec, owner, table, length in zip(specs, owners, tables, lengths, strict=True):
                shift = np.full(len(spec.token_ids), length // 2, np.int32)
                if write and spec.is_sequence:
                    growth = pages_module.plan_growth(
                        self.engine.pages, owner, table, length, shift, growing=False
                    )
                    self.engine.pages.hold(growth.entries)
                    held.append(growth.entries)
                    cells.append(growth.cells)
                    grown.append(growth.entries)
                else:
                    cells.append(np.full(len(spec.token_ids), self._sizes.num_cells, np.int32))
                    grown.append(None)
                shifts.append(shift)
            rows = [
                self._row(spec, length, cells[index], shifts[index])
                for index, (spec, length) in enumerate(zip(specs, lengths, strict=True))
            ]
            first = self._run_rows(specs, rows, tables, one_group)
            after = [index for index, entries in enumerate(grown) if entries is not None]
            more = [RowSpec(session_id=specs[i].session_id, token_ids=[i + 1]) for i in after]
            if not more:
                return first, after, None
            nowhere = np.full(1, self._sizes.num_cells, np.int32)
            rows = [
                self._row(
                    spec, lengths[index] + len(specs[index].token_ids), nowhere, nowhere * 0
                )
                for index, spec in zip(after, more, strict=True)
            ]
            second = self._run_rows(more, rows, [grown[index] for index in after], one_group)
            return first, after, second

        outcome = self._attempt(
            "step", run,
            # Every row may need a page more than its tokens fill.
            tokens=sum(len(spec.token_ids) + self._sizes.page_size for spec in specs),
        )
        for entries in held:
            self.engine.pages.drop(entries)
        if outcome is not REFUSED:
            first, after, second = outcome
            records = [
                self.history.extend(
                    self.mirrors[spec.session_id].context, spec.token_ids,
                    position=spec.position, parents=spec.parents,
                )
                for spec in specs
            ]
            self._check_rows(first, [list(row) for row in records])
            if second is not None:
                behind = [self.mirrors[specs[i].session_id].context + records[i] for i in after]
                self._check_rows(
                    second,
                    [
                        list(self.history.extend(context, [index + 1]))
                        for context, index in zip(behind, after, strict=True)
                    ],
                )
        self.check("step")

    # Invariants

    def check(self, what: str) -> None:
        """Check tables, bits and bookkeeping of everything that is open."""
        engine = self.engine
        require(
            engine.session_ids == list(self.mirrors),
            f"{what}: expected sessions {list(self.mirrors)}, got {engine.session_ids}",
        )
        for session_id in self.mirrors:
            self._check_session(session_id, what)
        expected = self._references(self._all_entries())
        for page, count in self._open_tail.items():
            expected[page] += count
        fills: dict[int, int] = collections.defaultdict(int)
        for entries in self._all_entries():
            for entry in entries:
                fills[entry.page] = max(fills[entry.page], entry.fill)
        for page in range(engine.pages.num_pages):
            header = self._header(page)
            found = header.references if header else 0
            require(
                found == expected[page],
                f"{what}: page {page}: expected {expected[page]} references, got {found}",
            )
            require(
                header is None or header.high_water >= fills[page],
                f"{what}: page {page}: cells up to {fills[page]} are seen, the high-water mark "
                f"is {header.high_water if header else 0}",
            )
        held = sum(count > 0 for count in expected.values()) * engine.pages.page_size
        require(
            engine.cells_held == held,
            f"{what}: expected {held} cells held, got {engine.cells_held}",
        )
        seen = {
            cell
            for session_id in self.mirrors
            for cell in self._table(engine.session(session_id).entries)[0].tolist()
        }
        require(
            engine.cells_used == len(seen),
            f"{what}: expected {len(seen)} cells used, got {engine.cells_used}",
        )
        self.is_sound = True

    def _check_session(self, session_id: str, what: str) -> None:
        mirror, session = self.mirrors[session_id], self.engine.session(session_id)
        what = f"{what}: session {session_id}"
        for name, got, want in (
            ("tokens", session.token_ids, self.history.token_ids(mirror.context)),
            ("frozen length", session.frozen_len, mirror.frozen_len),
            ("policy", session.when_full, mirror.when_full),
            ("evicted tokens", session.evicted, mirror.evicted),
            ("version", session.version, mirror.version),
            ("paid tails", [list(paid.token_ids) for paid in session.paid], mirror.paid),
        ):
            require(got == want, f"{what}: expected {name} {want}, got {got}")
        require(
            len(mirror.context) <= self._sizes.context_len,
            f"{what}: {len(mirror.context)} tokens are held, context_len is "
            f"{self._sizes.context_len}",
        )
        cells, positions, rotations = self._table(session.entries)
        require(
            positions.tolist() == list(range(len(mirror.context))),
            f"{what}: expected positions 0 ... {len(mirror.context) - 1}, got {positions.tolist()}",
        )
        self._check_rotations(mirror, rotations, what)
        self._check_bits(mirror.context, cells, rotations, what)
        for paid in session.paid:
            tail_cells, positions, _ = self._table(paid.entries)
            count = len(mirror.context) + len(paid.token_ids)
            require(
                positions.tolist() == list(range(count))
                and tail_cells[: len(cells)].tolist() == cells.tolist(),
                f"{what}: a paid tail's table is not the session's with {len(paid.token_ids)} "
                "tokens behind it",
            )

    def _check_rotations(self, mirror: Mirror, rotations: np.ndarray, what: str) -> None:
        """Stored rotations follow the stream's count, modulo an epoch, whatever was evicted."""
        size = self._sizes.page_size
        epoch = max((self._max_positions - mirror.frozen_len) // size * size, size)
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
        layers = self.engine.executor.read_cells(cells)
        keys = np.stack([k.swapaxes(0, 1) for k, _ in layers], axis=1)
        values = np.stack([v.swapaxes(0, 1) for _, v in layers], axis=1)
        new = [at for at, record in enumerate(context) if record not in self._first_bits]
        if new:
            records = tuple(context[at] for at in new)
            for name, got, want in (
                ("keys", keys, self.history.keys_at(records, rotations[new])),
                ("values", values, self.history.values(records)),
            ):
                self.rule.close(
                    got[new], want, self.rule.tolerance(want), f"{what}: {name} of new cells"
                )
        for at, record in enumerate(context):
            bits = (keys[at].tobytes() + values[at].tobytes(), int(rotations[at]))
            first = self._first_bits.setdefault(record, bits)
            require(
                first == bits,
                f"{what}: the cell at position {at} (cell {cells[at]} of the pool) changed",
            )

    def _table(self, entries: Iterable[Entry]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Spell out a table: pool cell, position and stored rotation of each cell it sees."""
        cells: list[np.ndarray] = [np.zeros(0, np.int64)]
        positions: list[np.ndarray] = [np.zeros(0, np.int64)]
        rotations: list[np.ndarray] = [np.zeros(0, np.int64)]
        for page, first, fill, base, shift in entries:
            require(
                0 <= first < fill <= self._sizes.page_size and 0 <= page < self._sizes.num_pages,
                f"an entry sees cells {first} ... {fill - 1} of page {page}",
            )
            index = np.arange(first, fill)
            cells.append(page * self._sizes.page_size + index)
            positions.append(base + index)
            rotations.append(base + index - shift)
        return np.concatenate(cells), np.concatenate(positions), np.concatenate(rotations)

    def _entries_of(self, session_id: str) -> list[tuple[Entry, ...]]:
        """Return the tables of a session and its paid tails."""
        session = self.engine.session(session_id)
        return [session.entries, *(paid.entries for paid in session.paid)]

    def _all_entries(self) -> list[tuple[Entry, ...]]:
        return [
            entries
            for session_id in self.engine.session_ids
            for entries in self._entries_of(session_id)
        ]

    def _references(self, tables: Iterable[Iterable[Entry]]) -> collections.Counter[int]:
        """Count the entries that point to each page."""
        return collections.Counter(entry.page for entries in tables for entry in entries)

    def _header(self, page: int):
        """Return a page's header, None if it is free."""
        try:
            return self.engine.pages.header(page)
        except KeyError:
            return None

    # Running a verb

    def _attempt(
        self, what: str, call: Callable[[], Any], *, refusal: type[Exception] | None = None,
        tokens: int = 0, writer: str | None = None, forwards: int | None = None,
    ) -> Any:
        """Run a verb; REFUSED if it raised what it should, or the pool was really too full.

        Args:
          refusal: the error it must raise; None = none.
          tokens: new cells it needs; it may be refused if they might not fit the free pages.
          writer: session whose own pages it may write; it may always write free ones.
          forwards: how many tokens it must forward if it is not refused.
        """
        self.is_sound = False
        pages = self.engine.pages
        sessions = self._fingerprint()
        free = {page for page in range(pages.num_pages) if self._header(page) is None}
        may_write = free | set(self._open_tail)
        seen = set(self._open_cells)
        for session_id in self.engine.session_ids:
            if session_id != writer:  # its own bits are compared where its table still shows them
                for entries in self._entries_of(session_id):
                    seen.update(self._table(entries)[0].tolist())
        owner = None
        if writer is not None:
            owner = self.engine.session(writer).owner
            may_write |= set(pages.owned_by(owner))
            # What only the writer held, it may have given back and taken again.
            for page, count in self._references(self._entries_of(writer)).items():
                header = self._header(page)
                if header is not None and header.references == count:
                    may_write.add(page)
        pool = self._pool()
        before = self.engine.executor.tokens_forwarded
        try:
            result = call()
        except Mismatch:
            raise
        except JaxStateError as error:
            worst = -(-tokens // pages.page_size) + 2 if tokens else 0
            full = isinstance(error, CapacityError) and worst > len(free)
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
                self._forwarded(what, before, forwards)
        changed = {
            int(cell)
            for old, new in zip(pool, self._pool(), strict=True)
            for cell in np.flatnonzero((old != new).any(axis=(0, 2)))
        }
        require(not changed & seen, f"{what}: wrote cells {changed & seen}, which somebody sees")
        for page in {cell // pages.page_size for cell in changed}:
            header = self._header(page)
            is_own = owner is None or header is None or header.owner == owner
            require(page in may_write and is_own, f"{what}: wrote page {page}, not its own")
        return result

    def _count(self, event: str) -> None:
        self.rule.tally.events[event] += 1

    def _pool(self) -> list[np.ndarray]:
        """Copy the pool: k and v of each layer, [heads, cells, head_dim]."""
        layers = self.engine.executor.read_cells(np.arange(self._sizes.num_cells))
        return [array for layer in layers for array in layer]

    def _fingerprint(self) -> list:
        """Copy what the host knows of all sessions."""
        return [
            (
                name, session.owner, session.when_full, session.frozen_len,
                tuple(session.token_ids), session.entries, session.evicted, session.stream_floor,
                session.version, [(paid.token_ids, paid.entries) for paid in session.paid],
            )
            for name in self.engine.session_ids
            for session in [self.engine.session(name)]
        ]

    # What the reference expects

    def _overflow(self, mirror: Mirror, count: int) -> tuple[type[Exception] | None, int]:
        """Return how an append of `count` tokens must be refused, or how many it evicts."""
        sizes = self._sizes
        overflow = len(mirror.context) + count - sizes.context_len
        if overflow <= 0:
            return None, 0
        if mirror.when_full == "error" or count > sizes.context_len - mirror.frozen_len:
            return CapacityError, 0
        quanta = math.ceil(overflow / sizes.evict_quantum)
        return None, min(quanta * sizes.evict_quantum, len(mirror.context) - mirror.frozen_len)

    def _beyond_positions(self, context: Context, count: int) -> type[Exception] | None:
        too_long = len(context) + count > self._max_positions
        return CapacityError if too_long else None

    def _skipped(self, mirror: Mirror, question: Sequence[int]) -> int:
        """Count the tokens of a question that paid tails save.

        The last one only where a tail ends there: its distribution was kept, no other.
        """
        best = 0
        for paid in mirror.paid:
            common = _common_len(paid, question)
            if common == len(question) < len(paid):
                common -= 1
            best = max(best, common)
        return best

    def _next_version(self, mirror: Mirror, got: int, what: str) -> None:
        mirror.version += 1
        require(
            got == mirror.version, f"{what}: expected version {mirror.version}, got {got}"
        )

    def _commit(self, mirror: Mirror, records: Context, version: int) -> None:
        _, dropped = self._overflow(mirror, len(records))
        mirror.context += records
        mirror.paid.clear()
        if dropped:
            mirror.evict(dropped)
            self._count("slid at a commit")
        self._next_version(mirror, version, "commit")
        self._count("commit")

    # Comparing

    def _check_answer(
        self, answer: Answer, mirror: Mirror, question: Sequence[int], *, skip: int,
        max_new_tokens: int, eos_ids: Sequence[int] = (), top_logprobs: int | None = None,
        committed: bool = False, alone: bool = True,
    ) -> Context:
        """Compare a greedy answer token by token; returns the records of question and answer."""
        token_ids = list(answer.token_ids)
        ended = bool(token_ids) and token_ids[-1] in eos_ids
        require(
            not set(token_ids[:-1]) & set(eos_ids)
            and (ended and len(token_ids) <= max_new_tokens or len(token_ids) == max_new_tokens),
            f"query: expected {max_new_tokens} tokens or an end at one of {list(eos_ids)}, "
            f"got {token_ids}",
        )
        reason = FinishReason.EOS if ended else FinishReason.LENGTH
        require(
            answer.finish_reason is reason,
            f"query: expected {reason}, got {answer.finish_reason}",
        )
        records = self.history.extend(mirror.context, [*question, *token_ids])
        wants = [self.history.logits(record) for record in records[len(question) - 1 : -1]]
        self.rule.greedy(token_ids, wants, "query")
        require(
            [token.token_id for token in answer.tokens] == token_ids,
            "query: streamed tokens are not those of the answer",
        )
        for index, (token, want) in enumerate(zip(answer.tokens, wants, strict=True)):
            if top_logprobs is None:
                require(
                    token.logprob is None and token.top_logprobs is None,
                    "query: logprobs that were not asked for",
                )
                continue
            what = f"query: token {index}"
            self.rule.logprobs({token.token_id: token.logprob}, want, what)
            self.rule.top_logprobs(dict(token.top_logprobs), want, top_logprobs, what)
        self._check_gap(answer.gap, wants[0], "query")
        self._check_origin(answer, mirror, skip, "query")
        forwarded = len(question) - skip + len(token_ids) - 1 + committed
        require(
            answer.tokens_forwarded == forwarded or not alone,
            f"query: expected {forwarded} tokens forwarded, got {answer.tokens_forwarded}",
        )
        return records

    def _check_choices(
        self, answer: Answer, context: Context, choices: Sequence[Sequence[int]]
    ) -> None:
        """Compare choices with scores computed one by one.

        A choice that others continue has what its next tokens leave over of its probability; the
        little that may be left is the less certain.
        """
        scores, reaches, errors = [], [], []
        for choice in choices:
            records = self.history.extend(context, choice)
            wants = [self.history.logits(record) for record in (context[-1], *records)]
            reach = math.fsum(
                log_softmax(want)[token] for want, token in zip(wants[:-1], choice, strict=True)
            )
            following = {
                other[len(choice)]
                for other in choices
                if len(other) > len(choice) and tuple(other[: len(choice)]) == tuple(choice)
            }
            taken = math.fsum(np.exp(log_softmax(wants[-1])[list(following)]))
            scores.append(reach + math.log(max(1 - taken, 1e-9)))
            reaches.append(reach)
            errors.append(sum(2 * self.rule.tolerance(want) for want in wants))
        peak = max(scores)
        total = peak + math.log(math.fsum(math.exp(score - peak) for score in scores))
        shared = math.fsum(
            error * math.exp(reach - total) for error, reach in zip(errors, reaches, strict=True)
        )
        allowed = [
            shared + error * math.exp(reach - score)
            for error, reach, score in zip(errors, reaches, scores, strict=True)
        ]
        require(
            len(answer.choice_logprobs) == len(choices),
            f"choose: expected {len(choices)} logprobs, got {len(answer.choice_logprobs)}",
        )
        for index, got in enumerate(answer.choice_logprobs):
            want, what = scores[index] - total, f"choose: choice {index}"
            if allowed[index] < 0.5:
                self.rule.close(got, want, allowed[index], what)
            else:
                self.rule.close(math.exp(got), math.exp(want), 2 * shared, f"{what}: probability")
        behind = peak - scores[answer.choice]
        slack = allowed[answer.choice] + allowed[scores.index(peak)]
        require(
            behind <= slack,
            f"choose: choice {answer.choice} is {behind:.3g} behind choice {scores.index(peak)}",
        )

    def _check_origin(self, answer: Answer, mirror: Mirror, skip: int, what: str) -> None:
        source = Source.RESUMED if skip else Source.COMPUTED
        self._count(source.value)
        got = (answer.source, answer.version, answer.context_len)
        want = (source, mirror.version, len(mirror.context))
        require(got == want, f"{what}: expected source, version, context {want}, got {got}")

    def _check_gap(self, got: float, want: np.ndarray, what: str) -> None:
        self.rule.close(got, top_gap(want), 2 * self.rule.tolerance(want), f"{what}: gap")

    def _check_decision(
        self, want: np.ndarray, stops: bool, last: bool, min_gap: float, eos_ids: Sequence[int]
    ) -> None:
        """Decoding ahead goes on until an end token or a small gap, and no further."""
        gap, slack = top_gap(want), 2 * self.rule.tolerance(want)
        first, second = np.argsort(want)[::-1][:2]
        tops = {int(first), int(second)} if gap < self.rule.near_tie(want) else {int(first)}
        if stops:
            require(
                gap < min_gap + slack or bool(tops & set(eos_ids)),
                f"advance: stopped at a gap of {gap:.4g}, not below {min_gap}",
            )
        elif not last:
            require(
                gap >= min_gap - slack and not tops <= set(eos_ids),
                f"advance: went on at a gap of {gap:.4g}, below {min_gap}, or past an end token",
            )

    def _forwarded(self, what: str, before: int, want: int) -> None:
        got = self.engine.executor.tokens_forwarded - before
        require(got == want, f"{what}: expected {want} tokens forwarded, got {got}")

    # Rows of a step

    def _row(self, spec: RowSpec, length: int, cells, shifts) -> RowInput:
        depths = np.zeros(len(spec.token_ids), np.int32)
        for index, parent in enumerate(spec.parents or range(-1, len(depths) - 1)):
            depths[index] = depths[parent] + 1 if parent >= 0 else 0
        begin = length if spec.position is None else spec.position
        return RowInput(
            token_ids=np.asarray(spec.token_ids, np.int32),
            positions=(begin + depths).astype(np.int32), cells=cells, shifts=shifts,
            wanted=[len(depths) - 1], parents=spec.parents,
        )

    def _run_rows(self, specs, rows: list[RowInput], tables, one_group: bool):
        """Run one step; returns logits, greedy ids, lse and entropy of each row's last token."""
        size = self.engine.pages.page_size
        if one_group:
            common = 0
            while all(len(t) > common and t[common] == tables[0][common] for t in tables):
                common += 1
            private = [
                dataclasses.replace(row, context=pages_module.stretches(table[common:], size))
                for row, table in zip(rows, tables, strict=True)
            ]
            groups = [
                Group(rows=private, context=pages_module.stretches(tables[0][:common], size))
            ]
        else:
            members: dict[Any, list[int]] = {}
            for index, spec in enumerate(specs):
                members.setdefault((spec.session_id, tables[index]), []).append(index)
            order = [index for indices in members.values() for index in indices]
            groups = [
                Group(
                    rows=[rows[index] for index in indices],
                    context=pages_module.stretches(table, size),
                )
                for (_, table), indices in members.items()
            ]
        result = self.engine.executor.run(groups)
        outputs: list[Any] = [None] * len(rows)
        for at, index in enumerate(range(len(rows)) if one_group else order):
            outputs[index] = (
                np.asarray(result.row_logits(at)), int(result.summary.top_ids[at, 0]),
                float(result.summary.lse[at]), float(result.summary.entropy[at]),
            )
        return outputs

    def _check_rows(self, outputs, records: list[list[int]]) -> None:
        for index, (output, row) in enumerate(zip(outputs, records, strict=True)):
            logits, top_id, lse, entropy = output
            want = self.history.logits(row[-1])
            what = f"step: row {index}"
            self.rule.logits(logits, want, what)
            self.rule.greedy_token(top_id, want, what)
            logprobs = log_softmax(want)
            allowed = self.rule.tolerance(want)
            self.rule.close(lse, want[0] - logprobs[0], allowed, f"{what}: log-sum-exp")
            spread = float(np.abs(logprobs).max())
            self.rule.close(
                entropy, -(np.exp(logprobs) * logprobs).sum(), 2 * allowed * (1 + spread),
                f"{what}: entropy",
            )


def _exhaust(stream) -> Answer:
    while True:
        try:
            next(stream)
        except StopIteration as end:
            return end.value


def _common_len(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count
