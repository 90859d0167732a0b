"""Draws the market demo: first-token latency against context, with the machine's floor."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxstate.models.config import ModelConfig
from jaxstate.serving import market_summary
from jaxstate.serving.machine import Machine
from jaxstate.serving.market_run import Arm, RoundResult
from jaxstate.serving.market_view import ARM_NAMES

STYLES: dict[Arm, dict[str, Any]] = {
    Arm.NO_REUSE: {"color": "#b4302e", "marker": "s", "linestyle": "--"},
    Arm.COLD: {"color": "#d18b00", "marker": "^"},
    Arm.WARMED: {"color": "#4b6cb7", "marker": "x", "linestyle": ":"},
    Arm.SESSION: {"color": "#1b7f4b", "marker": "o"},
}


def is_available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def save(
    path: pathlib.Path, results: Sequence[RoundResult], machine: Machine, model: ModelConfig,
    model_name: str,
) -> None:
    """Write the plot as PNG.

    Raises:
      OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # optional dependency
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for arm, style in STYLES.items():
        shown = [result for result in results if arm in result.timings]
        contexts = [result.context_tokens for result in shown]
        times = [result.timings[arm].first_token_ms for result in shown]
        axes.plot(contexts, times, label=ARM_NAMES[arm], **style)
    contexts = [result.context_tokens for result in results]
    floor = [market_summary.floor_ms(machine, model, result) for result in results]
    axes.plot(contexts, floor, color="#555555", linewidth=1)
    axes.set_yscale("log")
    low = min(floor) / 2
    axes.set_ylim(bottom=low)
    axes.fill_between(contexts, low, floor, color="#555555", alpha=0.15, linewidth=0)
    axes.text(
        contexts[-1], floor[0] / 1.5,
        f"below the machine's floor: {machine.read_bytes_per_s / 1e9:.0f} GB/s, "
        f"{machine.flops_per_s / 1e9:.0f} GFLOP/s",
        ha="right", va="center", fontsize=8, color="#555555",
    )
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    lens = [result.question_tokens for result in results]
    axes.set_xlabel(f"tokens of context (questions of {min(lens)} to {max(lens)} tokens in turn)")
    axes.set_ylabel("first token after the question, ms (log scale)")
    axes.set_title(f"Streaming candles into {model_name} on {machine.name}", fontsize=11)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
