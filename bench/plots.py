"""Draws the benchmarks' lines that have curves to look at, each figure from what is there.

    python bench/plots.py [--results DIR]

Reads DIR/*.jsonl, by default of bench/results, and writes PNG files beside them. Needs matplotlib,
which the extra "bench" installs. What has no lines yet is left out, and said.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
GREEN, ORANGE, BLUE, GREY, RED = "#1b7f4b", "#d18b00", "#4b6cb7", "#777777", "#b4302e"
CLASSES = {"QUERY": "questions", "APPEND": "appends", "FLASH": "Flash evaluations"}
GATE_ARMS: dict[tuple[str, float | None], dict[str, Any]] = {
    ("always stale", None): {"label": "always", "color": GREY, "marker": "s", "row": -0.3},
    ("fixed tau 2.0", None): {"label": "gap over 2", "color": ORANGE, "marker": "x", "row": -0.15},
    **{
        ("calibrated", risk): {
            "label": f"calibrated, {risk:.0%}", "color": color, "marker": "o", "row": row
        }
        for risk, color, row in ((0.1, "#8fc9ab", 0.0), (0.05, "#3f9d6c", 0.15), (0.01, GREEN, 0.3))
    },
}  # fmt: skip
Line = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw all; returns the exit code."""
    parser = argparse.ArgumentParser(description="Plots of the benchmarks' lines.")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder of *.jsonl")
    folder = parser.parse_args(arguments).results
    lines = read(folder)
    for plot in PLOTS:
        drawn = 0
        for name, figure in plot.draw(lines):
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=150)
            print(path)
            drawn += 1
        if not drawn:
            print(f"{plot.name}: no lines of {plot.source} in {folder}", file=sys.stderr)
    return 0


def read(folder: pathlib.Path) -> list[Line]:
    """Return all lines of a folder.

    Raises:
      ValueError: a line is no JSON.
    """
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, text in enumerate(path.read_text().splitlines(), 1):
            try:
                found.append(json.loads(text))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: expected JSON, {error}; run again") from error
    return found


def gate_table(lines: Sequence[Line]) -> Iterator[tuple[str, Figure]]:
    """Per question: what share of versions an older answer stands for, and how often wrongly."""
    table = [line for line in lines if line.get("bench") == "gate" and "question" in line]
    for stream in dict.fromkeys(line["stream"] for line in table):
        of_stream = [line for line in table if line["stream"] == stream]
        questions = list(dict.fromkeys(line["question"] for line in of_stream))
        figure = _figure(9, 0.5 * len(questions) + 1.9)
        panels = figure.subplots(1, 2, sharey=True)
        for arm, style in GATE_ARMS.items():
            found = [line for line in of_stream if (line["arm"], line.get("risk")) == arm]
            rows = [questions.index(line["question"]) + style["row"] for line in found]
            look = {"color": style["color"], "marker": style["marker"], "linestyle": "none"}
            panels[0].plot([100 * line["coverage"] for line in found], rows, **look)
            fired = [(line, row) for line, row in zip(found, rows, strict=True) if line["coverage"]]
            panels[1].plot(
                [100 * line["disagreement"] for line, _ in fired], [row for _, row in fired],
                label=style["label"], **look,
            )  # fmt: skip
        for axes in panels:
            axes.set_ylim(len(questions) - 0.5, -0.5)
            for row in range(1, len(questions)):
                axes.axhline(row - 0.5, color=GREY, linewidth=0.4)
        panels[0].set_yticks(range(len(questions)), questions)
        panels[0].set_xlim(-3, 103)
        panels[0].set_xlabel("answered by an older version, % of held-out versions")
        panels[1].margins(x=0.05)
        panels[1].set_xlabel("of these not the fresh answer, %")
        figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
        figure.suptitle(f"When an older answer may stand: {stream}", fontsize=11)
        yield f"gate_{_slug(stream)}", figure


def flash_share(lines: Sequence[Line]) -> Iterator[tuple[str, Figure]]:
    """What share of random queries finds a fresh answer, and what idle time allows."""
    found = [line for line in lines if line.get("arm") == "share"]
    if not found:
        return
    found.sort(key=lambda line: line["queries_per_update"])
    ratios = [line["queries_per_update"] for line in found]
    figure = _figure(6, 4)
    axes = figure.add_subplot()
    for key, text, color in (
        ("possible", "what idle time allows", GREY), ("measured", "measured", GREEN)
    ):  # fmt: skip
        shares = [100 * line[key] for line in found]
        axes.plot(ratios, shares, "o-", color=color)
        at, above = (0, True) if key == "possible" else (-1, False)  # where no line passes
        _label(axes, ratios[at], shares[at], text, color, left=not above, above=above)
    axes.set_xscale("log")
    axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
    axes.minorticks_off()
    axes.set_ylim(0, 100)
    axes.set_xlabel("queries per update, both at random times")
    axes.set_ylabel("answered FLASH from the newest version, % of queries", fontsize=9)
    axes.set_title("Registered questions under updates", fontsize=11)
    yield "flash_share", figure


def resumed_tail(lines: Sequence[Line]) -> Iterator[tuple[str, Figure]]:
    """What a question costs of which all but the last tokens were paid ahead."""
    for bar in _bars(lines, "resumed.tail"):
        by_tokens = {int(m): ratio for m, ratio in bar["detail"]["by_tokens"].items()}
        figure = _figure(6, 4)
        axes = figure.add_subplot()
        axes.plot([*by_tokens], [*by_tokens.values()], "o-", color=GREEN)
        _limit(axes, bar)
        axes.axhline(1, color=GREY, linewidth=0.8)
        axes.text(max(by_tokens), 1.02, "one decode step", color=GREY, fontsize=8, ha="right")
        axes.set_xticks([*by_tokens])
        axes.set_ylim(0, 1.15 * max(*by_tokens.values(), float(bar["limit"].split()[1])))
        axes.set_xlabel("tokens of the question that were not paid ahead")
        axes.set_ylabel("time to its first token, decode steps")
        axes.set_title("Resuming behind what was paid ahead", fontsize=11)
        yield "resumed_tail", figure


