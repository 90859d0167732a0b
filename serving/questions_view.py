"""What the demo of registered questions shows: its live table, what it comes to, and JSON."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxstate.answer import Source
from jaxstate.calibration import Calibration
from jaxstate.flash import FlashQuery
from jaxstate.serving import candle_rows, questions_run
from jaxstate.serving.candle_questions import CandleQuestion
from jaxstate.serving.questions_run import Asked, Spent

STYLES = {
    Source.FLASH: "bold green",
    Source.RESUMED: "blue",
    Source.GATED: "yellow",
    Source.COMPUTED: "red",
}


def table(history: Sequence[Sequence[Asked]], rows: int) -> Table:
    """Return the answers of the newest row; every row was asked alike.

    Args:
      history: what was asked of every row so far; not empty.
      rows: that will come altogether.
    """
    found = _table(f"row {len(history)} of {rows}: what was asked, and what came", gap=1)
    for header, justify in (
        ("question", "left"), ("asked", "left"), ("source", "left"), ("ms", "right"),
        ("version", "right"), ("age", "right"), ("tokens", "right"), ("says", "left"),
        ("right", "right"),
    ):  # fmt: skip
        found.add_column(header, justify=justify, no_wrap=True)
    newest = history[-1]
    for place, one in enumerate(newest):
        right = sum(asked[place].is_right for asked in history)
        mark = Text("✓ ", style="green") if one.is_right else Text("✗ ", style="red")
        answer = one.answer
        found.add_row(
            one.question.text, one.moment.value,
            Text(answer.source.name, style=STYLES[answer.source]), f"{one.seconds * 1e3:,.2f}",
            f"{answer.version:,}", f"{answer.age}", f"{answer.tokens_forwarded}",
            mark.append(_word(one.said_yes), style=""), f"{right}/{len(history)}",
            end_section=place + 1 < len(newest) and newest[place + 1].moment != one.moment,
        )  # fmt: skip
    return found


def footer(
    history: Sequence[Sequence[Asked]],
    gates: Mapping[CandleQuestion, Calibration],
    queries: Mapping[CandleQuestion, FlashQuery],
    ahead_tokens: int,
    without: Spent,
) -> RenderableType:
    """Return what all rows come to.

    Args:
      gates: as they were calibrated before.
      queries: the registered questions, which count what their gates did.
      ahead_tokens: forwarded meanwhile while nobody waited: rows, and answers in idle time.
      without: the same questions without the session.
    """
    inside = questions_run.spent([one for asked in history for one in asked])
    return Group(
        Text(""), _by_source(history), Text(""), _gates(gates, queries), Text(""),
        Text(
            f"{inside.questions:,} questions asked of the session: {inside.tokens:,} tokens, "
            f"{inside.seconds:.2f} seconds; rows and idle time took {ahead_tokens:,} tokens more, "
            f"for which nobody waited. Right were {inside.right:,}, without the session "
            f"{without.right:,}."
        ),
        Text(
            f"the same questions asked without the session: {without.tokens:,} tokens, "
            f"{without.seconds:.1f} seconds",
            style="bold",
        ),
    )  # fmt: skip


def row_json(asked: Sequence[Asked]) -> dict[str, Any]:
    """Return what was asked of a row as the object that --json prints."""
    return {
        "row": asked[0].row,
        "asked": [
            {
                "question": one.question.text, "asked": one.moment.value,
                "source": one.answer.source.name, "ms": round(one.seconds * 1e3, 4),
                "version": one.answer.version, "age": one.answer.age,
                "tokens_forwarded": one.answer.tokens_forwarded, "answer": _word(one.said_yes),
                "truth": _word(one.is_yes),
            }
            for one in asked
        ],
    }  # fmt: skip


def summary_json(
    history: Sequence[Sequence[Asked]],
    gates: Mapping[CandleQuestion, Calibration],
    queries: Mapping[CandleQuestion, FlashQuery],
    ahead_tokens: int,
    without: Spent,
) -> dict[str, Any]:
    """Return what all rows come to as the object that --json prints last; see footer."""
    inside = questions_run.spent([one for asked in history for one in asked])
    return {
        "gates": {
            question.text: {
                "tau": gate.tau, "risk": gate.risk, "bound": gate.bound,
                "num_effective": gate.num_effective, "num_samples": gate.num_samples,
                "fires": queries[question].fires,
                "disagreements": queries[question].disagreements,
            }
            for question, gate in gates.items()
        },
        "in_session": dataclasses.asdict(inside) | {"ahead_tokens": ahead_tokens},
        "without_session": dataclasses.asdict(without),
    }  # fmt: skip


def _by_source(history: Sequence[Sequence[Asked]]) -> Table:
    found = _table()
    found.add_column("answers by source", no_wrap=True)
    for header in ("number", "ms, median", "ms, longest", "tokens", "right"):
        found.add_column(header, justify="right", no_wrap=True)
    for source in STYLES:
        group = [one for asked in history for one in asked if one.answer.source is source]
        if not group:
            continue
        total = questions_run.spent(group)
        times = [one.seconds * 1e3 for one in group]
        found.add_row(
            Text(source.name, style=STYLES[source]), f"{total.questions:,}",
            f"{statistics.median(times):,.3f}", f"{max(times):,.3f}", f"{total.tokens:,}",
            f"{total.right / total.questions:.1%}",
        )  # fmt: skip
    return found


def _gates(
    gates: Mapping[CandleQuestion, Calibration], queries: Mapping[CandleQuestion, FlashQuery]
) -> Table:
    risk = next(iter(gates.values())).risk
    found = _table()
    found.add_column(f"gates at {risk:.1%} risk", no_wrap=True)
    for header in ("versions", "effective", "opens above", "bound", "fired", "differed"):
        found.add_column(header, justify="right", no_wrap=True)
    for question, gate in gates.items():
        query = queries[question]
        opens = "closed" if gate.tau is None else f"{gate.tau:.1f} logits"
        found.add_row(
            question.text, f"{gate.num_samples:,}", f"{gate.num_effective:,}", opens,
            f"{gate.bound:.1%}", f"{query.fires}", f"{query.disagreements}",
        )  # fmt: skip
    return found


def _table(title: str | None = None, *, gap: int = 2) -> Table:
    return Table(
        title=title, title_style="bold", box=box.SIMPLE_HEAD, show_edge=False,
        collapse_padding=True, pad_edge=False, padding=(0, gap - 1),
    )  # fmt: skip


def _word(yes: bool) -> str:
    return (candle_rows.YES if yes else candle_rows.NO).strip()
