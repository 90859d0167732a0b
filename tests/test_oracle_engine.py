"""Hypothesis state machines over the engine's verbs, each verb compared with the reference."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
from hypothesis import stateful
from oracle import tiny
from oracle.checked import CheckedEngine
from oracle.equality import Tally
from oracle.machine import machine_for

SHORT = [
    tiny.native(tiny.GROUPED),
    tiny.WINDOWED,
    tiny.native(tiny.WINDOWED),
    tiny.ROTATING,
]
LONG = [*SHORT, tiny.GROUPED, tiny.native(tiny.ROTATING)]
# Several kinds of sliding layers under a sliding stream are the hard case.
FAMILIES = [
    tiny.of_family("llama-biases"),
    tiny.of_family("mistral"),
    tiny.of_family("mixtral"),
    tiny.of_family("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1),
    tiny.of_family("qwen3"),
    tiny.of_family("qwen3_moe-mixed"),
    tiny.of_family("gemma3_text-scaled"),
    tiny.of_family("smollm3", use_sliding_window=True, sliding_window=6),
    tiny.of_family("phi3"),
]
EVENTS = (
    "append refused",
    "choose",
    "commit",
    "paid tail given back",
    "pool full",
    "repacked",
    "past two rotation epochs",
    "query refused",
    "rest of the stream",
    "resumed",
    "rollback refused",
    "slid",
    "slid at a commit",
    "step",
    "update refused",
)
"""What some sequence must have come to, in one setup or another."""


def _run(setup: tiny.Setup, **settings) -> Tally:
    machine = machine_for(setup)
    stateful.run_state_machine_as_test(
        machine,
        settings=hypothesis.settings(
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(hypothesis.HealthCheck),
            **settings,
        ),
    )
    print(machine.tally.report(setup.name))
    machine.tally.check_near_ties()
    return machine.tally


@pytest.fixture(scope="module")
def short_tallies() -> Iterator[list[Tally]]:
    """Collects what the short runs came to; together they must have left nothing out."""
    tallies: list[Tally] = []
    yield tallies
    if len(tallies) == len(SHORT):
        total = Tally()
        for tally in tallies:
            total.add(tally)
        missing = [event for event in EVENTS if not total.events[event]]
        assert not missing, f"no sequence came to: {missing}"


@pytest.mark.parametrize("setup", SHORT, ids=lambda setup: setup.name)
def test_engine_verbs_equal_history(setup: tiny.Setup, short_tallies: list[Tally]):
    short_tallies.append(_run(setup, max_examples=26, stateful_step_count=30, derandomize=True))


def test_engine_commit_that_no_longer_fits_leaves_the_session_alone():
    setup = tiny.WINDOWED
    checked = CheckedEngine(tiny.engine_on(tiny.compiled(setup), setup), setup)
    session = checked.create([1, 2, 3], "error")
    room = setup.sizes.context_len - 3
    checked.stream_around(
        session,
        [4, 5],
        lambda: checked.append(session, [7] * room),
        taken=0,
        max_new_tokens=3,
        commit=True,
    )
    checked.query(session, [6], max_new_tokens=2)
    checked.close_all()


@pytest.mark.parametrize("setup", FAMILIES, ids=lambda setup: setup.name)
def test_engine_verbs_equal_history_in_every_family(setup: tiny.Setup):
    _run(setup, max_examples=3, stateful_step_count=25, derandomize=True)


@pytest.mark.long
@pytest.mark.parametrize("setup", FAMILIES, ids=lambda setup: setup.name)
def test_engine_verbs_equal_history_in_every_family_for_long(setup: tiny.Setup):
    _run(setup, max_examples=60, stateful_step_count=50)


@pytest.mark.long
@pytest.mark.parametrize("setup", LONG, ids=lambda setup: setup.name)
def test_engine_verbs_equal_history_for_long(setup: tiny.Setup):
    _run(setup, max_examples=200, stateful_step_count=60)
