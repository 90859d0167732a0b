"""Many sessions side by side against the history-true reference: no mismatch, no leaked cell."""

from __future__ import annotations

import atexit
import collections
import dataclasses
import shutil
import tempfile

import pytest
from oracle import tiny
from oracle.equality import Mismatch, Rule
from oracle.many import Many

from jaxstate.answer import Source
from jaxstate.flash import FlashBoard

SWAP_DIR = tempfile.mkdtemp()
atexit.register(shutil.rmtree, SWAP_DIR, ignore_errors=True)


def _tiered(setup: tiny.Setup) -> tiny.Setup:
    sizes = dataclasses.replace(setup.sizes, host_bytes=3 << 15, swap_dir=SWAP_DIR)
    return dataclasses.replace(setup, sizes=sizes)


SETUPS = [_tiered(setup) for setup in (tiny.GROUPED, tiny.native(tiny.WINDOWED), tiny.ROTATING)]
EVENTS = (
    "slid", "older version", "QUERY cancelled", "EXPIRED", "append refused", "DONE",
    "moved to host", "moved to disk", "brought back", "lost", "advanced",
    "resumed", "decoded ahead", "evaluated", "flash", "gated", "stale",
)  # fmt: skip


def _play(setup: tiny.Setup, seed: int, operations: int) -> collections.Counter:
    rule = Rule()
    many = Many(setup, seed, rule)
    many.play(operations)
    print(setup.name, seed, dict(many.events))
    return many.events


def test_two_hundred_verbs_side_by_side_equal_history():
    total = collections.Counter()
    for seed, setup in zip((0, 4, 5), SETUPS, strict=True):
        total += _play(setup, seed, 200)
    assert not [event for event in EVENTS if not total[event]], total
    # Rows do share steps.
    assert total["rows"] > 1.3 * total["steps"]
    # What is planned but cannot begin keeps nobody from running.
    assert total["rows"] < 10 * total["steps"]


def _ignore_version(self, question, version, *, stale=False):
    query = self.find(question)
    if query is None or query.answer is None:
        return None
    return dataclasses.replace(query.answer, source=Source.FLASH, tokens_forwarded=0, age=0)


def _claim_to_be_current(self, query, version, risk):
    answer = GATED(self, query, version, risk)
    return answer and dataclasses.replace(answer, version=version, age=0)


def _let_another_question_answer(self, query, version, risk):
    answer = GATED(self, query, version, risk)
    other = self.queries[0].answer
    return answer and other and dataclasses.replace(answer, token_ids=other.token_ids)


GATED = FlashBoard.gated
MUTATIONS = {
    "a look-up ignores the version": ("look_up", _ignore_version, "not of the newest version"),
    "a gate's answer is given as current": ("gated", _claim_to_be_current, "as if it were of"),
    "a gate answers another question": (
        "gated", _let_another_question_answer, "not the full answer of its version",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_of_stored_answers_is_reported(monkeypatch: pytest.MonkeyPatch, name: str):
    method, mutant, message = MUTATIONS[name]
    monkeypatch.setattr(FlashBoard, method, mutant)
    with pytest.raises(Mismatch, match=message):
        _play(SETUPS[0], 0, 200)


@pytest.mark.long
@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
@pytest.mark.parametrize("seed", range(10, 13))
def test_two_thousand_verbs_side_by_side_equal_history(setup: tiny.Setup, seed: int):
    assert _play(setup, seed, 2000)["DONE"] > 60
