"""The market demo's table, as it grows and when it is done."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from jaxstate.models.config import ModelConfig
from jaxstate.serving import market, market_summary
from jaxstate.serving.machine import Machine, weights_read_bytes
from jaxstate.serving.market_run import Arm, RoundResult

ARM_NAMES = {
    Arm.SESSION: "session",
    Arm.WARMED: "prefix cache, warmed before",
    Arm.COLD: "prefix cache, new rows in the request",
    Arm.NO_REUSE: "no reuse",
}


def table(results: Sequence[RoundResult]) -> Table:
    """Return the table of the rounds so far."""
    found = Table(
        title="milliseconds from a question to the first token of its answer",
        title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, collapse_padding=True,
        pad_edge=False,
    )
    for header, style, width in (
        ("\n\n#", "dim", 2),
        ("\ncontext\ntokens", "", 7),
        ("append\nnobody\nwaits", "dim", 6),
        ("\n\nsession", "bold green", 7),
        ("prefix\ncache,\nwarmed", "blue", 6),
        ("prefix\ncache,\n+ rows", "yellow", 6),
        ("\nno\nreuse", "red", 6),
    ):
        found.add_column(header, justify="right", style=style, no_wrap=True, min_width=width)
    for header, width in (("\n\nasked for", 10), ("\n\nmodel", 6), ("\n\ntruth", 5)):
        found.add_column(header, no_wrap=True, min_width=width)
    for result in results:
        found.add_row(*_cells(result))
    return found


def live(results: Sequence[RoundResult], spinner: Spinner) -> RenderableType:
    """Return the growing table with what is going on below it."""
    return Group(table(results), Text(""), spinner)


def footer(
    results: Sequence[RoundResult], machine: Machine, model: ModelConfig
) -> RenderableType:
    """Return what the rounds come to, in a few sentences and two small tables."""
    last = results[-1]
    floor = market_summary.floor_ms(machine, model, last)
    session = last.timings[Arm.SESSION]
    read = weights_read_bytes(model) + last.context_tokens * model.bytes_per_cell
    sooner = ", ".join(
        f"{ratio:,.0f}× at {context:,} tokens"
        for context, ratio in market_summary.ratios(results).items()
    )
    same = sum(result.is_same_answer for result in results)
    return Group(
        Text(""), _tokens_table(results), Text(""), _score_table(results), Text(""),
        Text(f"The session answers sooner than without reuse: {sooner}."),
        Text(
            "A prefix cache keeps up with it only where a client sends a request after every "
            "append to warm it; else the question waits for the new rows."
        ),
        Text(
            f"Greedy tokens were the same in all columns in {same} of {len(results)} rounds: "
            "nothing is approximated."
        ),
        Text(
            f"This machine, {machine.name}, reads {machine.read_bytes_per_s / 1e9:.1f} GB/s and "
            f"multiplies at {machine.flops_per_s / 1e9:.0f} GFLOP/s. The last question reads "
            f"{read / 1e6:,.0f} MB and takes {floor:.0f} ms at the very least; the session took "
            f"{session.first_token_ms / floor:.1f} times that."
        ),
        Text(_verdict(results)),
    )


def _cells(result: RoundResult) -> list[RenderableType]:
    idx = result.question_idx
    answer, truth = result.answers[idx], result.truths[idx]
    choices = [choice.strip() for choice in market.CHOICES[idx]]
    mark = Text("✓ ", style="green") if answer == truth else Text("✗ ", style="red")
    times = [
        f"{result.timings[arm].first_token_ms:,.0f}" if arm in result.timings else "·"
        for arm in (Arm.SESSION, Arm.WARMED, Arm.COLD, Arm.NO_REUSE)
    ]
    return [
        f"{result.round_idx + 1}", f"{result.context_tokens:,}",
        f"{result.append_ms:,.0f}", *times, market.QUESTION_NAMES[idx],
        mark.append(choices[answer], style=""), choices[truth],
    ]


def _tokens_table(results: Sequence[RoundResult]) -> Table:
    found = Table(box=box.SIMPLE_HEAD, show_edge=False, collapse_padding=True, pad_edge=False)
    found.add_column("tokens forwarded in all rounds", no_wrap=True)
    found.add_column("while the user waits", justify="right")
    found.add_column("altogether", justify="right")
    waited = market_summary.waited_tokens(results)
    altogether = market_summary.all_tokens(results)
    for arm, name in ARM_NAMES.items():
        found.add_row(name, f"{waited[arm]:,}", f"{altogether[arm]:,}")
    return found


def _score_table(results: Sequence[RoundResult]) -> Table:
    found = Table(box=box.SIMPLE_HEAD, show_edge=False, collapse_padding=True, pad_edge=False)
    found.add_column("right answers, all asked each round", no_wrap=True)
    found.add_column("model", justify="right")
    found.add_column("always the commonest", justify="right")
    parts = market_summary.scores(results)
    for score in (*parts, market_summary.overall(parts)):
        found.add_row(
            score.name, f"{score.right} of {score.asked}", f"{score.majority} of {score.asked}"
        )
    return found


def _verdict(results: Sequence[RoundResult]) -> str:
    score = market_summary.overall(market_summary.scores(results))
    if score.right > score.majority:
        return "The model beats the commonest answer here; so few questions prove little."
    return (
        "The model does no better than always giving the commonest answer: so small a model "
        "cannot read charts. This shows when answers come, not how good they are."
    )
