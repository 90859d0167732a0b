"""What the rounds of the market demo come to, as numbers and as JSON."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from jaxstate.models.config import ModelConfig
from jaxstate.serving import market
from jaxstate.serving.machine import Machine
from jaxstate.serving.market_run import Arm, RoundResult


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """How often the model was right about one question, asked in every round.

    Attributes:
      name: which question.
      right: the model's right answers.
      majority: right answers of one who always says what is true most often.
      asked: number of times.
    """

    name: str
    right: int
    majority: int
    asked: int


def scores(results: Sequence[RoundResult]) -> list[Score]:
    """Return a Score for each question."""
    found = []
    for idx, name in enumerate(market.QUESTION_NAMES):
        truths = [result.truths[idx] for result in results]
        right = sum(result.answers[idx] == result.truths[idx] for result in results)
        majority = max(truths.count(0), truths.count(1))
        found.append(Score(name=name, right=right, majority=majority, asked=len(results)))
    return found


def overall(parts: Sequence[Score]) -> Score:
    """Return all questions together; the majority's answer may differ between questions."""
    return Score(
        name="overall", right=sum(part.right for part in parts),
        majority=sum(part.majority for part in parts), asked=sum(part.asked for part in parts),
    )


def ratios(results: Sequence[RoundResult]) -> dict[int, float]:
    """Return first token without reuse / in the session, by context length, where both ran."""
    return {
        result.context_tokens: result.timings[Arm.NO_REUSE].first_token_ms
        / result.timings[Arm.SESSION].first_token_ms
        for result in results
        if Arm.NO_REUSE in result.timings
    }


def waited_tokens(results: Sequence[RoundResult]) -> dict[Arm, int]:
    """Return the tokens forwarded between question and first token, all rounds together.

    Rounds that did not run without reuse count what they would have forwarded.
    """
    return _tokens(results, "waited_tokens")


def all_tokens(results: Sequence[RoundResult]) -> dict[Arm, int]:
    """Return the tokens forwarded for the rounds at all, before the question included."""
    return _tokens(results, "all_tokens")


def floor_ms(machine: Machine, model: ModelConfig, result: RoundResult) -> float:
    """Return the least time for the round's question in a session on this machine, in ms."""
    return machine.floor_s(model, result.context_tokens, result.question_tokens) * 1e3


def round_json(result: RoundResult, machine: Machine, model: ModelConfig) -> dict[str, Any]:
    """Return a round as the object that --json prints."""
    timings = {arm: result.timings.get(arm) for arm in Arm}
    return {
        "round": result.round_idx + 1,
        "context_tokens": result.context_tokens,
        "new_tokens": result.new_tokens,
        "question_tokens": result.question_tokens,
        "question": market.QUESTION_NAMES[result.question_idx],
        "append_ms": round(result.append_ms, 2),
        "first_token_ms": {
            arm.value: round(timing.first_token_ms, 2) if timing else None
            for arm, timing in timings.items()
        },
        "total_ms": {
            arm.value: round(timing.total_ms, 2) if timing and arm is not Arm.NO_REUSE else None
            for arm, timing in timings.items()
        },
        "waited_tokens": {
            arm.value: timing.waited_tokens if timing else None for arm, timing in timings.items()
        },
        "floor_ms": round(floor_ms(machine, model, result), 2),
        "greedy_ids": list(result.timings[Arm.SESSION].token_ids),
        "same_ids_in_all_arms": result.is_same_answer,
        "answers": {
            name: {
                "model": market.CHOICES[idx][result.answers[idx]].strip(),
                "truth": market.CHOICES[idx][result.truths[idx]].strip(),
            }
            for idx, name in enumerate(market.QUESTION_NAMES)
        },
    }


def summary_json(results: Sequence[RoundResult], machine: Machine) -> dict[str, Any]:
    """Return the figures over all rounds as the object that --json prints last."""
    parts = scores(results)
    return {
        "rounds": len(results),
        "first_token_p50_ms": {
            arm.value: round(statistics.median(times), 2)
            for arm in Arm
            if (times := [r.timings[arm].first_token_ms for r in results if arm in r.timings])
        },
        "no_reuse_over_session": {
            str(context): round(ratio, 2) for context, ratio in ratios(results).items()
        },
        "waited_tokens": {arm.value: count for arm, count in waited_tokens(results).items()},
        "all_tokens": {arm.value: count for arm, count in all_tokens(results).items()},
        "rounds_with_same_ids_in_all_arms": sum(result.is_same_answer for result in results),
        "scores": [dataclasses.asdict(score) for score in (*parts, overall(parts))],
        "machine": {
            "name": machine.name,
            "read_gb_per_s": round(machine.read_bytes_per_s / 1e9, 2),
            "gflop_per_s": round(machine.flops_per_s / 1e9, 1),
        },
    }


def _tokens(results: Sequence[RoundResult], field: str) -> dict[Arm, int]:
    counts = dict.fromkeys(Arm, 0)
    for result in results:
        for arm in Arm:
            timing = result.timings.get(arm)
            if timing is None:
                counts[arm] += result.context_tokens + result.question_tokens
            else:
                counts[arm] += getattr(timing, field)
    return counts
