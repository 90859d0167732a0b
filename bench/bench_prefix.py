"""Prompts with one beginning that arrive together: is it computed once, and what does that cost?

    python bench/bench_prefix.py [--quick] [--out FILE]

SmolLM2-135M in 32-bit floats, 16 prompts of 24 tokens behind 2,048 common ones, in process.
"""

from __future__ import annotations

import time

import common
import numpy as np
from common import Limit

from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.models import loading, sources
from jaxstate.serving.local_service import LocalService

PREFIX, PROMPTS, DELTA, ANSWER_TOKENS, WAIT_S = 2048, 16, 24, 4, 600.0
TIME = Limit(op="<=", value=1.15)


def main() -> None:
    """Measure and report."""
    args, report = common.start("prefix", "Prompts with one beginning.", quick="one round")
    model = loading.load(sources.resolve("smollm2-135m"))
    config = EngineConfig(
        num_pages=140, page_size=64, context_len=7680, evict_quantum=512, prefix_share=0.5
    )
    engine = Engine(model.params, model.config, config, tokenizer=model.tokenizer)
    service = LocalService(engine)
    load = common.OtherLoad(list)
    rounds = 1 if args.quick else 5
    ratios, forwarded = [], []
    for number in range(rounds + 1):  # the first warms up
        common.note(f"round {number} of {rounds}")
        rng = np.random.default_rng(number)
        vocab = model.config.vocab_size
        first, second = (rng.integers(0, vocab, PREFIX).tolist() for _ in range(2))
        deltas = [[n, *rng.integers(0, vocab, DELTA - 1).tolist()] for n in range(PROMPTS)]
        alone_s, _ = ask(service, engine, [first])
        behind_s, _ = ask(service, engine, [[*first, *delta] for delta in deltas])
        together_s, tokens = ask(service, engine, [[*second, *delta] for delta in deltas])
        ratios.append(together_s / (alone_s + behind_s))
        forwarded.append(tokens)
        service._call(engine.verbs.prefixes.tree.clear)
        report.line(
            arm="group", alone_s=alone_s, behind_s=behind_s, together_s=together_s,
            prompt_tokens_forwarded=tokens,
        )  # fmt: skip
    service.close()
    load.end("prefix")
    want = PREFIX + PROMPTS * DELTA
    report.bar(
        "prefix.group", common.median(ratios[1:]), TIME,
        unit="x (the prefix alone + the deltas behind it), to the last first token", n=rounds,
        spoiled=load.reason("prefix"), sound=set(forwarded) == {want},
        prompt_tokens_forwarded=forwarded, expected=want,
        answer_tokens_forwarded=PROMPTS * (ANSWER_TOKENS - 1),
    )  # fmt: skip
    report.table()


def ask(service: LocalService, engine: Engine, prompts: list[list[int]]) -> tuple[float, int]:
    """Submit prompts at once: (seconds to the last first token, prompt tokens forwarded)."""
    before = engine.executor.tokens_forwarded
    began = time.monotonic()
    pending = []
    for prompt in prompts:
        pending.append(service.generate(prompt, max_new_tokens=ANSWER_TOKENS))
    answers = [one.result(WAIT_S) for one in pending]
    last = max(one._ticket.first_output for one in pending)
    decoded = sum(len(answer.token_ids) - 1 for answer in answers)
    return last - began, engine.executor.tokens_forwarded - before - decoded


if __name__ == "__main__":
    main()
