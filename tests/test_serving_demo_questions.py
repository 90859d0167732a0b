"""`jaxstate demo questions`: what is true, what it counts, and a short run with its real model."""

from __future__ import annotations

import io
import json
import re

import command_line
import numpy as np
import pytest
from command_line import run
from rich.console import Console

from jaxstate import models
from jaxstate.answer import Answer, FinishReason, Source
from jaxstate.calibration import Calibration
from jaxstate.engine import Engine
from jaxstate.flash import FlashQuery, Question
from jaxstate.serving import (
    candle_questions,
    candle_rows,
    compile_cache,
    demo_questions,
    questions_run,
    questions_view,
)
from jaxstate.serving.candle_questions import CandleQuestion
from jaxstate.serving.candle_rows import Context
from jaxstate.serving.questions_run import Asked, CandleStream, Moment, Spent

ROW = re.compile(r"c(\d\d)( [A-Za-z]\d) h(\d\d) l(\d\d) o(\d\d)\n")
QUESTION = re.compile(r"(close|high|low)( last \d| ..) (above|below) (\d\d)\?")
ROWS, VERSIONS = 12, 250
WINDOW = questions_run.WINDOW
ROW_TOKENS, QUESTION_TOKENS = 9, 5
PROMPT_TOKENS = 1 + WINDOW * ROW_TOKENS + QUESTION_TOKENS


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(autouse=True)
def jax_settings():
    with command_line.kept_jax_settings():
        yield


@pytest.fixture(scope="module")
def model() -> models.LoadedModel:
    return models.load(candle_rows.MODEL)


def _stream_text(first: int, end: int) -> str:
    """Rows of the demo's stream as text; there are as many as anybody asks for."""
    rng = np.random.default_rng(questions_run.SEED)
    move = questions_run.MOVE
    prices = candle_rows.synthetic(rng, WINDOW + VERSIONS + ROWS, moves=(move, move))
    whole = Context(prices=prices, names=np.arange(len(prices)) % len(candle_rows.NAMES))
    return "".join("".join(candle_rows.row_tokens(whole, row)) for row in range(first, end))


def _read_truth(text: str, question: str) -> bool:
    """Answer a question from the text of the rows alone."""
    rows = ROW.findall(text)
    match = QUESTION.fullmatch(question)
    assert match, question
    field, which, wording, level = match[1], match[2], match[3], int(match[4])
    if field == "close":
        (price,) = (int(close) for close, name, *_ in rows if name == which)
    else:
        recent = rows[-int(which[-1]) :]
        price = max(int(row[2]) for row in recent) if field == "high" else None
        price = min(int(row[3]) for row in recent) if price is None else price
    return price > level if wording == "above" else price < level


def test_truth_of_every_question_is_that_of_the_rows_text():
    rng = np.random.default_rng(0)
    said = []
    for _ in range(40):
        prices = candle_rows.synthetic(rng, 12)
        context = Context(prices=prices, names=rng.permutation(len(candle_rows.NAMES))[:12])
        text = "".join(candle_rows.context_tokens(context))
        asked = [candle_questions.about_any_row(context, rng), *candle_questions.REGISTERED]
        asked += [candle_questions.at_another_level(one, rng) for one in asked[1:]]
        assert len({one.text for one in asked}) == len(asked)
        for question in asked:
            assert question.is_yes(context) == _read_truth(text, question.text), question
            said.append(question.is_yes(context))
    assert 0.2 < np.mean(said) < 0.8


def test_a_price_at_the_level_is_neither_above_nor_below():
    context = Context(prices=np.array([[50, 55, 5, 50]] * 8), names=np.arange(8))
    for field, level in (("high", 55), ("low", 5)):
        for wording in ("above", "below"):
            question = CandleQuestion(field=field, rows=" last 8", wording=wording, level=level)
            assert not question.is_yes(context)
    assert question.text == "low last 8 below 05?"
    named = CandleQuestion(field="close", rows=candle_rows.NAMES[9], wording="above", level=1)
    with pytest.raises(ValueError, match="rows: expected one of the context, got a9"):
        named.is_yes(context)


