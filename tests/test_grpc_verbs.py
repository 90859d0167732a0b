"""Every call of the service against a real server, its answers against a dense forward."""

from __future__ import annotations

import asyncio
import functools

import command_line
import grpc
import grpc_service
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_service import WAIT_S, refused, text, tokens

from jaxstate.errors import UnknownSessionError
from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving import rpc_flash
from jaxstate.serving.rpc_calls import Call


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return grpc_service.load(tmp_path_factory.mktemp("grpc"))


@pytest.fixture(scope="module")
def engine(model):
    return grpc_service.engine_of(model, context_len=96)


@pytest.fixture(scope="module")
def dense(model):
    return command_line.Dense(model, 64)


@pytest.fixture
def running(engine, model):
    with grpc_service.serving(engine, model.tokenizer) as running:
        yield running


@pytest.fixture
def stub(running):
    return running.stub


@functools.cache
def _ids(count, seed=0):
    return tuple((7 * seed + 3 * n + 5) % 40 + 20 for n in range(count))


def _query(stub, name, prompt, count=4, **more):
    question = pb.Question(prompt=prompt, max_new_tokens=count)
    return grpc_service.parts(
        stub.Query(pb.QueryRequest(session_id=name, question=question, **more), timeout=WAIT_S)
    )


def _open(stub, ids=(), **more):
    return stub.CreateSession(pb.CreateSessionRequest(prefix=tokens(ids), **more)).session_id


def _append(stub, name, ids, **more):
    return stub.Append(pb.AppendRequest(session_id=name, prompt=tokens(ids), **more))


# Sessions


def test_sessions_are_opened_described_listed_and_closed(stub):
    opened = stub.CreateSession(
        pb.CreateSessionRequest(
            session_id="feed:1", prefix=tokens(_ids(9)), when_full=pb.WHEN_FULL_SLIDE
        )
    )
    expected = pb.Session(
        session_id="feed:1", context_tokens=9, prefix_tokens=9, when_full=pb.WHEN_FULL_SLIDE
    )
    assert opened == expected == stub.GetSession(pb.GetSessionRequest(session_id="feed:1"))
    others = [_open(stub) for _ in range(4)]
    first = stub.ListSessions(pb.ListSessionsRequest(page_size=3))
    rest = stub.ListSessions(pb.ListSessionsRequest(page_size=3, page_token=first.next_page_token))
    listed = [session.session_id for session in (*first.sessions, *rest.sessions)]
    assert listed == sorted(["feed:1", *others]) and not rest.next_page_token
    stub.CloseSession(pb.CloseSessionRequest(session_id="feed:1"))
    assert len(stub.ListSessions(pb.ListSessionsRequest()).sessions) == 4


def test_a_sliding_session_says_what_it_has_dropped(stub):
    name = _open(stub, _ids(9), when_full=pb.WHEN_FULL_SLIDE)
    for seed in range(4):
        _append(stub, name, _ids(30, seed))
    session = stub.GetSession(pb.GetSessionRequest(session_id=name))
    assert session.version == 4
    assert session.evicted_tokens == 40 and session.context_tokens == 9 + 120 - 40


def test_a_fork_goes_its_own_way(stub, dense):
    name = _open(stub, _ids(9))
    child = stub.Fork(pb.ForkRequest(session_id=name, new_session_id="child"))
    assert child.session_id == "child" and child.context_tokens == 9
    _append(stub, "child", _ids(5, 1))
    for session, context in ((name, _ids(9)), ("child", _ids(9) + _ids(5, 1))):
        _, _, answer = _query(stub, session, tokens(_ids(3, 2)))
        assert answer.token_ids == dense.greedy([*context, *_ids(3, 2)], 4)


# Durable verbs


