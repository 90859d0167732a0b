"""Sessions that wait outside of the pool: how long until the first token of a question.

    python bench/bench_tiers.py [--quick] [--out FILE]

SmolLM2-135M in 32-bit floats behind 7,168 tokens of candles. bench/README.md says what every bar
means.
"""

from __future__ import annotations

import tempfile
import time

import common
from common import Limit

from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.models import loading, sources
from jaxstate.serving import market
from jaxstate.tiers import Tier

CONTEXT, QUESTION_TOKENS = 7168, 19
HOST = Limit(op="<=", value=1.3)
DISK = Limit(op="<=", value=0.05)


def main() -> None:
    """Measure and report."""
    args, report = common.start(
        "tiers", "Sessions outside of the pool.", quick="a short context, few rounds"
    )
    model = loading.load(sources.resolve("smollm2-135m"))
    assert model.tokenizer is not None
    context, rounds = (1024, 3) if args.quick else (CONTEXT, 31)
    with tempfile.TemporaryDirectory() as swap_dir:
        config = EngineConfig(
            num_pages=context // 64 + 8, page_size=64, context_len=7680, evict_quantum=512,
            host_bytes=2 * context * model.config.bytes_per_cell, swap_dir=swap_dir,
        )  # fmt: skip
        engine = Engine(model.params, model.config, config, tokenizer=model.tokenizer)
        lines = "".join(candle.text for candle in market.candles(1500))
        ids = model.tokenizer.encode(market.SYSTEM + lines)
        question = ids[context : context + QUESTION_TOKENS]
        load = common.OtherLoad(list)
        began = time.perf_counter()
        session = engine.create(ids[:context])
        first = engine.query(session, question, max_new_tokens=1)
        prefill_s = time.perf_counter() - began
        report.line(arm="re-prefill", seconds=prefill_s, tokens=context)
        times: dict[str, list[float]] = {"pool": [], "host": [], "disk": []}
        moves: dict[str, list[float]] = {"all": [], "unchanged": []}
        same = True
        for _ in range(rounds + 1):
            moves["all"].append(move_out(engine, session, "host"))
            engine.query(session, question, max_new_tokens=1)
            moves["unchanged"].append(move_out(engine, session, "host"))
            # From disk it comes without a copy in host memory.
            move_out(engine, session, "disk")
            engine.query(session, question, max_new_tokens=1)
            for tier, found in times.items():
                if tier != "pool":
                    move_out(engine, session, "host" if tier == "host" else "disk")
                began = time.perf_counter()
                answer = engine.query(session, question, max_new_tokens=1)
                found.append(time.perf_counter() - began)
                same &= answer.token_ids == first.token_ids and answer.gap == first.gap
        load.end("tiers")
    medians = {tier: common.median(found[1:]) for tier, found in times.items()}
    size = context * model.config.bytes_per_cell
    report.line(
        arm="first token", **{f"{tier}_s": value for tier, value in medians.items()},
        bytes=size, host_gb_per_s=size / 1e9 / max(medians["host"] - medians["pool"], 1e-9),
    )  # fmt: skip
    spoiled = load.reason("tiers")
    report.line(
        arm="move out to host memory",
        **{f"{what}_s": common.median(found[1:]) for what, found in moves.items()},
    )
    ratios = [one / other for one, other in zip(times["host"][1:], times["pool"][1:], strict=True)]
    report.bar(
        "tier.host", common.median(ratios), HOST, unit="x the first token from the pool", n=rounds,
        spoiled=spoiled, sound=same,
    )  # fmt: skip
    report.bar(
        "tier.disk", medians["disk"] / prefill_s, DISK, unit="x re-prefill", n=rounds,
        spoiled=spoiled, sound=same,
    )  # fmt: skip
    report.table()


def move_out(engine: Engine, session: str, tier: Tier) -> float:
    """Move a session out, and wait until that is over: seconds."""
    began = time.perf_counter()
    engine.move_out(session, tier)
    engine.executor.wait()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