def test_a_few_versions_are_judged_by_their_rows_and_counted_to_the_token(capsys, cache_dir, model):
    """Answers without a session equal the dense forward's, so what is called right is right."""
    rows, versions = 2, 3
    result = run(
        capsys, "demo", "questions", "--rows", rows, "--versions", versions, "--every-s", 0,
        "--json", "--cache-dir", cache_dir,
    )  # fmt: skip
    assert result.status == 0, result.err
    *lines, summary = (json.loads(line) for line in result.out.splitlines())
    assert [line["row"] for line in lines] == [WINDOW + versions + idx for idx in range(rows)]
    dense = command_line.Dense(model, 384)
    yes, no = (model.tokenizer.encode(text)[0] for text in (" yes", " no"))
    forwarded = right = dense_right = count = 0
    for line in lines:
        text = _stream_text(line["row"] + 1 - WINDOW, line["row"] + 1)
        version = 1 + line["row"] + 1 - WINDOW
        moments = [one["asked"] for one in line["asked"]]
        assert moments == ["at once"] * 4 + ["later"] * 4 + ["other level"] * 4 + ["never seen"]
        for one in line["asked"]:
            truth = "yes" if _read_truth(text, one["question"]) else "no"
            assert one["truth"] == truth
            assert one["version"] == version and one["age"] == 0 and one["ms"] > 0
            if one["asked"] == "later":
                assert (one["source"], one["tokens_forwarded"]) == ("FLASH", 0)
            elif one["asked"] == "other level":
                assert one["source"] == "RESUMED" and 1 <= one["tokens_forwarded"] <= 2
            elif one["asked"] == "never seen":
                assert (one["source"], one["tokens_forwarded"]) == ("COMPUTED", QUESTION_TOKENS)
            else:
                assert one["source"] != "GATED"  # so few versions show nothing
            prompt = model.tokenizer.encode(candle_rows.START + text + one["question"])
            logits = dense.logits(prompt)[-1]
            dense_right += ("yes" if logits[yes] > logits[no] else "no") == truth
            right += one["answer"] == truth
            forwarded += one["tokens_forwarded"]
            count += 1
    session, without = summary["in_session"], summary["without_session"]
    assert (session["questions"], session["right"], session["tokens"]) == (count, right, forwarded)
    assert session["ahead_tokens"] == rows * (ROW_TOKENS + 4 * QUESTION_TOKENS)
    assert (without["questions"], without["right"]) == (count, dense_right)
    assert without["tokens"] == count * PROMPT_TOKENS
    assert without["seconds"] > session["seconds"] > 0
    for gate in summary["gates"].values():
        assert gate["tau"] is None and gate["fires"] == 0 and gate["num_samples"] == versions


def test_open_gates_answer_at_once_from_the_version_before(cache_dir, model):
    """Judged by the rows of now, though they saw those of before."""
    compile_cache.enable(cache_dir / "xla")
    engine = Engine(
        model.params, model.config, questions_run.engine_config(), tokenizer=model.tokenizer
    )
    stream = CandleStream(engine, model.tokenizer, rows=VERSIONS + ROWS, risk=0.2)
    try:
        gates = stream.calibrate(VERSIONS, lambda: None)
        history = list(stream.ask_while_rows_come(ROWS, 0.0))
    finally:
        stream.close()
    assert all(gate.num_samples == VERSIONS for gate in gates.values())
    is_open = {question for question, gate in gates.items() if gate.tau is not None}
    assert is_open
    fresh: dict[CandleQuestion, bool] = {}
    differed = fired = 0
    for asked in history:
        text = _stream_text(asked[0].row + 1 - WINDOW, asked[0].row + 1)
        at_rest = {one.question: one.said_yes for one in asked if one.moment is Moment.AT_REST}
        for one in asked:
            assert one.is_yes == _read_truth(text, one.question.text)
            if one.answer.source is not Source.GATED:
                continue
            fired += 1
            assert one.moment is Moment.AT_ONCE and one.question in is_open
            assert one.answer.age == 1 and one.answer.tokens_forwarded == 0
            assert one.answer.version == one.row + 1 - WINDOW
            assert one.answer.evidence.num_effective >= 59
            assert one.said_yes == fresh.get(one.question, one.said_yes)
            differed += one.said_yes != at_rest[one.question]
        fresh = at_rest
    assert fired == sum(query.fires for query in stream.queries.values()) > 0
    assert differed == sum(query.disagreements for query in stream.queries.values())
    everything = [one for asked in history for one in asked]
    assert questions_run.spent(everything).right >= 0.9 * len(everything)


