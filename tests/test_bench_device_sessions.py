"""The device script's part about sessions, run whole at tiny sizes, and broken on purpose."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pathlib

import bare_script
import jax
import pytest

from jaxstate.models import params
from jaxstate.pages import Pages

pytestmark = pytest.mark.long
bare_script.make_importable()
device_model, device_report, device_run, device_session_check, device_sizes = (
    importlib.import_module(f"device_{name}")
    for name in ("model", "report", "run", "session_check", "sizes")
)

FULL, TINY = device_sizes.FULL.sessions, device_sizes.TINY.sessions
WAITS = {
    "flash 4 together", "flash 1 together", "paid wholly", "gate fires", "registered and fresh",
    "first token alone", "answer alone", "first token during appends", "answer during appends",
}  # fmt: skip


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    out: pathlib.Path = tmp_path_factory.mktemp("device") / "lines.jsonl"
    done = bare_script.run("--tiny", "--part", "sessions", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert out.read_text() == done.stdout
    assert "jaxstate-links-" in done.stderr.split("imported ")[-1]
    return bare_script.lines(done.stdout)


def test_answers_of_every_source_equal_those_alone_and_nothing_stays_behind(lines):
    checks = {line["check"]: line for line in lines if "check" in line}
    assert checks.keys() == {"sessions answers", "sessions left", "sessions compiled late"}
    assert all(check["holds"] and check["measured"] == 0 for check in checks.values())
    answers = checks["sessions answers"]
    assert answers["sources"] == {"computed": 16, "flash": 3, "resumed": 2}
    assert answers["answers"] == 21 and answers["near_ties"] <= 5


def test_every_wait_is_measured_and_the_bar_is_their_ratio_not_decided_on_a_cpu(lines):
    waits = {line["measure"]: line for line in lines if "measure" in line}
    assert waits.keys() == WAITS
    for wait in waits.values():
        assert wait["n"] == len(wait["samples_ms"]) >= TINY.rounds
        assert 0 < min(wait["samples_ms"]) <= wait["measured"] <= wait["p99_ms"]
        assert wait["p99_ms"] <= wait["longest_ms"] == max(wait["samples_ms"])
    assert waits["paid wholly"]["tokens_forwarded"] == 0
    # A step for the questions, and one for every token of the answer but the last.
    assert waits["flash 4 together"]["steps"] == TINY.answer_len
    [bar] = [line for line in lines if "bar" in line]
    ratio = waits["flash 4 together"]["measured"] / waits["flash 1 together"]["measured"]
    assert bar["bar"] == "h200.flash16" and bar["measured"] == pytest.approx(ratio, rel=1e-3)
    assert bar["holds"] is None and "H200" in bar["reason"]


def test_all_sessions_are_filled_and_nothing_compiles_while_they_are_asked(lines):
    arms = {line["arm"]: line for line in lines if "arm" in line}
    assert arms["sessions"]["params"] == params.num_params(TINY.model)
    assert arms["sessions"]["implementation"] == "xla"  # said, as it is not the device's
    fill, cells = arms["fill"], arms["fill"]["cells"]
    assert fill["sessions"] == fill["of"] == TINY.count
    assert cells["sessions"] == TINY.count * TINY.context
    in_pool = cells["sessions"] + cells["prefixes"] + cells["tails"] + cells["free"]
    assert arms["sessions"]["cell_bytes"] == in_pool * TINY.model.bytes_per_cell
    assert arms["appends"]["compilations"] == 0 and arms["appends"]["tokens_per_s"] > 0


def test_sessions_that_write_into_each_others_pages_do_not_hold(capsys, monkeypatch):
    start = device_session_check._engine
    sizes = dataclasses.replace(TINY, small_shapes=TINY.small_shapes[-1:])
    once = functools.cache(lambda: start(sizes, device_model.draw_params(sizes.small), "xla"))
    monkeypatch.setattr(device_session_check, "_engine", lambda *_: once())  # compiled once
    report = device_report.Report(command="test", commit="test", path=None, part="sessions")
    run = device_run.Run(report=report, kernels="xla", sizes=device_sizes.TINY)
    monkeypatch.setattr(
        Pages, "can_continue", lambda pages, entry, owner: entry.fill < pages.page_size
    )
    device_session_check.check(run)
    [answers] = [
        line for line in bare_script.lines(capsys.readouterr().out)
        if line["check"] == "sessions answers"
    ]  # fmt: skip
    assert answers["holds"] is False and answers["measured"] > 0
    assert "sessions answers" in report.failed


def test_weights_and_sessions_of_8k_fit_the_memory_of_an_h200():
    weights = sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(params.abstract_params(FULL.model))
    )
    assert params.num_params(FULL.model) == 8_030_261_248 and FULL.context == 8192
    cells = FULL.count * FULL.context * FULL.model.bytes_per_cell
    assert cells == 64 * 2**30
    assert weights + 1.05 * cells + device_model.SLACK_BYTES < 0.92 * 139 * 2**30
    assert max(shape.num_rows for shape in FULL.shapes) == FULL.questions
    tokens = max(shape.num_tokens for shape in FULL.shapes)
    assert FULL.questions * FULL.question_len <= tokens, "all questions go in one step"