def test_what_is_appended_updated_and_rolled_back_is_what_is_answered_from(stub, dense):
    name, question = _open(stub, _ids(9)), _ids(3, 2)

    def check(context, version):
        _, _, answer = _query(stub, name, tokens(question))
        assert answer.token_ids == dense.greedy([*context, *question], 4)
        assert (answer.version, answer.usage.context_tokens) == (version, len(context))

    appended = _append(stub, name, _ids(6, 1))
    assert (appended.version, appended.tokens) == (1, 6)
    check(_ids(9) + _ids(6, 1), 1)
    stream = _ids(4, 1) + _ids(8, 3)
    updated = stub.Update(pb.UpdateRequest(session_id=name, prompt=tokens(stream)))
    assert updated.version == 2
    check(_ids(9) + stream, 2)
    assert stub.Rollback(pb.RollbackRequest(session_id=name, tokens=5)).version == 3
    check(_ids(9) + stream[:-5], 3)


def test_a_stream_of_appends_is_applied_in_order(stub, dense):
    name = _open(stub)
    pieces = [_ids(1 + n % 3, n) for n in range(40)]
    requests = (
        pb.AppendRequest(session_id=name if n == 0 else "", prompt=tokens(piece))
        for n, piece in enumerate(pieces)
    )
    done = stub.AppendStream(requests, timeout=WAIT_S)
    context = [token for piece in pieces for token in piece]
    assert (done.version, done.appends, done.tokens) == (40, 40, len(context))
    _, _, answer = _query(stub, name, tokens(_ids(3, 2)))
    assert answer.token_ids == dense.greedy([*context, *_ids(3, 2)], 4)


def test_an_append_that_comes_again_is_applied_once(stub):
    name = _open(stub, _ids(9))
    for _ in range(3):
        again = _append(stub, name, _ids(6, 1), writer="feed", sequence=1)
        assert (again.version, again.tokens) == (1, 6)
    assert _append(stub, name, _ids(6, 1), writer="other", sequence=1).version == 2
    assert _append(stub, name, _ids(6, 1), writer="feed", sequence=2).version == 3
    session = stub.GetSession(pb.GetSessionRequest(session_id=name))
    assert (session.version, session.context_tokens) == (3, 27)


def test_updates_and_rollbacks_that_come_again_are_applied_once(stub):
    name = _open(stub, _ids(9))
    update = pb.UpdateRequest(session_id=name, prompt=tokens(_ids(8, 1)), writer="w", sequence=1)
    rollback = pb.RollbackRequest(session_id=name, tokens=3, writer="w", sequence=2)
    assert [stub.Update(update).version for _ in range(3)] == [1, 1, 1]
    assert [stub.Rollback(rollback).version for _ in range(3)] == [2, 2, 2]
    assert stub.Update(update).version == 1
    session = stub.GetSession(pb.GetSessionRequest(session_id=name))
    assert (session.version, session.context_tokens) == (2, 14)
    rollback.tokens = 4
    for other in (
        lambda: _append(stub, name, _ids(8, 1), writer="w", sequence=1),
        lambda: stub.Rollback(rollback),
    ):
        with refused(grpc.StatusCode.INVALID_ARGUMENT):
            other()
    assert stub.Rollback(pb.RollbackRequest(session_id=name, tokens=3)).version == 3


def test_a_committed_turn_becomes_part_of_the_session(stub, dense):
    name = _open(stub, _ids(9))
    _, drawn, answer = _query(stub, name, tokens(_ids(3, 2)), commit=True)
    expected = dense.greedy([*_ids(9), *_ids(3, 2)], 4)
    assert [token.token_id for token in drawn] == answer.token_ids == expected
    session = stub.GetSession(pb.GetSessionRequest(session_id=name))
    assert (session.version, session.context_tokens) == (1, 9 + 3 + len(expected))
    _, _, answer = _query(stub, name, tokens(_ids(3, 4)))
    assert answer.token_ids == dense.greedy([*_ids(9), *_ids(3, 2), *expected, *_ids(3, 4)], 4)


# Asking


