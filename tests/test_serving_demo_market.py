"""`jaxstate demo market` on a tiny model, and its table, plot and figures on made-up results."""

from __future__ import annotations

import io
import json
import re

import command_line
import model_files
import numpy as np
import pytest
from command_line import run
from rich.console import Console

from jaxstate import models
from jaxstate.serving import (
    compile_cache,
    demo_market,
    local_model,
    market,
    market_plot,
    market_run,
    market_summary,
    market_view,
)
from jaxstate.serving.machine import Machine
from jaxstate.serving.market_run import Arm, RoundResult, Timing

MACHINE = Machine(name="a machine", read_bytes_per_s=2e10, flops_per_s=1.5e11)
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Holds a tiny model with long contexts, and the cache of compiled programs."""
    path = tmp_path_factory.mktemp("demo")
    command_line.write_tiny_gguf(path / "long.gguf", max_positions=8192)
    command_line.write_tiny_gguf(path / "short.gguf", max_positions=4096)
    return path


@pytest.fixture(autouse=True)
def jax_settings():
    with command_line.kept_jax_settings():
        yield


def _json_run(capsys, directory):
    """Run two rounds with --json and --plot."""
    return run(
        capsys, "demo", "market", "--model", directory / "long.gguf", "--rounds", 2, "--json",
        "--plot", directory / "market.png", "--cache-dir", directory,
    )


def _best_choice(dense, prompt, choices) -> int:
    """Index of the most probable choice by the dense forward."""
    scores = []
    for choice in choices:
        logprobs = dense.logprobs([*prompt, *choice])
        at = len(prompt) - 1
        scores.append(sum(logprobs[at + n, token_id] for n, token_id in enumerate(choice)))
    return int(np.argmax(scores))


@pytest.mark.long
def test_json_lines_equal_the_dense_forward(capsys, directory):
    result = _json_run(capsys, directory)
    assert result.status == 0, result.err
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert len(lines) == 3
    model = models.load(directory / "long.gguf")
    workload = market.tokenize(model.tokenizer)
    candles = market.candles()
    dense = command_line.Dense(model, 3072)
    for round_idx, line in enumerate(lines[:2]):
        context, question = workload.context(round_idx + 1), workload.questions[round_idx]
        assert line["round"] == round_idx + 1
        assert line["context_tokens"] == len(context)
        assert line["new_tokens"] == len(workload.rounds[round_idx])
        assert line["question_tokens"] == len(question)
        assert line["question"] == market.QUESTION_NAMES[round_idx]
        prompt, answer = [*context, *question], line["greedy_ids"]
        logits = dense.logits([*prompt, *answer[:-1]])  # every argmax is the next token: greedy
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == answer
        assert line["same_ids_in_all_arms"]
        counts = {
            "session": len(question), "warmed": len(question),
            "cold": len(question) + line["new_tokens"], "no_reuse": len(question) + len(context),
        }
        assert line["waited_tokens"] == counts
        assert all(line["first_token_ms"][arm] > 0 for arm in counts)
        assert line["append_ms"] > 0 and line["floor_ms"] > 0
        seen = candles[: 40 + 14 * (round_idx + 1)]
        truths = [
            choices[0 if truth(seen) else 1].strip()
            for choices, truth in zip(market.CHOICES, market.TRUTHS, strict=True)
        ]
        assert [answer["truth"] for answer in line["answers"].values()] == truths
    # The last round's answers; in this tokenizer a choice has several tokens, some shared.
    for idx, name in enumerate(market.QUESTION_NAMES):
        prompt = [*workload.context(2), *workload.questions[idx]]
        best = _best_choice(dense, prompt, workload.choices[idx])
        assert lines[1]["answers"][name]["model"] == market.CHOICES[idx][best].strip()
    summary = lines[2]
    assert summary["model"] == "long" and summary["rounds"] == 2
    contexts = {str(line["context_tokens"]) for line in lines[:2]}
    assert set(summary["no_reuse_over_session"]) == contexts
    assert summary["waited_tokens"]["cold"] == sum(
        line["waited_tokens"]["cold"] for line in lines[:2]
    )
    assert summary["pool_bytes"] == 256 * 64 * model.config.bytes_per_cell
    assert summary["scores"][-1]["asked"] == 6


def test_run_leaves_a_plot_and_tells_its_progress(capsys, directory):
    said = _json_run(capsys, directory).err
    assert (directory / "market.png").read_bytes().startswith(PNG_MAGIC)
    for text in (
        "MB of weights", "256 pages of 64 cells", "measuring this machine",
        "round 1/2: append of 560 tokens", "round 2/2: request without reuse",
    ):
        assert text in said
    assert re.search(r"^compiling (\d+)/\1 put pages … ", said, re.MULTILINE)


def test_terminal_shows_the_table_live_and_whole(directory):
    out = Console(file=io.StringIO(), force_terminal=True, width=80, height=50, color_system=None)
    log = Console(file=io.StringIO(), width=80)
    compile_cache.enable(directory / "xla")
    demo_market.run(
        model=str(directory / "long.gguf"), rounds=1, as_json=False, plot=None,
        cache_dir=directory, out=out, log=log,
    )
    shown = out.file.getvalue()
    assert "round 1/1: append" in shown
    final = shown[shown.rindex("milliseconds from") :]
    assert re.search(r"^ 1 +2,\d\d\d ", final, re.MULTILINE)
    assert "tokens forwarded in all rounds" in final and "overall" in final
    assert "round 1/1" not in final


def test_without_matplotlib_the_demo_says_how_to_get_it_and_runs(capsys, directory, monkeypatch):
    monkeypatch.setattr(market_plot, "is_available", lambda: False)
    result = run(
        capsys, "demo", "market", "--model", directory / "long.gguf", "--rounds", 1,
        "--plot", directory / "none.png", "--cache-dir", directory,
    )
    assert result.status == 0
    assert "matplotlib is missing, `pip install 'jaxstate[plot]'` brings it" in result.err
    assert not (directory / "none.png").exists()
    assert result.out.count("milliseconds from") == 1  # not a terminal: the table once, at the end


@pytest.mark.parametrize(
    "options, message",
    [
        (("--model", "short.gguf"), "one with contexts of more than 7680 tokens, got 4096"),
        (("--plot", "absent/market.png"), "expected a file in an existing directory"),
    ],
)
def test_what_cannot_work_is_refused_before_the_work(capsys, directory, options, message):
    arguments = [options[0], directory / options[1]]
    result = run(capsys, "demo", "market", *arguments, "--cache-dir", directory)
    assert result.status == 2
    assert message in result.err.splitlines()[-1]
    assert "compiling" not in result.err


def test_known_model_is_fetched_only_if_absent(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(local_model, "pull", lambda name, *_: asked.append(name))
    with pytest.raises(ValueError, match="run `jaxstate pull smollm2-135m`"):
        local_model.load(
            "smollm2-135m", dtype="float32", cache_dir=tmp_path,
            console=Console(file=io.StringIO()),
        )
    assert asked == ["smollm2-135m"]


def _results(rounds: int, right: int = 0) -> list[RoundResult]:
    """Made-up rounds: session 100 ms, no reuse 10 s; the model is right in the first `right`."""
    results = []
    for idx in range(rounds):
        waited = {Arm.SESSION: 19, Arm.WARMED: 19, Arm.COLD: 579, Arm.NO_REUSE: 7241}
        times = {Arm.SESSION: 100.0, Arm.WARMED: 110.0, Arm.COLD: 2500.0, Arm.NO_REUSE: 24999.0}
        timings = {
            arm: Timing(
                first_token_ms=times[arm], total_ms=times[arm] + 100, token_ids=(5, 6),
                waited_tokens=waited[arm], all_tokens=579,
            )
            for arm in Arm
            if arm is not Arm.NO_REUSE or idx in market_run.rounds_without_reuse(rounds)
        }
        results.append(
            RoundResult(
                round_idx=idx, context_tokens=2182 + 560 * idx, new_tokens=560,
                question_tokens=19, append_ms=2400.0, timings=timings,
                answers=(0, 0, 0), truths=(0, 0, 0) if idx < right else (1, 1, 1),
            )
        )
    return results


@pytest.mark.parametrize("rounds, slow", [(1, {0}), (2, {0, 1}), (3, {0, 1, 2}), (10, {0, 4, 9})])
def test_rounds_without_reuse_are_first_middle_and_last(rounds, slow):
    assert market_run.rounds_without_reuse(rounds) == slow


def test_scores_against_always_the_commonest_answer():
    score = market_summary.overall(market_summary.scores(_results(10, right=3)))
    assert (score.right, score.majority, score.asked) == (9, 21, 30)
    score = market_summary.overall(market_summary.scores(_results(4, right=3)))
    assert (score.right, score.majority, score.asked) == (9, 9, 12)


def test_ratios_and_tokens_are_summed_over_rounds():
    results = _results(10)
    assert market_summary.ratios(results) == {2182: 249.99, 4422: 249.99, 7222: 249.99}
    waited = market_summary.waited_tokens(results)
    assert waited[Arm.SESSION] == 190 and waited[Arm.COLD] == 5790
    skipped = sum(2182 + 560 * idx + 19 for idx in range(10) if idx not in (0, 4, 9))
    assert waited[Arm.NO_REUSE] == 3 * 7241 + skipped


def test_table_and_footer_fit_80_columns_and_lose_nothing():
    console = Console(file=io.StringIO(), width=80, color_system=None)
    results = _results(10)
    console.print(market_view.table(results))
    console.print(market_view.footer(results, MACHINE, model_files.tiny_config()))
    shown = console.file.getvalue()
    assert "…" not in shown
    assert shown.count("·") == 7  # rounds that did not run without reuse
    assert re.search(
        r"^10 +7,222 +2,400 +100 +110 +2,500 +24,999  rise +✗ yes +no *$", shown, re.MULTILINE
    )
    assert "250× at 7,222" in shown
    assert "always giving the commonest" in shown


def test_plot_of_one_round_is_drawn(tmp_path):
    path = tmp_path / "one.png"
    market_plot.save(path, _results(1), MACHINE, model_files.tiny_config(), "tiny")
    assert path.read_bytes().startswith(PNG_MAGIC)
