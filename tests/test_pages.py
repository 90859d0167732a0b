"""Pages and tables: nothing is shared by accident, rewritten while seen, or lost."""

from __future__ import annotations

import collections
import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxstate import pages as pages_module
from jaxstate.errors import CapacityError
from jaxstate.pages import Entry, Pages

SETTINGS = hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
PAGE_SIZE = 4
CHOICE = st.integers(0, 2**16)


def _zeros(count):
    return np.zeros(count, np.int32)


def _grow(pages, owner, entries, position, count, *, shift=0, growing=True):
    """Extend a table and hold it, as a session does."""
    growth = pages_module.plan_growth(
        pages, owner, entries, position, np.full(count, shift, np.int32), growing=growing
    )
    pages.replace(entries, growth.entries)
    return growth


# Allocation


def test_pages_follow_the_page_they_continue():
    pages = Pages(8, PAGE_SIZE)
    assert pages.allocate(0, 2, after=None, growing=True) == [0, 1]
    assert pages.allocate(0, 2, after=1, growing=True) == [2, 3]


def test_pages_go_elsewhere_when_the_neighbour_is_taken():
    pages = Pages(8, PAGE_SIZE)
    pages.allocate(0, 2, after=None, growing=True)
    pages.allocate(1, 1, after=1, growing=True)
    assert pages.allocate(0, 2, after=1, growing=True)[0] > 2


def test_last_page_has_no_neighbour():
    pages = Pages(4, PAGE_SIZE)
    (last,) = pages.allocate(0, 1, after=2, growing=True)
    assert last == 3
    assert pages.allocate(0, 1, after=3, growing=True) == [0]


def test_second_growing_owner_leaves_the_first_room():
    pages = Pages(16, PAGE_SIZE)
    pages.allocate(0, 2, after=None, growing=True)
    (start,) = pages.allocate(1, 1, after=None, growing=True)
    assert start == 2 + 14 // 2
    assert pages.allocate(0, 7, after=1, growing=True) == [2, 3, 4, 5, 6, 7, 8]


def test_growing_owner_that_needs_more_than_half_the_room_still_gets_neighbours():
    pages = Pages(16, PAGE_SIZE)
    pages.allocate(0, 4, after=None, growing=True)
    assert pages.allocate(1, 10, after=None, growing=True) == list(range(6, 16))


def test_tails_take_the_far_end_of_the_tightest_gap():
    pages = Pages(12, PAGE_SIZE)
    pages.allocate(0, 12, after=None, growing=True)
    pages.release_unused([1, 4, 5, 6, 8, 9])  # gaps of 1, 3 and 2 pages
    assert pages.allocate(1, 2, after=None, growing=False) == [8, 9]
    assert pages.allocate(1, 1, after=None, growing=False) == [1]
    assert pages.allocate(1, 2, after=None, growing=False) == [5, 6]


def test_tail_larger_than_any_gap_is_split():
    pages = Pages(6, PAGE_SIZE)
    pages.allocate(0, 6, after=None, growing=True)
    pages.release_unused([0, 2, 3])
    assert pages.allocate(1, 3, after=None, growing=False) == [2, 3, 0]


def test_refused_allocation_takes_nothing_and_says_what_to_do():
    pages = Pages(4, PAGE_SIZE)
    pages.allocate(0, 2, after=None, growing=True)
    with pytest.raises(CapacityError, match="needs 3 pages of 4 cells, 2 of 4 can be had; close"):
        pages.allocate(1, 3, after=None, growing=True)
    assert pages.num_free == 2
    assert pages.owned_by(1) == []
    assert len(pages.allocate(1, 2, after=None, growing=True)) == 2