def test_an_answer_is_streamed_between_its_prompt_and_its_usage(stub, dense, model):
    name = _open(stub, _ids(9))
    prompt, drawn, answer = _query(stub, name, tokens(_ids(5, 2)), 6)
    assert (prompt.prompt_tokens, prompt.cached_tokens) == (5, 0)
    expected = dense.greedy([*_ids(9), *_ids(5, 2)], 6)
    assert [token.token_id for token in drawn] == answer.token_ids == expected
    assert "".join(token.text for token in drawn) == answer.text
    assert answer.text == model.tokenizer.decode(expected, skip_special=True)
    ended = expected[-1] in model.tokenizer.eos_ids
    assert answer.finish_reason == (pb.FINISH_REASON_EOS if ended else pb.FINISH_REASON_LENGTH)
    assert (answer.source, answer.version, answer.age) == (pb.SOURCE_COMPUTED, 0, 0)
    usage = pb.Usage(
        prompt_tokens=5, context_tokens=9, answer_tokens=len(expected),
        forwarded_tokens=5 + len(expected) - 1,
    )  # fmt: skip
    assert answer.usage == usage
    assert "logprob" not in str(drawn)


def test_log_probabilities_are_those_of_the_dense_forward(stub, dense):
    name = _open(stub, _ids(9))
    _, drawn, answer = _query(stub, name, tokens(_ids(5, 2)), 3, top_logprobs=2)
    context = [*_ids(9), *_ids(5, 2)]
    for token in drawn:
        expected = dense.logprobs(context)[-1]
        assert token.logprob == pytest.approx(expected[token.token_id], abs=1e-4)
        best = {idx: pytest.approx(expected[idx], abs=1e-4) for idx in expected.argsort()[-2:]}
        assert dict(token.top_logprobs) == best
        context.append(token.token_id)


def test_a_stop_text_ends_an_answer_and_is_not_shown(stub):
    name = _open(stub, _ids(9))
    _, _, whole = _query(stub, name, tokens(_ids(5, 2)), 12)
    stop = whole.text[4:6]
    _, drawn, answer = _query(stub, name, tokens(_ids(5, 2)), 12, stop=[stop])
    assert answer.finish_reason == pb.FINISH_REASON_STOP
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert "".join(token.text for token in drawn) == answer.text


def test_the_most_probable_choice_is_taken(stub, dense):
    name = _open(stub, _ids(9))
    choices = [_ids(2, 3), _ids(1, 5), _ids(2, 6)]
    question = pb.Question(prompt=tokens(_ids(5, 2)), choices=map(tokens, choices))
    prompt, drawn, answer = grpc_service.parts(
        stub.Query(pb.QueryRequest(session_id=name, question=question))
    )
    context = [*_ids(9), *_ids(5, 2)]

    def score(choice):
        rows = dense.logprobs([*context, *choice])[len(context) - 1 :]
        return sum(rows[n][token] for n, token in enumerate(choice))

    scores = [score(choice) for choice in choices]
    assert not drawn and prompt.cached_tokens == 0
    assert answer.choice == max(range(3), key=scores.__getitem__)
    assert tuple(answer.token_ids) == choices[answer.choice]
    found = [one - answer.choice_logprobs[0] for one in answer.choice_logprobs]
    assert found == pytest.approx([one - scores[0] for one in scores], abs=1e-3)
    assert answer.finish_reason == pb.FINISH_REASON_CHOICE


def test_draws_repeat_with_their_seed(stub):
    name = _open(stub, _ids(9))

    def draw(seed):
        sampling = pb.Sampling(temperature=5.0, seed=seed)
        question = pb.Question(prompt=tokens(_ids(5, 2)), max_new_tokens=8, sampling=sampling)
        stream = stub.Query(pb.QueryRequest(session_id=name, question=question))
        return grpc_service.parts(stream)[2].token_ids

    assert draw(1) == draw(1) != draw(2)


