"""Many sessions side by side against the history-true reference: no mismatch, no leaked cell."""

from __future__ import annotations

import atexit
import collections
import dataclasses
import shutil
import tempfile

import pytest
from oracle import tiny
from oracle.equality import Rule
from oracle.many import Many

SWAP_DIR = tempfile.mkdtemp()
atexit.register(shutil.rmtree, SWAP_DIR, ignore_errors=True)


def _tiered(setup: tiny.Setup) -> tiny.Setup:
    sizes = dataclasses.replace(setup.sizes, host_bytes=1 << 16, swap_dir=SWAP_DIR)
    return dataclasses.replace(setup, sizes=sizes)


SETUPS = [
    _tiered(setup) for setup in (tiny.GROUPED, tiny.native(tiny.WINDOWED), tiny.ROTATING)
]
EVENTS = (
    "slid", "older version", "QUERY cancelled", "EXPIRED", "append refused", "DONE",
    "moved to host", "moved to disk", "brought back", "lost", "advanced",
    "resumed", "decoded ahead",
)  # fmt: skip


def _play(setup: tiny.Setup, seed: int, operations: int) -> collections.Counter:
    rule = Rule()
    many = Many(setup, seed, rule)
    many.play(operations)
    print(setup.name, seed, dict(many.events))
    return many.events


def test_two_hundred_verbs_side_by_side_equal_history():
    total = collections.Counter()
    for seed, setup in enumerate(SETUPS):
        total += _play(setup, seed, 200)
    assert not [event for event in EVENTS if not total[event]], total
    # Rows do share steps.
    assert total["rows"] > 1.3 * total["steps"]
    # What is planned but cannot begin keeps nobody from running.
    assert total["rows"] < 10 * total["steps"]


@pytest.mark.long
@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
@pytest.mark.parametrize("seed", range(10, 13))
def test_two_thousand_verbs_side_by_side_equal_history(setup: tiny.Setup, seed: int):
    assert _play(setup, seed, 2000)["DONE"] > 60
