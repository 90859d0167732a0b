"""The bars of the market workload, and rates of prefill and decode beside other engines."""

from __future__ import annotations

import time
from collections.abc import Callable

import common
from common import Limit
from market_run import SETTLE_S, Arm, Run
from peers.client import Asked, Peer

LAST_ANSWERS = [[4264, 198, 198, 504], [2838, 198, 198, 504]]
MICRO_PAIRS = 3
MICRO_PREFILL = 512
MICRO_DECODE = 16

ANSWERS = Limit(op="==", value=LAST_ANSWERS)
FIRST_VS_WARM = Limit(op="<=", value=1.25, goal=1.0)
FIRST_VS_COLD = Limit(op=">=", value=10, goal=14)
FOUR_VS_WARM = Limit(op="<=", value=1.25, goal=1.0)
VS_NONE = Limit(op=">=", value=50)
SLOPE = Limit(op="<=", value=1.5)
PREFILL_7K = Limit(op=">=", value=0.75, goal=0.9)
PREFILL_0 = Limit(op=">=", value=1.0)
DECODE_7K = Limit(op="<=", value=1.4, goal=1.1)

ALONE = "run with --peers DIR"
QUICK = "not run with --quick"


def market_bars(run: Run, floors: common.Floors, quick: bool) -> None:
    """Compute the bars of section market."""
    report, rounds = run.report, len(run.context)
    answers = [samples[0].answer_ids for samples in run.ours.samples]
    agree = {
        arm.name: [samples[0].answer_ids for samples in arm.samples] == answers
        for arm in run.arms[1:]
    }
    steady = all(
        asked.answer_ids == samples[0].answer_ids
        for samples in run.ours.samples for asked in samples
    )
    if quick:
        report.no_bar("market.answers", ANSWERS, unit="greedy ids, rounds 9 and 10", reason=QUICK)
    else:
        report.bar(
            "market.answers", answers[-2:], ANSWERS, unit="greedy ids, rounds 9 and 10", n=2,
            sound=steady, repeats_equal=steady, all_rounds_equal_ours=agree,
        )
    peer_bar = _ratio_bar(run)
    warm, cold = run.living(".warm"), run.living(".cold")
    ours = run.ours
    first = "best warm peer's time to the first token, p50"
    peer_bar("market.first_vs_warm", FIRST_VS_WARM, warm, Arm.first_p50, f"x {first}", True)
    peer_bar("market.first_vs_cold", FIRST_VS_COLD, cold, Arm.first_p50, "x ours, p50", False)
    peer_bar("market.four_vs_warm", FOUR_VS_WARM, warm, Arm.total_p50, "x best warm peer", True)
    if quick:
        report.no_bar("market.vs_none", VS_NONE, unit="x ours", reason=QUICK)
        report.no_bar("market.slope", SLOPE, unit="x floor", reason=QUICK)
        return
    fastest = min(run.none_ms, key=lambda name: run.none_ms[name])
    report.bar(
        "market.vs_none", run.none_ms[fastest] / ours.first_ms(-1), VS_NONE,
        unit="x ours, first token of the last round", n=1, fastest=fastest,
        spoiled=run.load.reason("no reuse") or run.load.reason(f"round {rounds}"),
        no_reuse_ms=run.none_ms, ours_ms=ours.first_ms(-1), context=run.context[-1],
    )
    slope_bar(run, floors, rounds)


def _ratio_bar(run: Run):
    """Return a function that writes a bar of ours against the best of some peers' arms."""
    def write(name, limit, arms, figure, unit, ours_first):
        if not arms:
            run.report.no_bar(name, limit, unit=unit, reason=ALONE)
            return
        figures = {arm.name: figure(arm) for arm in arms}
        best, ours = min(figures.values()), figure(run.ours)
        run.report.bar(
            name, ours / best if ours_first else best / ours, limit, unit=unit,
            n=len(run.context), spoiled=run.load.reason("round"), ours_ms=ours, peers_ms=figures,
        )

    return write