def test_a_query_waits_for_the_version_it_names(running, stub, dense):
    name = _open(stub, _ids(9))
    question = pb.Question(prompt=tokens(_ids(3, 2)), max_new_tokens=4)
    request = pb.QueryRequest(session_id=name, question=question, min_version=2)
    waiting = stub.Query(request, timeout=WAIT_S)
    _append(stub, name, _ids(2, 1))
    assert running.service.version(name) == 1 and not waiting.done()
    _append(stub, name, _ids(2, 3))
    _, _, answer = grpc_service.parts(waiting)
    assert answer.version == 2
    context = [*_ids(9), *_ids(2, 1), *_ids(2, 3)]
    assert answer.token_ids == dense.greedy([*context, *_ids(3, 2)], 4)


def test_a_prompt_without_a_session_shares_beginnings(engine, model, dense):
    sharing = grpc_service.engine_of(model, context_len=96, prefix_share=0.25)
    with grpc_service.serving(sharing, model.tokenizer) as running:
        request = pb.GenerateRequest(
            question=pb.Question(prompt=tokens(_ids(20)), max_new_tokens=4)
        )
        for cached in (0, 19):
            prompt, _, answer = grpc_service.parts(running.stub.Generate(request))
            assert answer.token_ids == dense.greedy(_ids(20), 4)
            assert prompt.cached_tokens == answer.usage.cached_tokens == cached


# Flash Queries


def test_registered_questions_are_answered_before_they_are_asked(running, stub, dense):
    name = _open(stub, _ids(9))
    question = pb.Question(prompt=tokens(_ids(3, 2)), max_new_tokens=4)
    flash = stub.Register(pb.RegisterRequest(session_id=name, question=question))
    running.service.wait_until_idle(WAIT_S)
    prompt, drawn, answer = _query(stub, name, tokens(_ids(3, 2)))
    assert answer.source == pb.SOURCE_FLASH and answer.usage.forwarded_tokens == 0
    assert prompt.cached_tokens == 3
    expected = dense.greedy([*_ids(9), *_ids(3, 2)], 4)
    assert [token.token_id for token in drawn] == answer.token_ids == expected
    (listed,) = stub.ListFlashQueries(pb.ListFlashQueriesRequest(session_id=name)).queries
    assert listed.flash_id == flash.flash_id and listed.hits == 1
    assert listed.answer.token_ids == expected
    again = stub.Register(pb.RegisterRequest(session_id=name, question=listed.question))
    assert again.flash_id == flash.flash_id
    stub.Unregister(pb.UnregisterRequest(session_id=name, flash_id=flash.flash_id))
    assert _query(stub, name, tokens(_ids(3, 2)))[2].source != pb.SOURCE_FLASH
    assert not stub.ListFlashQueries(pb.ListFlashQueriesRequest(session_id=name)).queries


def test_an_old_answer_is_waited_for_or_served_with_its_age(running, stub):
    name = _open(stub, _ids(9))
    question = pb.Question(prompt=tokens(_ids(3, 2)), max_new_tokens=4)
    stub.Register(pb.RegisterRequest(session_id=name, question=question))
    running.service.wait_until_idle(WAIT_S)
    _append(stub, name, _ids(2, 1))
    _, _, answer = _query(stub, name, tokens(_ids(3, 2)), stale=pb.STALE_WAIT)
    assert (answer.source, answer.version, answer.age) == (pb.SOURCE_FLASH, 1, 0)
    running.service.wait_until_idle(WAIT_S)
    with grpc_service.held(running.service):  # before it can evaluate anew
        running.service._sessions[name].version = 3
        _, _, answer = _query(stub, name, tokens(_ids(3, 2)), stale=pb.STALE_SERVE)
        assert (answer.source, answer.version, answer.age) == (pb.SOURCE_FLASH, 1, 2)
        running.service._sessions[name].version = 1


