"""`jaxstate demo questions`: answers that are there before they are asked, and what they cost."""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.live import Live

from jaxstate import drift
from jaxstate.engine import Engine
from jaxstate.serving import candle_rows, local_model, questions_run, questions_view, terminal
from jaxstate.serving.questions_run import Asked, CandleStream


def run(
    *, rows: int, versions: int, risk: float, every_s: float, as_json: bool,
    cache_dir: pathlib.Path, out: Console, log: Console,
) -> None:  # fmt: skip
    """Run the demo: a table or JSON lines on `out`, progress on `log`.

    Args:
      rows: that come while questions are asked.
      versions: rows before them, from which the gates are calibrated.
      risk: of a gated answer, see LocalService.query.
      every_s: seconds between rows.
    Raises:
      ValueError, JaxStateError, RuntimeError, OSError: the message says what is wrong.
    """
    drift.check_risk(risk)
    began = time.perf_counter()
    loaded = local_model.load(
        str(candle_rows.MODEL), dtype="float32", cache_dir=cache_dir, console=log
    ).loaded
    assert loaded.tokenizer is not None  # it is part of the checkpoint
    with terminal.CompileProgress(log) as compiling:
        engine = Engine(
            loaded.params, loaded.config, questions_run.engine_config(),
            tokenizer=loaded.tokenizer, progress=compiling,
        )  # fmt: skip
    stream = CandleStream(engine, loaded.tokenizer, rows=versions + rows, risk=risk)
    with contextlib.closing(stream):
        with terminal.counted(log, "calibrating gates, versions", versions) as advance:
            gates = stream.calibrate(versions, advance)
        forwarded = stream.tokens_forwarded
        history: list[list[Asked]] = []
        with _showing(rows, as_json, out, log) as show:
            for asked in stream.ask_while_rows_come(rows, every_s):
                history.append(asked)
                show(history)
        everything = [one for asked in history for one in asked]
        ahead = stream.tokens_forwarded - forwarded - questions_run.spent(everything).tokens
        with terminal.counted(
            log, "asking again without the session, questions", len(everything)
        ) as advance:
            without = stream.ask_without_session(everything, advance)
    if as_json:
        summary = questions_view.summary_json(history, gates, stream.queries, ahead, without)
        wall_s = round(time.perf_counter() - began, 2)
        terminal.print_json(out, {"model": loaded.name, **summary, "wall_s": wall_s})
    else:
        out.print(questions_view.footer(history, gates, stream.queries, ahead, without))
    terminal.say(log, f"done in {time.perf_counter() - began:.0f} s")


@contextlib.contextmanager
def _showing(
    rows: int, as_json: bool, out: Console, log: Console
) -> Iterator[Callable[[Sequence[Sequence[Asked]]], None]]:
    """Show every row as JSON, or in a table that is rewritten; the last one where nobody looks."""
    if as_json:
        yield lambda history: terminal.print_json(out, questions_view.row_json(history[-1]))
    elif out.is_terminal:
        with Live(console=out, auto_refresh=False) as live:
            yield lambda history: live.update(questions_view.table(history, rows), refresh=True)
    else:
        terminal.say(log, f"asking while {rows} rows come …")
        newest: list[Sequence[Sequence[Asked]]] = []
        yield lambda history: newest.__setitem__(slice(None), [history])
        out.print(questions_view.table(newest[0], rows))