def tenants_wait(lines: Sequence[Line]) -> Iterator[tuple[str, Figure]]:
    """How long verbs of each class take while many sessions act."""
    for bar in _bars(lines, "tenants.wait.p99"):
        sojourn = bar["detail"]["sojourn"]
        figure = _figure(7, 0.8 * len(sojourn) + 1.6)
        axes = figure.add_subplot()
        marks = (("p50_s", "p50", "o"), ("p99_s", "p99", "|"), ("longest_s", "longest", "x"))
        for row, times in enumerate(sojourn.values()):
            values = [1e3 * times[key] for key, _, _ in marks]
            axes.plot([values[0], values[-1]], [row, row], color=GREEN, linewidth=1)
            for value, (_, name, mark) in zip(values, marks, strict=True):
                axes.plot(value, row, mark, color=GREEN, markersize=8)
                text = f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
                text = f"{name}\n{text}" if row == 0 else text
                axes.annotate(
                    text, (value, row), xytext=(0, 8), textcoords="offset points", ha="center",
                    fontsize=8, color=GREEN,
                )  # fmt: skip
        names = [f"{CLASSES[key]}\n(n = {times['n']:,})" for key, times in sojourn.items()]
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.8)
        axes.set_xscale("log")
        axes.margins(x=0.1)
        low, high = axes.get_xlim()
        ticks = [count * 10**power for power in range(6) for count in (1, 2, 5)]
        axes.set_xticks([tick for tick in ticks if low <= tick <= high])
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.set_xlabel("from submission to the end, ms (log scale)")
        axes.set_title(f"Verbs of many sessions, busy {bar['detail']['busy']:.0%}", fontsize=11)
        yield "tenants_wait", figure


def evict_quality(lines: Sequence[Line]) -> Iterator[tuple[str, Figure]]:
    """How far answers of a session that slid are from those of a fresh one."""
    found = [line for line in lines if line.get("arm") == "evict"]
    if not found:
        return
    figure = _figure(10, 4)
    panels = figure.subplots(1, 3)
    models = dict.fromkeys(line["model"] for line in found)
    measures = (
        ("same_choice", 100, "same of two given answers, % of questions"),
        ("same_top", 100, "same likeliest token, % of questions"),
        ("median_divergence_nats", 1, "median divergence, nats (log scale)"),
    )
    for axes, (key, scale, text) in zip(panels, measures, strict=True):
        at = -1 if key == "median_divergence_nats" else 0  # where lines are apart
        highest = max(models, key=lambda model: _of(found, model)[at][key])
        for model, color in zip(models, (GREEN, BLUE, ORANGE, RED), strict=False):
            of_model = _of(found, model)
            windows = [line["window_tokens"] for line in of_model]
            values = [scale * line[key] for line in of_model]
            axes.plot(windows, values, "o-", color=color)
            above = model == highest or at < 0
            _label(axes, windows[at], values[at], model, color, left=at < 0, above=above)
        axes.set_xlabel("window, tokens")
        axes.set_xticks(sorted({line["window_tokens"] for line in found}))
        axes.tick_params(axis="x", labelrotation=45)
        axes.set_ylabel(text)
    for axes in panels[:2]:
        axes.set_ylim(0, 110)
    panels[2].set_yscale("log")
    panels[2].margins(y=0.15)
    figure.suptitle("A session that slid against a fresh one with the same tokens", fontsize=11)
    yield "evict_quality", figure


def _of(lines: Sequence[Line], model: str) -> list[Line]:
    return [line for line in lines if line["model"] == model]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """A figure, or one for each of several things.

    Attributes:
      source: which benchmark writes its lines.
      draw: yields file names without suffix, and figures; nothing where there are no lines.
    """

    name: str
    source: str
    draw: Callable[[Sequence[Line]], Iterator[tuple[str, Figure]]]


PLOTS = (
    Plot(name="gate", source="bench_gate.py", draw=gate_table),
    Plot(name="flash_share", source="bench_flash.py", draw=flash_share),
    Plot(name="resumed_tail", source="bench_flash.py", draw=resumed_tail),
    Plot(name="tenants_wait", source="bench_tenants.py", draw=tenants_wait),
    Plot(name="evict_quality", source="bench_evict.py", draw=evict_quality),
)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # optional dependency
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _bars(lines: Sequence[Line], name: str) -> list[Line]:
    """The newest bar of a name that was measured, if there is one."""
    return [line for line in lines if line.get("bar") == name and line["measured"] is not None][-1:]


def _label(
    axes: Axes, x: float, y: float, text: str, color: str, *, left: bool = False, above: bool = True
) -> None:
    """Name a point beside it."""
    axes.annotate(
        text, (x, y), xytext=(-4 if left else 4, 10 if above else -16), textcoords="offset points",
        ha="right" if left else "left", color=color, fontsize=8,
    )  # fmt: skip


def _limit(axes: Axes, bar: Line) -> None:
    """Draw a bar's limit."""
    value = float(bar["limit"].split()[1])
    axes.axhline(value, color=RED, linewidth=0.8, linestyle="--")
    axes.text(axes.get_xlim()[0], value, f" limit {value:g}", color=RED, fontsize=8, va="bottom")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


if __name__ == "__main__":
    sys.exit(main())