def test_no_fresh_answer_is_missed_by_who_comes_again_with_a_cursor(running, stub, dense):
    name = _open(stub, _ids(9))
    for seed in (2, 3):
        question = pb.Question(prompt=tokens(_ids(3, seed)), max_new_tokens=4)
        stub.Register(pb.RegisterRequest(session_id=name, question=question))
    running.service.wait_until_idle(WAIT_S)

    def watch(cursor, count):
        stream = stub.WatchAnswers(pb.WatchAnswersRequest(session_id=name, cursor=cursor))
        found = [next(stream) for _ in range(count)]
        stream.cancel()
        return found

    first = watch("", 2)
    assert [(one.flash_id, one.answer.version) for one in first] == [(1, 0), (2, 0)]
    context = list(_ids(9))
    for seed in (4, 5):  # nobody watches
        _append(stub, name, _ids(2, seed))
        context += _ids(2, seed)
        running.service.wait_until_idle(WAIT_S)
    missed = watch(first[-1].cursor, 4)
    seen = [(one.flash_id, one.answer.version, one.answer.age) for one in missed]
    assert seen == [(1, 1, 1), (2, 1, 1), (1, 2, 0), (2, 2, 0)]
    assert watch(missed[1].cursor, 2) == missed[2:]
    assert missed[3].answer.token_ids == dense.greedy([*context, *_ids(3, 3)], 4)


def test_a_watcher_gets_answers_as_they_come(stub):
    name = _open(stub, _ids(9))
    question = pb.Question(prompt=tokens(_ids(3, 2)), max_new_tokens=4)
    stub.Register(pb.RegisterRequest(session_id=name, question=question))
    stream = stub.WatchAnswers(pb.WatchAnswersRequest(session_id=name), timeout=WAIT_S)
    for version in range(5):
        assert next(stream).answer.version == version
        _append(stub, name, _ids(2, version))
    stream.cancel()


@pytest.mark.parametrize("what", ["answers", "the end"])
def test_a_watcher_hears_of_what_comes_while_it_is_sent_something(running, stub, what):
    name = _open(stub, _ids(9))
    question = pb.Question(prompt=tokens(_ids(3, 2)), max_new_tokens=4)
    stub.Register(pb.RegisterRequest(session_id=name, question=question))
    running.service.wait_until_idle(WAIT_S)

    async def watch():
        call = Call(running.server._backend, context=None)
        answers = rpc_flash.watch_answers(pb.WatchAnswersRequest(session_id=name), call)
        assert (await anext(answers)).answer.version == 0
        # It is held where it is while its client takes the answer.
        if what == "answers":
            await call.run(stub.Append, pb.AppendRequest(session_id=name, prompt=tokens(_ids(2))))
            await call.run(running.service.wait_until_idle, WAIT_S)
        else:
            await call.run(running.service.close_session, name)
        while running.server._backend._told:
            await asyncio.sleep(0)
        return await asyncio.wait_for(anext(answers), 10)

    if what == "answers":
        assert running.loop.run(watch()).answer.version == 1
    else:
        with pytest.raises(UnknownSessionError):
            running.loop.run(watch())


# Ahead of questions


def test_what_is_paid_ahead_is_not_forwarded_again(stub, dense):
    name = _open(stub, _ids(9))
    header = pb.Header(prompt=tokens(_ids(5, 2)), max_new_tokens=3)
    paid = stub.Advance(pb.AdvanceRequest(session_id=name, header=header))
    assert list(paid.token_ids) == dense.greedy([*_ids(9), *_ids(5, 2)], 3)[: len(paid.token_ids)]
    prompt, _, answer = _query(stub, name, tokens(_ids(5, 2) + _ids(2, 6)))
    assert (prompt.cached_tokens, prompt.prompt_tokens) == (5, 7)
    assert (answer.source, answer.usage.cached_tokens) == (pb.SOURCE_RESUMED, 5)
    assert answer.token_ids == dense.greedy([*_ids(9), *_ids(5, 2), *_ids(2, 6)], 4)


