"""The task that a small model masters: questions about rows at random distance, by an engine.

    python bench/bench_task.py [--model DIR] [--quick] [--out FILE]

bench/README.md says what every bar means; `python -m task.train_task`, from bench/, trains the
model.
"""

from __future__ import annotations

import argparse
import pathlib

import common
from common import Limit, Report
from task import evaluate
from task.evaluate import Source, Tally

from jaxstate.models import loading
from jaxstate.models.params import num_params

UNIT = "balanced accuracy"
SHORT = (29, 56)  # rows: 262 to 505 tokens
LONGER = {"1k": 113, "2k": 227, "4k": 454}  # rows: 1,018, 2,044 and 4,087 tokens
ENOUGH = Limit(op=">=", value=0.95)
ABOVE = Limit(op=">=", value=0.2)


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description="The task that a small model masters.")
    parser.add_argument(
        "--model", type=pathlib.Path, default=common.TASK_MODEL, help="checkpoint directory"
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the questions")
    parser.add_argument("--out", type=pathlib.Path, help="write the JSON lines here, too")
    args = parser.parse_args()
    command = "python bench/bench_task.py" + (" --quick" if args.quick else "")
    report = Report("task", command=command, quick=args.quick, path=args.out)
    model = loading.load(args.model)
    report.line(
        arm="machine", model=model.name, params=num_params(model.config), **common.machine_facts()
    )
    engine = evaluate.engine_of(model, evaluate.num_tokens(LONGER["4k"]))
    short, long = (40, 10) if args.quick else (500, 100)

    def measure(arm: str, source: Source, count: int, rows: tuple[int, int]) -> Tally:
        tally = evaluate.ask(
            engine, model, evaluate.cases(0, count, rows, source), last_row=arm == "last row"
        )
        line(arm, source, rows, tally)
        return tally

    def line(arm: str, source: Source, rows: tuple[int, int], tally: Tally) -> None:
        report.line(
            arm=arm,
            candles=source,
            tokens=[evaluate.num_tokens(count) for count in rows],
            balanced_accuracy=tally.balanced,
            kinds=tally.by_kind(),
            yes_share=tally.yes_share,
            opposite_answers=tally.opposed,
            questions=tally.count,
        )

    for source in ("synthetic", "real"):
        whole = measure("all rows", source, short, SHORT)
        last = measure("last row", source, short, SHORT)
        rule = evaluate.guess_from_last_row(evaluate.cases(0, short, SHORT, source))
        line("rule", source, SHORT, rule)
        name = "task" if source == "synthetic" else "task.real"
        bars(report, name, whole, {"model, last row": last, "rule, last row": rule})
    for length, rows in LONGER.items():
        for source in ("synthetic", "real"):
            tally = measure("all rows", source, long, (rows, rows))
            if length == "4k":
                name = "task.4k" if source == "synthetic" else "task.real_4k"
                report.bar(
                    name,
                    tally.balanced,
                    Limit(op=">=", value=0.0, goal=0.9),
                    unit=UNIT,
                    n=tally.count,
                    kinds=tally.by_kind(),
                )
    report.table()


def bars(report: Report, name: str, tally: Tally, baselines: dict[str, Tally]) -> None:
    """Write the bars at 256 to 512 tokens: the accuracy itself and what the context is worth."""
    report.bar(
        name,
        tally.balanced,
        ENOUGH,
        unit=UNIT,
        n=tally.count,
        kinds=tally.by_kind(),
        yes_share=tally.yes_share,
    )
    best = max(baselines, key=lambda key: baselines[key].balanced)
    report.bar(
        f"{name}.context",
        tally.balanced - baselines[best].balanced,
        ABOVE,
        unit="balanced accuracy above the best baseline",
        n=tally.count,
        best=best,
        baselines={key: baseline.balanced for key, baseline in baselines.items()},
    )
    report.bar(
        f"{name}.opposite",
        tally.opposed,
        ENOUGH,
        unit="share of opposite wordings",
        n=tally.count // 2,
    )


if __name__ == "__main__":
    main()
