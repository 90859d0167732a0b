"""`jaxstate demo market`: real candles stream into a session, and answers come while they do."""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.models.config import ModelConfig
from jaxstate.serving import (
    local_model,
    machine,
    market,
    market_plot,
    market_run,
    market_summary,
    market_view,
    terminal,
)
from jaxstate.serving.market_run import RoundResult


def run(
    *, model: str, rounds: int, as_json: bool, plot: pathlib.Path | None, cache_dir: pathlib.Path,
    out: Console, log: Console,
) -> None:
    """Run the demo: a table or JSON lines on `out`, progress on `log`, perhaps a plot.

    Raises:
      ValueError, JaxStateError, RuntimeError, OSError: the message says what is wrong.
    """
    began = time.perf_counter()
    plot = _usable_plot(plot, log)
    local = local_model.load(model, dtype="float32", cache_dir=cache_dir, console=log)
    loaded = local.loaded
    config = market_run.engine_config(loaded.config)
    with terminal.activity(log, "measuring this machine"):
        limits = machine.measure()
    terminal.say(log, memory_line(loaded.config, config))
    with terminal.CompileProgress(log) as compiling:
        engine = Engine(
            loaded.params, loaded.config, config, tokenizer=loaded.tokenizer, progress=compiling
        )
        compile_s = compiling.seconds
    workload = market.tokenize(loaded.tokenizer)

    results: list[RoundResult] = []
    with _showing(results, rounds, as_json, out, log) as doing:
        for result in market_run.run(engine, workload, rounds, doing):
            results.append(result)
            if as_json:
                terminal.print_json(out, market_summary.round_json(result, limits, loaded.config))
    wall_s = time.perf_counter() - began
    if as_json:
        summary = {
            "model": loaded.name,
            **market_summary.summary_json(results, limits),
            "weights_bytes": machine.weights_bytes(loaded.config),
            "pool_bytes": config.num_cells * loaded.config.bytes_per_cell,
            "load_s": round(local.load_s, 2),
            "compile_s": round(compile_s, 2),
            "wall_s": round(wall_s, 2),
        }
        terminal.print_json(out, summary)
    else:
        if not out.is_terminal:
            out.print(market_view.table(results))
        out.print(market_view.footer(results, limits, loaded.config))
    if plot is not None:
        market_plot.save(plot, results, limits, loaded.config, loaded.name)
        terminal.say(log, f"plot saved as {plot}")
    terminal.say(log, f"done in {wall_s:.0f} s")


def memory_line(model: ModelConfig, config: EngineConfig) -> str:
    """Say what an engine is about to occupy."""
    weights, pool = machine.weights_bytes(model), config.num_cells * model.bytes_per_cell
    return (
        f"memory: {weights / 1e6:,.0f} MB of weights, {pool / 1e6:,.0f} MB for keys and values "
        f"({config.num_pages} pages of {config.page_size} cells of {model.bytes_per_cell:,} bytes)"
    )


def _usable_plot(plot: pathlib.Path | None, log: Console) -> pathlib.Path | None:
    """Find out before the work whether a plot can be had; the rest is worth it without one."""
    if plot is None:
        return None
    if not market_plot.is_available():
        terminal.say(
            log,
            "no plot will be drawn: matplotlib is missing, `pip install 'jaxstate[plot]'` "
            "brings it",
        )
        return None
    if not plot.absolute().parent.is_dir():
        raise ValueError(f"plot: expected a file in an existing directory, got {plot}")
    return plot


@contextlib.contextmanager
def _showing(
    results: list[RoundResult], rounds: int, as_json: bool, out: Console, log: Console
) -> Iterator[Callable[[str], None]]:
    """Show progress, and the growing table if a person is watching; yield what is told of steps."""

    def described(text: str) -> str:
        return f"round {min(len(results) + 1, rounds)}/{rounds}: {text}"

    if out.is_terminal and not as_json:
        spinner = Spinner("dots")
        with Live(console=out, refresh_per_second=4) as live:

            def doing(text: str) -> None:
                spinner.update(text=described(text))
                live.update(market_view.live(results, spinner), refresh=True)

            yield doing
            live.update(market_view.table(results))
    else:
        yield lambda text: terminal.say(log, f"{described(text)} …")