def slope_bar(run: Run, floors: common.Floors, rounds: int) -> None:
    """Compare the growth of our time to the first token per 1,000 cells with its floor."""
    model = run.engine.model
    kv_ms = 1000 * model.bytes_per_cell / floors.read_bytes_per_s * 1e3
    found = []
    for tokens, first_ms in run.slope_ms.items():
        flops = 1000 * 4 * tokens * model.num_layers * model.num_heads * model.head_dim
        flops_ms = flops / floors.flops_per_s * 1e3
        measured = 1000 * common.slope(run.context, first_ms)
        floor = max(kv_ms, flops_ms)
        found.append(
            {
                "question_tokens": tokens, "ms_per_1000": measured, "floor_ms_per_1000": floor,
                "kv_ms_per_1000": kv_ms, "flops_per_1000": flops, "flops_ms_per_1000": flops_ms,
                "ratio": measured / floor,
            }
        )
    worst = max(found, key=lambda one: one["ratio"])
    spoiled = run.load.reason("slope")
    if min(one["ratio"] for one in found) < 1:
        spoiled = "faster than the floor, so times or floor are wrong; run again"
    run.report.bar(
        "market.slope", worst["ratio"], SLOPE,
        unit=f"x floor, questions of {worst['question_tokens']} tokens (the worst length)",
        n=rounds, spoiled=spoiled, lengths=found, read_bytes_per_s=floors.read_bytes_per_s,
        flops_per_s=floors.flops_per_s, shapes_flops_per_s=floors.shapes_flops_per_s,
        kv_bytes_per_1000=1000 * model.bytes_per_cell,
    )


def micro_bars(run: Run, quick: bool) -> None:
    """Prefill and decode rates at 7k and at nothing, ours and a peer's in turn."""
    long_ids = run.workload.context(1)[:MICRO_PREFILL]
    question = list(run.workload.questions[0])
    if quick:
        for name, limit in (("micro.prefill_7k", PREFILL_7K), ("micro.decode_7k", DECODE_7K)):
            run.report.no_bar(name, limit, unit="x peer", reason=QUICK)
    else:
        _pairs(
            run, "micro.prefill_7k", PREFILL_7K, "transformers.warm",
            lambda: run.session.ask(long_ids, 1), lambda peer: peer.ask(long_ids, 1),
            lambda asked: MICRO_PREFILL / asked.first_token_ms * 1e3, "tokens_per_s",
        )
        _pairs(
            run, "micro.decode_7k", DECODE_7K, "llamacpp.warm",
            lambda: run.session.ask(question, MICRO_DECODE + 1),
            lambda peer: peer.ask(question, MICRO_DECODE + 1),
            lambda asked: (asked.total_ms - asked.first_token_ms) / MICRO_DECODE, "ms_per_token",
        )
    if peer := run.peer("llamacpp.warm"):
        peer.clear()

    def from_nothing(peer: Peer) -> Asked:
        return peer.ask(long_ids, 1, reuse=False)

    _pairs(
        run, "micro.prefill_0", PREFILL_0, "llamacpp.warm",
        lambda: run.session.ask_nobody(long_ids, 1), from_nothing,
        lambda asked: MICRO_PREFILL / asked.first_token_ms * 1e3, "tokens_per_s",
    )


def _pairs(
    run: Run, name: str, limit: Limit, peer_name: str, ask: Callable[[], Asked],
    ask_peer: Callable[[Peer], Asked], figure: Callable[[Asked], float], unit: str,
) -> None:
    """Ask ours and the peer in turn; the bar is the median of the pairs' ratios."""
    peer = run.peer(peer_name)
    ours, theirs = [], []

    def ours_once():
        time.sleep(SETTLE_S)
        ours.append(figure(ask()))

    def theirs_once():
        assert peer
        if name != "micro.prefill_0":
            peer.warm()
        time.sleep(SETTLE_S)
        theirs.append(figure(ask_peer(peer)))

    run.load.end("between rounds")
    for pair in range(MICRO_PAIRS):
        turns = [ours_once, theirs_once] if peer else [ours_once]
        for turn in turns[::-1] if pair % 2 else turns:
            turn()
    run.load.end(name)
    run.report.line(
        arm=name, **{f"ours_{unit}": ours, f"{peer_name}_{unit}": theirs},
        context=0 if name == "micro.prefill_0" else run.context[-1],
    )
    if not peer:
        run.report.no_bar(name, limit, unit=f"x {peer_name}", reason=ALONE)
        return
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    run.report.bar(
        name, common.median(ratios), limit, unit=f"x {peer_name}, {unit}", n=MICRO_PAIRS,
        spoiled=run.load.reason(name), ours=common.median(ours), peer=common.median(theirs),
        ratios=ratios,
    )
