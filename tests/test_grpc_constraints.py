"""Answers held to a schema, a regex or a grammar, over the wire."""

from __future__ import annotations

import json
import re

import grpc
import grpc_service
import jsonschema
import pytest
from grpc_service import WAIT_S, refused, tokens

from jaxstate.serving import jaxstate_pb2 as pb

IDS = tuple(range(20, 29))
SCHEMA = {
    "type": "object",
    "properties": {"up": {"type": "boolean"}, "by": {"enum": [1, 2, 3]}},
    "required": ["up", "by"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
KINDS = {
    "json_schema": json.dumps(SCHEMA),
    "regex": "[a-c]{3}( é)?",
    "grammar": 'start: "a" one? "b"\none: "a" two? "b"\ntwo: "ab"\n',
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return grpc_service.load(tmp_path_factory.mktemp("grpc"))


@pytest.fixture(scope="module")
def engine(model):
    return grpc_service.engine_of(model, context_len=96)


@pytest.fixture
def running(engine, model):
    with grpc_service.serving(engine, model.tokenizer) as running:
        yield running


@pytest.fixture
def stub(running):
    return running.stub


def _question(kind, *, seed=0, count=60, **more):
    sampling = pb.Sampling(temperature=1.0 if seed else 0.0, seed=seed)
    return pb.Question(
        prompt=tokens(IDS[:4]), max_new_tokens=count, sampling=sampling, **{kind: KINDS[kind]},
        **more,
    )  # fmt: skip


def _open(stub):
    return stub.CreateSession(pb.CreateSessionRequest(prefix=tokens(IDS))).session_id


def _query(stub, name, question, **more):
    request = pb.QueryRequest(session_id=name, question=question, **more)
    return grpc_service.parts(stub.Query(request, timeout=WAIT_S))


def _check(kind, text):
    if kind == "json_schema":
        jsonschema.validate(json.loads(text), SCHEMA)
    elif kind == "regex":
        assert re.fullmatch(KINDS["regex"], text)
    else:
        assert text == "a" * (len(text) // 2) + "b" * (len(text) // 2) != ""


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_what_it_has_to_be_with_and_without_a_session(stub, kind):
    name, texts = _open(stub), set()
    for seed in range(6):
        question = _question(kind, seed=seed)
        _, drawn, answer = _query(stub, name, question)
        _check(kind, answer.text)
        assert "".join(token.text for token in drawn) == answer.text
        ends = {pb.FINISH_REASON_EOS: [2], pb.FINISH_REASON_STOP: answer.token_ids[-1:]}
        assert answer.token_ids[-1:] == ends[answer.finish_reason]
        texts.add(answer.text)
        request = pb.GenerateRequest(question=_question(kind, seed=seed))
        apart = grpc_service.parts(stub.Generate(request, timeout=WAIT_S))[2]
        _check(kind, apart.text)
    assert len(texts) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_registered_question_is_listed_and_answered_with_its_constraint(running, stub, kind):
    name, question = _open(stub), _question(kind, seed=3)
    computed = _query(stub, name, question)[2]
    flash = stub.Register(pb.RegisterRequest(session_id=name, question=question))
    running.service.wait_until_idle(WAIT_S)
    [listed] = stub.ListFlashQueries(pb.ListFlashQueriesRequest(session_id=name)).queries
    for shown in (flash, listed):
        assert shown.question.WhichOneof("constraint") == kind
        assert getattr(shown.question, kind) == KINDS[kind]
    answer = _query(stub, name, question)[2]
    assert answer.source == pb.SOURCE_FLASH and answer.token_ids == computed.token_ids
    # As it is listed it is the same question, without its constraint another.
    again = stub.Register(pb.RegisterRequest(session_id=name, question=listed.question))
    assert again.flash_id == flash.flash_id
    listed.question.ClearField(kind)
    assert _query(stub, name, listed.question)[2].source == pb.SOURCE_RESUMED


def test_log_probabilities_and_stop_texts_go_with_a_constraint(stub):
    name = _open(stub)
    whole = _query(stub, name, _question("regex"), top_logprobs=3)
    letters = {token_id for token in whole[1][:3] for token_id in token.top_logprobs}
    assert letters and all(
        stub.Detokenize(pb.DetokenizeRequest(token_ids=[one])).text in "abc" for one in letters
    )
    text = whole[2].text
    cut = _query(stub, name, _question("regex"), stop=[text[2]])[2]
    assert cut.text == text[: text.index(text[2])]
    assert cut.finish_reason == pb.FINISH_REASON_STOP


WRONG = {
    "json_schema": ("{", "expected a schema in JSON"),
    "regex": ("(a", "unclosed group"),
    "grammar": ("start: foo", 'unknown name: "foo"'),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("method", ["Query", "Generate", "Register"])
def test_what_cannot_be_kept_is_refused_by_its_field(stub, kind, method):
    given, words = WRONG[kind]
    for text, expected in ((given, words), ("", "expected text of 1 to")):
        question = pb.Question(prompt=tokens(IDS[:4]), max_new_tokens=4, **{kind: text})
        name = {} if method == "Generate" else {"session_id": _open(stub)}
        request = getattr(pb, f"{method}Request")(question=question, **name)
        with refused(grpc.StatusCode.INVALID_ARGUMENT) as errors:
            answer = getattr(stub, method)(request, timeout=WAIT_S)
            list(answer) if method != "Register" else None
        [violation] = grpc_service.detail(errors[0], "BadRequest").field_violations
        assert violation.field == f"question.{kind}" and expected in violation.description


def test_choices_have_no_constraint(stub):
    choices = [tokens([40]), tokens([41])]
    with refused(grpc.StatusCode.INVALID_ARGUMENT) as errors:
        _query(stub, _open(stub), _question("regex", choices=choices))
    [violation] = grpc_service.detail(errors[0], "BadRequest").field_violations
    assert violation.field == "question.regex" and "with choices" in violation.description


def test_who_goes_away_leaves_nothing_behind(running, stub, engine):
    name = _open(stub)
    grpc_service.slow_down(running.service)
    held = engine.cells_held
    question = _question("regex")
    question.regex, question.ignore_model_eos = "[a-z]{80}", True
    stream = stub.Query(pb.QueryRequest(session_id=name, question=question), timeout=WAIT_S)
    next(stream)
    assert engine.cells_held > held
    stream.cancel()
    grpc_service.wait_until(lambda: engine.cells_held == held)