@SETTINGS
@hypothesis.given(
    st.lists(
        st.tuples(
            st.sampled_from(["allocate", "hold", "drop", "replace", "release", "disown"]),
            CHOICE,
            CHOICE,
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_any_sequence_of_calls_neither_aliases_nor_leaks(calls):
    pages = Pages(9, PAGE_SIZE)
    owners: dict[int, int | None] = {}  # by allocated page
    held: list[Entry] = []

    def forget(entry):
        held.remove(entry)
        if all(other.page != entry.page for other in held):
            del owners[entry.page]

    for name, first, second, growing in calls:
        unheld = [page for page in owners if all(page != entry.page for entry in held)]
        if name == "allocate":
            count, owner = first % 4, second % 3
            after = sorted(owners)[second % len(owners)] if owners and growing else None
            if count > 9 - len(owners):
                with pytest.raises(CapacityError):
                    pages.allocate(owner, count, after=after, growing=growing)
            else:
                taken = pages.allocate(owner, count, after=after, growing=growing)
                assert len(set(taken)) == count
                assert not owners.keys() & set(taken)
                assert all(0 <= page < 9 for page in taken)
                owners |= dict.fromkeys(taken, owner)
        elif name == "hold" and owners:
            page = sorted(owners)[first % len(owners)]
            entry = Entry(page=page, first=0, fill=1 + second % PAGE_SIZE, base=0, shift=0)
            pages.hold([entry])
            held.append(entry)
        elif name == "drop" and held:
            entry = held[first % len(held)]
            pages.drop([entry])
            forget(entry)
        elif name == "replace" and held:
            entry = held[first % len(held)]
            shorter = entry._replace(fill=1 + second % entry.fill)
            pages.replace([entry], [shorter])
            held.append(shorter)
            forget(entry)
            assert shorter.page in owners
        elif name == "release":
            pages.release_unused(list(owners))
            for page in unheld:
                del owners[page]
        elif name == "disown":
            heir = second % 3 if growing else None
            pages.disown(first % 3, heir)
            for page, owner in owners.items():
                if owner == first % 3:
                    owners[page] = heir
        assert pages.num_free == 9 - len(owners)
        for owner in range(3):
            wanted = {page for page, holder in owners.items() if holder == owner}
            assert set(pages.owned_by(owner)) == wanted
        references = collections.Counter(entry.page for entry in held)
        for page in owners:
            assert pages.header(page).references == references[page]


@SETTINGS
@hypothesis.given(
    st.lists(st.integers(0, 5), max_size=8),
    st.lists(st.integers(0, 5), max_size=8),
    st.lists(st.integers(0, 5), max_size=3),
    st.integers(0, 9),
)
def test_requirement_counts_what_given_up_tables_would_free(others, released, staying, count):
    pages = Pages(8, PAGE_SIZE)
    taken = pages.allocate(0, 6, after=None, growing=True)
    entries = [Entry(page=page, first=0, fill=1, base=0, shift=0) for page in taken]
    pages.hold(entries[page] for page in [*others, *released])
    given_up = [entries[page] for page in released]
    kept = {*others, *staying}
    unheld = {*range(6)} - {*others, *released}  # allocated, not free
    can_be_had = 8 - len(unheld) - len(kept - unheld)
    can_be_had -= len({*released} & unheld)
    arguments = (count, given_up)
    stay = [entries[page] for page in staying]
    if count > can_be_had:
        never = count + -(-len(stay) // PAGE_SIZE) > 8
        why = "the pool has 8" if never else f"{can_be_had} of 8 can"
        with pytest.raises(CapacityError, match=f"needs {count} pages .* {why}"):
            pages.require(*arguments, staying=stay)
    else:
        pages.require(*arguments, staying=stay)


# Who may write where


def test_fork_lets_the_parent_continue_in_place_and_the_child_on_a_fresh_page():
    pages = Pages(8, PAGE_SIZE)
    parent = _grow(pages, 0, (), 0, 6).entries
    pages.hold(parent)  # the child's table
    grown = _grow(pages, 0, parent, 6, 1)
    assert grown.cells.tolist() == [1 * PAGE_SIZE + 2]
    assert grown.new_pages == ()
    child = _grow(pages, 1, parent, 6, 1)
    assert child.new_pages == (child.entries[-1].page,)
    assert child.entries[:-1] == parent
    assert child.entries[-1].page not in {entry.page for entry in grown.entries}


def test_child_that_appends_first_still_leaves_the_parents_page_alone():
    pages = Pages(8, PAGE_SIZE)
    parent = _grow(pages, 0, (), 0, 6).entries
    pages.hold(parent)
    child = _grow(pages, 1, parent, 6, 1)
    assert child.cells[0] // PAGE_SIZE not in {entry.page for entry in parent}


def test_rollback_beside_a_fork_rewrites_nothing():
    pages = Pages(8, PAGE_SIZE)
    parent = _grow(pages, 0, (), 0, 7).entries
    pages.hold(parent)
    cut = pages_module.cut_end(parent, 5)
    pages.replace(parent, cut)
    grown = _grow(pages, 0, cut, 5, 1)
    assert grown.cells[0] // PAGE_SIZE != parent[-1].page


def test_rollback_alone_rewrites_in_place():
    pages = Pages(8, PAGE_SIZE)
    entries = _grow(pages, 0, (), 0, 7).entries
    cut = pages_module.cut_end(entries, 5)
    pages.replace(entries, cut)
    assert _grow(pages, 0, cut, 5, 2).cells.tolist() == [PAGE_SIZE + 1, PAGE_SIZE + 2]


def test_parent_may_rewrite_again_once_the_fork_is_gone():
    pages = Pages(8, PAGE_SIZE)
    parent = _grow(pages, 0, (), 0, 7).entries
    pages.hold(parent)
    cut = pages_module.cut_end(parent, 5)
    pages.replace(parent, cut)
    pages.drop(parent)  # the child closes
    assert _grow(pages, 0, cut, 5, 1).new_pages == ()


def test_pages_of_a_gone_owner_are_read_only_unless_inherited():
    for heir, continues in ((None, False), (1, True)):
        pages = Pages(8, PAGE_SIZE)
        entries = _grow(pages, 0, (), 0, 6).entries
        pages.disown(0, heir)
        assert pages.can_continue(entries[-1], 0) is False
        assert (_grow(pages, 1, entries, 6, 1).new_pages == ()) is continues


def test_new_shift_or_a_gap_in_position_begins_a_new_entry():
    for position, shift in ((6, 1), (7, 0)):
        pages = Pages(8, PAGE_SIZE)
        entries = _grow(pages, 0, (), 0, 6).entries
        grown = _grow(pages, 0, entries, position, 1, shift=shift)
        assert grown.entries[:-1] == entries
        assert grown.entries[-1] == Entry(page=2, first=0, fill=1, base=position, shift=shift)


def test_shift_that_changes_among_the_new_tokens_splits_them():
    pages = Pages(8, PAGE_SIZE)
    entries = _grow(pages, 0, (), 0, 2).entries
    shifts = np.asarray([0, 0, 0, 7, 7], np.int32)
    growth = pages_module.plan_growth(pages, 0, entries, 2, shifts, growing=True)
    assert growth.entries == (
        Entry(page=0, first=0, fill=4, base=0, shift=0),
        Entry(page=1, first=0, fill=1, base=4, shift=0),
        Entry(page=2, first=0, fill=2, base=5, shift=7),
    )
    assert growth.cells.tolist() == [2, 3, 4, 8, 9]


@dataclasses.dataclass
class _Table:
    """A session as this test sees it: what it wrote, by position."""

    owner: int
    entries: tuple[Entry, ...]
    written: list[tuple[int, int]]  # (unique token, rotation) by position


class _World:
    """Tables over one pool, and a memory that records what was last written to each cell."""

    def __init__(self):
        self.pages = Pages(12, PAGE_SIZE)
        self.memory: dict[int, int] = {}
        self.tables: list[_Table] = [_Table(owner=0, entries=(), written=[])]
        self.num_owners = 1
        self.num_tokens = 0

    def grow(self, table, count, shift_change, growing):
        position = len(table.written)
        shift = table.entries[-1].shift if table.entries else 0
        shifts = np.full(count, shift, np.int32)
        shifts[count // 2 :] += shift_change
        args = (self.pages, table.owner, table.entries, position, shifts)
        needed = pages_module.pages_needed(*args)
        free = self.pages.num_free
        if needed > free:
            owned = sorted(self.pages.owned_by(table.owner))
            with pytest.raises(CapacityError):
                pages_module.plan_growth(*args, growing=growing)
            assert self.pages.num_free == free
            assert sorted(self.pages.owned_by(table.owner)) == owned
            return
        growth = pages_module.plan_growth(*args, growing=growing)
        assert len(growth.new_pages) == needed == free - self.pages.num_free
        assert len(growth.cells) == count
        np.testing.assert_array_equal(growth.shifts, shifts)
        self.pages.replace(table.entries, growth.entries)
        table.entries = growth.entries
        for offset, cell in enumerate(growth.cells.tolist()):
            self.num_tokens += 1
            self.memory[cell] = self.num_tokens
            rotation = position + offset - int(shifts[offset])
            table.written.append((self.num_tokens, rotation))

    def fork(self, table):
        self.pages.hold(table.entries)
        self.tables.append(_Table(self.num_owners, table.entries, list(table.written)))
        self.num_owners += 1

    def query(self, table, count):
        """A tail of another owner, dropped at once."""
        shifts = _zeros(count)
        position = len(table.written)
        owner = self.num_owners
        self.num_owners += 1
        if pages_module.pages_needed(self.pages, owner, table.entries, position, shifts) > (
            self.pages.num_free
        ):
            return
        growth = pages_module.plan_growth(
            self.pages, owner, table.entries, position, shifts, growing=False
        )
        self.pages.hold(growth.entries)
        self.memory |= dict.fromkeys(growth.cells.tolist(), -1)
        self.pages.drop(growth.entries)

    def close(self, table):
        self.pages.drop(table.entries)
        self.pages.disown(table.owner, None)
        self.tables.remove(table)

    def cut(self, table, entries, written):
        self.pages.replace(table.entries, entries)
        table.entries, table.written = entries, written

    def check(self):
        for table in self.tables:
            seen = _seen(table.entries)
            assert sorted(seen) == list(range(len(table.written)))
            for position, (cell, rotation) in seen.items():
                assert (self.memory[cell], rotation) == table.written[position]
        held = {entry.page for table in self.tables for entry in table.entries}
        assert self.pages.num_free == self.pages.num_pages - len(held)


def _seen(entries, page_size=PAGE_SIZE):
    """Position -> (pool cell, rotation of its key), checking that no position comes twice."""
    seen = {}
    for page, first, fill, base, shift in entries:
        for cell in range(first, fill):
            assert base + cell not in seen
            seen[base + cell] = (page * page_size + cell, base + cell - shift)
    return seen


@SETTINGS
@hypothesis.given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["grow", "grow", "grow", "fork", "query", "close", "rollback", "evict"]
            ),
            CHOICE,
            CHOICE,
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_no_cell_is_rewritten_while_a_table_sees_it(calls):
    world = _World()
    for name, first, second, flag in calls:
        if not world.tables:
            break
        table = world.tables[first % len(world.tables)]
        length = len(table.written)
        if name == "grow":
            world.grow(table, 1 + second % 9, 3 if flag else 0, growing=first % 2 == 0)
        elif name == "fork":
            world.fork(table)
        elif name == "query":
            world.query(table, 1 + second % 9)
        elif name == "close" and len(world.tables) > 1:
            world.close(table)
        elif name == "rollback" and length:
            kept = second % length
            entries = pages_module.cut_end(table.entries, kept)
            world.cut(table, entries, table.written[:kept])
        elif name == "evict" and length:
            begin = second % length
            count = 1 + first % (length - begin)
            entries = pages_module.cut_middle(table.entries, begin, count)
            world.cut(table, entries, table.written[:begin] + table.written[begin + count :])
        world.check()
    for table in list(world.tables):
        world.close(table)
    assert world.pages.num_free == world.pages.num_pages


# Tables


@st.composite
def _tables(draw):
    """A table of contiguous positions over distinct pages, holes at the pages' ends allowed."""
    entries, position = [], draw(st.integers(0, 3))
    pages = draw(st.one_of(st.permutations(range(6)), st.just(range(6))))
    for page in pages[: draw(st.integers(0, 6))]:
        first = draw(st.sampled_from([0, 0, 0, 1, 2, 3]))
        fill = draw(st.sampled_from([PAGE_SIZE, PAGE_SIZE, *range(first + 1, PAGE_SIZE)]))
        shift = draw(st.sampled_from([0, 0, 0, 2]))
        entries.append(Entry(page, first, fill, position - first, shift))
        position += fill - first
    return tuple(entries)


@SETTINGS
@hypothesis.given(_tables(), st.integers(-2, 30))
def test_cut_end_keeps_exactly_the_cells_before(entries, position):
    wanted = {at: what for at, what in _seen(entries).items() if at < position}
    cut = pages_module.cut_end(entries, position)
    assert _seen(cut) == wanted
    assert pages_module.cells_used(cut) == len(wanted)
    assert all(entry.first < entry.fill for entry in cut)


@SETTINGS
@hypothesis.given(_tables(), st.integers(0, 30), st.integers(0, 12))
def test_cut_middle_closes_the_gap_and_keeps_every_rotation(entries, position, count):
    wanted = {}
    for at, what in _seen(entries).items():
        if at < position:
            wanted[at] = what
        elif at >= position + count:
            wanted[at - count] = what
    cut = pages_module.cut_middle(entries, position, count)
    assert _seen(cut) == wanted
    assert [entry.base + entry.first for entry in cut] == sorted(
        entry.base + entry.first for entry in cut
    )
    assert all(entry.first < entry.fill for entry in cut)


@SETTINGS
@hypothesis.given(_tables(), st.booleans())
def test_stretches_join_exactly_neighbours(entries, in_pool_order):
    if in_pool_order:
        entries = tuple(sorted(entries))
    stretches = pages_module.stretches(entries, PAGE_SIZE)
    found = [
        (cell, base + cell, base + cell - shift)
        for begin, end, base, shift in stretches
        for cell in range(begin, end)
    ]
    assert found == [
        (cell, position, rotation) for position, (cell, rotation) in _seen(entries).items()
    ]
    for left, right in zip(stretches, stretches[1:], strict=False):
        mergeable = (left.end, left.base, left.shift) == (right.begin, right.base, right.shift)
        assert not mergeable


@pytest.mark.parametrize(
    "second",
    [Entry(1, 0, 2, 4, 3), Entry(1, 0, 2, 5, 0), Entry(1, 1, 2, 3, 0), Entry(2, 0, 2, 4, 0)],
    ids=["other shift", "gap in position", "gap in the pool", "page between"],
)
def test_cells_that_differ_in_anything_stay_apart(second):
    first = Entry(page=0, first=0, fill=4, base=0, shift=0)
    assert len(pages_module.stretches([first, second], PAGE_SIZE)) == 2


def test_full_neighbouring_pages_become_one_stretch():
    pages = Pages(8, PAGE_SIZE)
    entries = _grow(pages, 0, (), 0, 11).entries
    assert pages_module.stretches(entries, PAGE_SIZE) == [(0, 11, 0, 0)]