def test_a_declared_header_is_paid_for_after_every_change(running, stub):
    name = _open(stub, _ids(9))
    header = pb.Header(prompt=tokens(_ids(5, 2)))
    stub.Declare(pb.DeclareRequest(session_id=name, header=header))
    for _ in range(2):
        running.service.wait_until_idle(WAIT_S)
        assert _query(stub, name, tokens(_ids(5, 2) + _ids(2, 6)))[0].cached_tokens >= 5
        _append(stub, name, _ids(2, 1))


# Text


def test_text_is_the_models_own_tokens(stub, model, dense):
    encoded = stub.Tokenize(pb.TokenizeRequest(text="Hello, world")).token_ids
    assert encoded == model.tokenizer.encode("Hello, world", parse_special=False)
    back = stub.Detokenize(pb.DetokenizeRequest(token_ids=encoded))
    assert back.text == "Hello, world"
    name = stub.CreateSession(pb.CreateSessionRequest(prefix=text("Hello"))).session_id
    stub.Append(pb.AppendRequest(session_id=name, prompt=text(", wor")))
    _, _, answer = _query(stub, name, text("ld"))
    ids = [
        idx
        for part in ("Hello", ", wor", "ld")
        for idx in model.tokenizer.encode(part, parse_special=False)
    ]
    assert answer.token_ids == dense.greedy(ids, 4)


def test_a_conversation_goes_through_the_models_template(stub, model):
    chat = pb.Chat(messages=[pb.Message(role="user", content="Hello")])
    rendered = stub.RenderTemplate(pb.RenderTemplateRequest(chat=chat))
    assert rendered.text == "<|im_start|>Hello:"
    assert rendered.token_ids == model.tokenizer.encode(rendered.text)
    prompt = pb.Prompt(chat=chat)
    name = stub.CreateSession(pb.CreateSessionRequest(prefix=prompt)).session_id
    session = stub.GetSession(pb.GetSessionRequest(session_id=name))
    assert session.context_tokens == len(rendered.token_ids)


def test_text_that_names_control_tokens_is_plain_text_unless_said_otherwise(stub, model):
    plain = stub.Tokenize(pb.TokenizeRequest(text="<|im_start|>")).token_ids
    control = stub.Tokenize(pb.TokenizeRequest(text="<|im_start|>", parse_special=True)).token_ids
    assert len(control) == 1 < len(plain)
    question = pb.Question(prompt=text("<|im_start|>"), max_new_tokens=1)
    prompt = next(stub.Generate(pb.GenerateRequest(question=question))).prompt
    assert prompt.prompt_tokens == len(plain) + model.tokenizer.add_bos


# The server


def test_the_model_and_the_engine_are_described(stub, model):
    info = stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.name, info.vocab_size) == ("tiny", model.config.vocab_size)
    assert (info.context_tokens, info.cells, info.page_size) == (96, 96 * 8, 8)
    assert info.has_tokenizer and info.has_chat_template
    assert tuple(info.eos_ids) == model.tokenizer.eos_ids


def test_stats_count_sessions_cells_and_answers(stub):
    name = _open(stub, _ids(9))
    _query(stub, name, tokens(_ids(3, 2)))
    stats = stub.GetStats(pb.GetStatsRequest())
    assert (stats.sessions, stats.cells_used, stats.cells) == (1, 9, 96 * 8)
    assert dict(stats.answers) == {"computed": 1}
    queries = next(one for one in stats.classes if one.name == "query")
    assert dict(queries.ended) == {"done": 1} and queries.sojourn_p50_ms > 0


def test_health_and_reflection_answer(running):
    health = health_pb2_grpc.HealthStub(running.channel)
    for name in ("", "jaxstate.v1.JaxState"):
        status = health.Check(health_pb2.HealthCheckRequest(service=name)).status
        assert status == health_pb2.HealthCheckResponse.SERVING
    reflected = reflection_pb2_grpc.ServerReflectionStub(running.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (response,) = reflected.ServerReflectionInfo(iter([request]))
    names = {service.name for service in response.list_services_response.service}
    assert {"jaxstate.v1.JaxState", "grpc.health.v1.Health"} <= names
