"""Figures show the numbers of the lines they are drawn from."""

from __future__ import annotations

import importlib
import json
import pathlib
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
plots = importlib.import_module("plots")


def _points(axes) -> list[tuple[float, float]]:
    """All marked points of an axes."""
    lines = [line for line in axes.get_lines() if line.get_marker() not in ("None", None)]
    return [(float(x), float(y)) for line in lines for x, y in line.get_xydata()]


def _one(draw, lines):
    [(name, figure)] = draw(lines)
    return name, figure.axes


def _gate(question: str, arm: str, coverage: float, disagreement: float | None, **more) -> dict:
    return {
        "bench": "gate", "stream": "A model, data", "question": question, "arm": arm,
        "coverage": coverage, "disagreement": disagreement, **more,
    }  # fmt: skip


def test_gate_shows_coverage_and_disagreement_of_each_arm_and_nothing_where_it_never_fired():
    lines = [
        _gate("first?", "always stale", 1.0, 0.25),
        _gate("first?", "calibrated", 0.5, 0.125, risk=0.05),
        _gate("first?", "calibrated", 0.0, None, risk=0.01),
        _gate("second?", "always stale", 1.0, 0.75),
        {"bench": "gate", "arm": "valid", "coverage": 0.1},
    ]
    name, (coverage, wrong) = _one(plots.gate_table, lines)
    assert name == "gate_a_model_data"
    assert sorted(x for x, _ in _points(coverage)) == [0, 50, 100, 100]
    assert sorted(x for x, _ in _points(wrong)) == [12.5, 25, 75]
    by_row = {round(y): x for x, y in _points(wrong) if x >= 25}
    assert by_row == {0: 25, 1: 75}
    assert [text.get_text() for text in coverage.get_yticklabels()] == ["first?", "second?"]


def test_shares_are_drawn_by_ratio_measured_beside_possible():
    lines = [
        {"arm": "share", "queries_per_update": ratio, "measured": got, "possible": most}
        for ratio, got, most in ((10.0, 0.25, 0.5), (0.1, 0.75, 0.875))
    ]
    _, [axes] = _one(plots.flash_share, lines)
    assert _points(axes) == [(0.1, 87.5), (10, 50), (0.1, 75), (10, 25)]


def test_tails_are_drawn_beside_the_limit_of_their_newest_bar():
    bar = {"bar": "resumed.tail", "limit": "<= 1.3", "measured": 1.5}
    lines = [
        bar | {"detail": {"by_tokens": {"1": 9.0}}}, bar | {"measured": None},
        bar | {"detail": {"by_tokens": {"1": 1.0, "8": 1.5}}},
    ]  # fmt: skip
    _, [axes] = _one(plots.resumed_tail, lines)
    assert _points(axes) == [(1, 1.0), (8, 1.5)]
    assert any("limit 1.3" in text.get_text() for text in axes.texts)


def test_waits_of_a_class_are_drawn_in_milliseconds_on_its_row():
    sojourn = {
        "QUERY": {"n": 5, "p50_s": 0.25, "p99_s": 0.5, "longest_s": 1.0},
        "FLASH": {"n": 7, "p50_s": 1.0, "p99_s": 2.0, "longest_s": 4.0},
    }
    bar = {"bar": "tenants.wait.p99", "measured": 2.0, "detail": {"sojourn": sojourn, "busy": 0.8}}
    _, [axes] = _one(plots.tenants_wait, [bar])
    assert _points(axes) == [(250, 0), (500, 0), (1000, 0), (1000, 1), (2000, 1), (4000, 1)]
    assert "n = 7" in axes.get_yticklabels()[1].get_text()


def test_whatever_has_lines_is_written_and_the_rest_is_said(tmp_path, capsys):
    (tmp_path / "evict_cpu.jsonl").write_bytes(
        (ROOT / "bench" / "results" / "evict_cpu.jsonl").read_bytes()
    )
    assert plots.main(["--results", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.glob("*.png")] == ["evict_quality.png"]
    assert (tmp_path / "evict_quality.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(plots.PLOTS) - 1 and all("no lines of bench_" in one for one in said)


def test_quality_by_window_is_drawn_as_it_was_measured():
    path = ROOT / "bench" / "results" / "evict_cpu.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    _, (choice, top, divergence) = _one(plots.evict_quality, lines)
    cells = [line for line in lines if line.get("arm") == "evict"]
    for axes, key, scale in (
        (choice, "same_choice", 100), (top, "same_top", 100),
        (divergence, "median_divergence_nats", 1),
    ):  # fmt: skip
        drawn = sorted(_points(axes))
        wanted = sorted((line["window_tokens"], scale * line[key]) for line in cells)
        np.testing.assert_allclose(drawn, wanted)


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"arm": "share"}\n{"arm":\n')
    with pytest.raises(ValueError, match=r"x\.jsonl:2: expected JSON"):
        plots.read(tmp_path)
