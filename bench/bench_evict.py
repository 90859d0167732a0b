"""What sliding does to answers: a slid session beside a fresh prefill of what it has kept.

    python bench/bench_evict.py [--quick] [--out FILE]

The cells of a slid session were computed while it still saw what has been evicted since; those of
the fresh one never were. bench/README.md says what the table means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import common
import jax
import numpy as np
from common import Limit
from task import candles, questions
from task.candles import Context

from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.models import loading, sources
from jaxstate.models.loaded_model import LoadedModel
from jaxstate.serving import market
from jaxstate.state import StepShape

WINDOWS = (256, 512, 1024, 1536, 2048)  # tokens, the frozen beginning included
QUICK_WINDOWS = (256, 512)
RUNS = 2  # how often the whole stream is replaced before anything is compared
PAGE = 64
SHAPES = tuple(StepShape(num_tokens=n, block_tokens=n, num_rows=8) for n in (24, 48, 256, 512))
TABLE = Limit(op=">=", value=0.0)
SAME = 1e-6  # nats; the largest divergence where nothing was evicted
MOVES = (4.0, 8.0)  # ticks an hour
ASKED = (
    (market.QUESTIONS[0], market.CHOICES[0]), (market.QUESTIONS[1], market.CHOICES[1]),
    (market.QUESTIONS[2], market.CHOICES[2]),
    ("\nQuestion: Did the last hour close above its open, yes or no?\nAnswer:", (" yes", " no")),
    ("\nQuestion: Is the last high above 1.06, yes or no?\nAnswer:", (" yes", " no")),
    ("\nThe next line is:\n", (" 1", "\n")), ("\nIn short, the euro went", (" up", " down")),
    ("\nThe highest price so far is 1.0", ("5", "6")),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A question and the first tokens of the two answers to choose between.

    Attributes:
      kind: what it is counted under.
      truth: index of the right choice; None = it is not known.
    """

    kind: str
    token_ids: Sequence[int]
    choices: tuple[int, int]
    truth: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """What a model is to read.

    Attributes:
      frozen: never evicted.
      rows: all of equal length; rows are evicted whole.
      ask: questions about the rows of this range.
    """

    model: LoadedModel
    frozen: list[int]
    rows: list[list[int]]
    ask: Callable[[range], list[Asked]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """One question's two next-token distributions.

    Attributes:
      divergence: Kullback-Leibler, of the slid session's from the fresh one's, in nats.
      same_top, same_choice: whether the likeliest token, and the likelier choice, are the same.
      right: whether each chooses the truth, (slid, fresh); None = it is not known.
    """

    kind: str
    divergence: float
    same_top: bool
    same_choice: bool
    right: tuple[bool, bool] | None


def main() -> None:
    """Measure and report."""
    args, report = common.start(
        "evict", "What sliding does to answers.", quick="two windows, few versions"
    )
    windows = QUICK_WINDOWS if args.quick else WINDOWS
    cells, sound = {}, []
    for stream, versions in ((task_stream(), 24), (market_stream(), 4)):
        for window in windows:
            before, after = compare(stream, window, 2 if args.quick else versions)
            sound.append(all(one.same_top and one.divergence < SAME for one in before))
            cell = summary(after)
            cells[f"{stream.model.name}, {window}"] = cell["same_top"]
            report.line(
                arm="evict", model=stream.model.name, window_tokens=window, **cell,
                unslid_max_divergence_nats=max(one.divergence for one in before),
            )  # fmt: skip
            common.note(f"{stream.model.name} {window}: {cell}")
    report.bar(
        "evict.quality", min(cells.values()), TABLE,
        unit="share of equal greedy first tokens, the worst cell of a table", n=len(cells),
        sound=all(sound), cells=cells,
    )  # fmt: skip
    report.table()


def summary(found: list[Compared]) -> dict[str, object]:
    """Return the fields of a cell of the table."""
    divergences = [one.divergence for one in found]
    known = [one for one in found if one.right is not None]
    fields: dict[str, object] = {
        "same_top": float(np.mean([one.same_top for one in found])),
        "same_choice": float(np.mean([one.same_choice for one in found])),
        "median_divergence_nats": common.median(divergences),
        "mean_divergence_nats": float(np.mean(divergences)),
        "questions": len(found),
    }
    if known:
        right = np.array([one.right for one in known])
        fields["accuracy_slid"], fields["accuracy_fresh"] = right.mean(axis=0).tolist()
        fields["same_choice_by_kind"] = {
            kind: float(np.mean([one.same_choice for one in known if one.kind == kind]))
            for kind in sorted({one.kind for one in known})
        }
    return fields


def compare(stream: Stream, window: int, versions: int) -> tuple[list[Compared], list[Compared]]:
    """Slide a session and compare it with fresh ones: before it slid, and after RUNS windows.

    Args:
      window: context_len.
      versions: at how many versions to compare, a quarter of the window apart.
    """
    row_tokens = len(stream.rows[0])
    per_append = max(window // 8 // row_tokens, 1)
    config = EngineConfig(
        num_pages=2 * -(-WINDOWS[-1] // PAGE) + 40, page_size=PAGE, context_len=window,
        evict_quantum=per_append * row_tokens, step_shapes=SHAPES,
    )  # fmt: skip
    engine = Engine(stream.model.params, stream.model.config, config)
    session = engine.create(stream.frozen, when_full="slide")
    fits = (window - len(stream.frozen)) // row_tokens
    done = 0

    def append(until: int) -> None:
        nonlocal done
        while done < until:
            new = stream.rows[done : min(done + per_append, until)]
            engine.append(session, [token for row in new for token in row])
            done += len(new)

    append(fits)
    assert not engine.session(session).evicted
    before = _beside_fresh(engine, session, stream, done)
    after = []
    for version in range(versions):
        append((RUNS + 1) * fits + version * max(fits // 4, 1))
        assert engine.session(session).evicted >= RUNS * fits * row_tokens
        after += _beside_fresh(engine, session, stream, done)
    return before, after


def _beside_fresh(engine: Engine, session: str, stream: Stream, done: int) -> list[Compared]:
    """Ask a session and a fresh one of the same tokens the same."""
    tokens = engine.session(session).token_ids
    kept = (len(tokens) - len(stream.frozen)) // len(stream.rows[0])
    expected = stream.frozen + [token for row in stream.rows[done - kept : done] for token in row]
    assert tokens == expected
    fresh = engine.create(tokens)
    found = []
    for asked in stream.ask(range(done - kept, done)):
        pair = [_distribution(engine, one, asked.token_ids) for one in (session, fresh)]
        found.append(_compared(asked, *pair))
    engine.close(fresh)
    return found


def _distribution(engine: Engine, session: str, question: Sequence[int]) -> np.ndarray:
    """Return the natural log-probabilities of the next token, [vocab] float64."""
    logits = engine.advance(session, question).ready.row_logits()
    return np.asarray(jax.nn.log_softmax(logits), np.float64)


def _compared(asked: Asked, slid: np.ndarray, fresh: np.ndarray) -> Compared:
    chosen = [int(np.argmax(one[list(asked.choices)])) for one in (slid, fresh)]
    right = None
    if asked.truth is not None:
        right = (chosen[0] == asked.truth, chosen[1] == asked.truth)
    return Compared(
        kind=asked.kind, divergence=float(np.sum(np.exp(fresh) * (fresh - slid))),
        same_top=int(slid.argmax()) == int(fresh.argmax()), same_choice=chosen[0] == chosen[1],
        right=right,
    )  # fmt: skip


def market_stream() -> Stream:
    """Real candles as SmolLM2 reads them, and what is asked about them."""
    model = loading.load(sources.resolve("smollm2-135m"))
    tokenizer = model.tokenizer
    assert tokenizer is not None
    asked = []
    for text, choices in ASKED:
        first, second = (tokenizer.encode(choice, continues=True)[0] for choice in choices)
        ids = tokenizer.encode(text, continues=True)
        asked.append(Asked(kind="market", token_ids=ids, choices=(first, second)))
    return Stream(
        model=model, frozen=tokenizer.encode(market.SYSTEM),
        rows=[tokenizer.encode(one.text, continues=True) for one in market.candles(300)],
        ask=lambda rows: asked,
    )  # fmt: skip


def task_stream() -> Stream:
    """Synthetic candles of the trained model, and questions of its task about the kept rows."""
    model = loading.load(common.TASK_MODEL)
    tokenizer = model.tokenizer
    assert tokenizer is not None

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, continues=True)

    rng = np.random.default_rng(0)
    count = 2400
    context = Context(
        prices=candles.synthetic(rng, count, moves=MOVES), names=candles.names_in_order(rng, count)
    )
    choices = (encode(questions.YES)[0], encode(questions.NO)[0])

    def ask(rows: range) -> list[Asked]:
        kept = context.first(rows.stop).last(len(rows))
        found = []
        for kind in questions.KINDS:
            question = None
            while question is None:
                question = questions.draw(rng, kept, kind)
            for one in (question, question.reworded()):
                truth = 0 if one.is_yes else 1
                ids = encode(one.text)
                found.append(Asked(kind=kind, token_ids=ids, choices=choices, truth=truth))
        return found

    rows = [encode("".join(candles.row_tokens(context, index))) for index in range(count)]
    return Stream(model=model, frozen=encode(candles.START), rows=rows, ask=ask)


if __name__ == "__main__":
    main()