def test_a_risk_that_no_gate_keeps_is_refused_before_the_work(capsys, cache_dir):
    result = run(capsys, "demo", "questions", "--risk", 0.9, "--cache-dir", cache_dir)
    assert result.status == 2
    assert "risk" in result.err.splitlines()[-1] and "loading" not in result.err


def test_terminal_shows_the_table_live_and_whole(cache_dir):
    out = Console(file=io.StringIO(), force_terminal=True, width=80, height=50, color_system=None)
    log = Console(file=io.StringIO(), width=80)
    demo_questions.run(
        rows=2, versions=1, risk=0.05, every_s=0.0, as_json=False, cache_dir=cache_dir, out=out,
        log=log,
    )  # fmt: skip
    shown = out.file.getvalue()
    assert "row 1 of 2" in shown
    final = shown[shown.rindex("row 2 of 2") :]
    assert "…" not in final
    assert re.search(r"without the session: 9,516 tokens, \d+\.\d seconds", final)  # 26 × 366
    assert "calibrating gates, versions: 1" in log.file.getvalue()


def _made_up() -> list[list[Asked]]:
    """Two rows: a gated answer that was wrong once, and one that was computed."""

    def asked(row: int, source: Source, said_yes: bool, ms: float, tokens: int) -> Asked:
        answer = Answer(
            token_ids=(0,), text="", finish_reason=FinishReason.CHOICE, source=source,
            version=12_344 + row, context_len=361, tokens_forwarded=tokens, cached_tokens=0,
            gap=1.0, choice=0 if said_yes else 1, age=int(source is Source.GATED),
        )  # fmt: skip
        moment = Moment.AT_ONCE if source is Source.GATED else Moment.OTHER_LEVEL
        return Asked(
            row=row, moment=moment, question=candle_questions.REGISTERED[0], answer=answer,
            seconds=ms / 1e3, said_yes=said_yes, is_yes=True,
        )  # fmt: skip

    return [
        [asked(0, Source.GATED, False, 0.25, 0), asked(0, Source.COMPUTED, True, 100.0, 5)],
        [asked(1, Source.GATED, True, 0.75, 0), asked(1, Source.COMPUTED, True, 10.0, 5)],
    ]


def test_tables_count_by_place_and_by_source_and_fit_80_columns():
    question = candle_questions.REGISTERED[0]
    gate = Calibration(
        tau=None, risk=0.05, bound=0.123, num_effective=66, block_len=8, num_samples=1500,
        version=1500,
    )  # fmt: skip
    query = FlashQuery(flash_id=1, question=Question(token_ids=(1,)), fires=7, disagreements=2)
    console = Console(file=io.StringIO(), width=80, color_system=None)
    history = _made_up()
    without = Spent(questions=4, right=3, tokens=1464, seconds=2.04)
    console.print(questions_view.table(history, 24))
    console.print(questions_view.footer(history, {question: gate}, {question: query}, 58, without))
    shown = console.file.getvalue()
    assert "…" not in shown
    for line in (
        r"row 2 of 24: what was asked",
        r"high last 8 above 60\? at once +GATED +0\.75 +12,345 +1 +0 ✓ yes +1/2",
        r"high last 8 above 60\? other level COMPUTED 10\.00 +12,345 +0 +5 ✓ yes +2/2",
        r"GATED +2 +0\.500 +0\.750 +0 +50\.0%",
        r"COMPUTED +2 +55\.000 +100\.000 +10 +100\.0%",
        r"gates at 5\.0% risk",
        r"high last 8 above 60\? +1,500 +66 +closed +12\.3% +7 +2",
        r"4 questions asked of the session: 10 tokens, 0\.11 seconds; rows",
        r"the same questions asked without the session: 1,464 tokens, 2\.0 seconds",
    ):
        assert re.search(line, shown), (line, shown)
    assert "58 tokens more" in shown.replace("\n", " ")
    assert "Right were 3, without the session 3" in " ".join(shown.split())
