"""Wrong requests, late ones, lost clients: the right status for each, and nothing left behind."""

from __future__ import annotations

import pathlib
import random
import sqlite3
import sys
import threading

import grpc
import grpc_service
import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_service import WAIT_S, refused, text, tokens
from grpc_wrong_requests import REQUESTS, query

from jaxstate.errors import ClosedError
from jaxstate.flash import Question
from jaxstate.plan import JobClass
from jaxstate.scheduler import State
from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving import prompts, rpc_calls, rpc_errors
from jaxstate.serving.journal import Journal

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "bench"))
import hostile_messages  # noqa: E402

IDS = tuple(range(20, 29))
ASKED = Question(token_ids=(30, 31), max_new_tokens=2)


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


def _open(stub, name="s"):
    stub.CreateSession(pb.CreateSessionRequest(session_id=name, prefix=tokens(IDS)))
    return name


# Wrong requests


@pytest.mark.parametrize("method, request_, code, field", REQUESTS.values(), ids=REQUESTS)
def test_a_wrong_request_gets_its_status_and_names_the_field(stub, method, request_, code, field):
    _open(stub)
    with refused(code) as errors:
        answer = getattr(stub, method)(request_, timeout=WAIT_S)
        list(answer) if method in ("Query", "Generate", "WatchAnswers") else None
    if field is not None:
        (violation,) = grpc_service.detail(errors[0], "BadRequest").field_violations
        assert violation.field == field and "expected" in violation.description
    assert stub.GetSession(pb.GetSessionRequest(session_id="s")).version == 0


@pytest.mark.parametrize("method", hostile_messages.METHODS, ids=lambda method: method.name)
def test_bytes_that_are_no_message_are_an_invalid_argument(running, method):
    with refused(StatusCode.INVALID_ARGUMENT) as errors:
        hostile_messages.call(running.channel, method, [b"\xff\xff\xff"], timeout_s=WAIT_S)
    assert method.input_type.full_name in errors[0].details()


def test_hostile_values_and_random_bytes_get_a_status_with_a_meaning(running, stub):
    rng = random.Random(1)
    seen = set()
    for n in range(400):
        method = hostile_messages.METHODS[n % len(hostile_messages.METHODS)]
        if n % 4 == 3:
            requests = [rng.randbytes(rng.randint(1, 60))]
        else:
            requests = [hostile_messages.message(method, rng) for _ in range(2)]
        if "s" not in running.service._sessions:
            _open(stub)
        try:
            hostile_messages.call(running.channel, method, requests, timeout_s=0.5)
        except grpc.RpcError as error:
            seen.add(error.code())
            assert error.code() not in (StatusCode.INTERNAL, StatusCode.UNKNOWN), (
                method.name, requests, error.details(),
            )  # fmt: skip
    assert {StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND} < seen
    running.service.wait_until_idle(WAIT_S)


def test_long_texts_leave_threads_to_verbs(running, stub, model, monkeypatch):
    go_on, encode = threading.Event(), type(model.tokenizer).encode

    def slowly(self, given, **how):
        assert go_on.wait(WAIT_S)
        return encode(self, given[:9], **how)

    monkeypatch.setattr(type(model.tokenizer), "encode", slowly)
    _open(stub)
    append = pb.AppendRequest(session_id="s", prompt=text("long " * 1000))
    tokenize = pb.TokenizeRequest(text="long")
    calls = [stub.Tokenize.future(tokenize, timeout=WAIT_S) for _ in range(rpc_calls.NUM_THREADS)]
    calls += [stub.Append.future(append, timeout=WAIT_S) for _ in range(3)]
    grpc_service.wait_until(lambda: running.server._backend.num_calls == len(calls))
    assert list(stub.Query(query("s"), timeout=WAIT_S))[-1].answer.token_ids
    go_on.set()
    assert all(call.result() for call in calls)


def test_what_nobody_meant_to_raise_is_internal_and_tells_nothing(running, stub, caplog):
    def broken():
        raise RuntimeError("secret")

    running.service.stats = broken
    with refused(StatusCode.INTERNAL) as errors:
        stub.GetStats(pb.GetStatsRequest())
    request_id = grpc_service.detail(errors[0], "RequestInfo").request_id
    assert "secret" not in errors[0].details() and "secret" in caplog.text
    assert f"request {request_id}" in caplog.text


def test_what_fails_on_the_servers_disk_is_in_its_log_and_tells_clients_no_file(
    engine, model, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # the worker ends by it
    journal = Journal(tmp_path / "journal", durability="normal", fingerprint="m")
    with grpc_service.serving(engine, model.tokenizer, journal=journal) as running:
        name = _open(running.stub)
        run = journal._run

        def full(statement, *values):
            if statement.startswith("BEGIN"):
                raise sqlite3.OperationalError("database or disk is full")
            return run(statement, *values)

        monkeypatch.setattr(journal, "_run", full)
        told = []
        with refused(StatusCode.UNAVAILABLE) as errors:
            running.stub.Append(pb.AppendRequest(session_id=name, prompt=tokens([1])))
        told += [errors[0].details(), *(str(value) for _, value in errors[0].trailing_metadata())]
        with pytest.raises(ClosedError, match="disk is full") as caught:  # in process all is told
            running.service.append(name, [1])
        told.append(rpc_errors.status_of(caught.value, "7").message)
    assert not any("journal" in one or "changes" in one or "full" in one for one in told)
    assert told[0] == told[-1]
    assert f"{tmp_path}/journal: " in caplog.text and "database or disk is full" in caplog.text


def test_text_needs_a_tokenizer(engine):
    with grpc_service.serving(engine, None) as running:
        _open(running.stub)
        with refused(StatusCode.INVALID_ARGUMENT) as errors:
            running.stub.Append(pb.AppendRequest(session_id="s", prompt=text("a")))
        violation = grpc_service.detail(errors[0], "BadRequest").field_violations[0]
        assert violation.field == "prompt.text"


def test_questions_that_are_refused_are_not_remembered(running, stub):
    name = _open(stub)
    for ids in ([2**32 - 1] * 5, [2**32 - 1] * 5, [2**31] * 6, [2**32 - 1] * 4 + [1]):
        asked = pb.Question(prompt=tokens(ids), max_new_tokens=1)
        with refused(StatusCode.INVALID_ARGUMENT):
            list(stub.Query(pb.QueryRequest(session_id=name, question=asked)))
    running.service.wait_until_idle(WAIT_S)
    assert list(stub.Query(query(name)))[-1].answer.token_ids


# Too much


def test_more_than_may_wait_is_told_when_to_come_again(engine, model):
    with grpc_service.serving(engine, model.tokenizer, max_waiting=2) as running:
        name = _open(running.stub)
        with grpc_service.held(running.service):
            waiting = [running.stub.Query(query(name)) for _ in range(2)]
            submitting = running.service._submitting
            grpc_service.wait_until(lambda: submitting[JobClass.QUERY] == 2)
            with refused(StatusCode.RESOURCE_EXHAUSTED) as errors:
                list(running.stub.Query(query(name)))
            delay = grpc_service.detail(errors[0], "RetryInfo").retry_delay
            assert delay.ToTimedelta().total_seconds() > 0
        for stream in waiting:
            grpc_service.parts(stream)


def test_a_stream_of_appends_waits_for_room_instead(engine, model):
    with grpc_service.serving(engine, model.tokenizer, max_waiting=2) as running:
        name = _open(running.stub)
        requests = [pb.AppendRequest(session_id=name, prompt=tokens([n])) for n in range(40)]
        assert running.stub.AppendStream(iter(requests), timeout=WAIT_S).version == 40


def test_a_message_beyond_the_limit_is_refused(engine, model):
    with grpc_service.serving(engine, model.tokenizer, max_message_bytes=4096) as running:
        _open(running.stub)
        with refused(StatusCode.RESOURCE_EXHAUSTED):
            running.stub.Append(pb.AppendRequest(session_id="s", prompt=text("a" * 5000)))
        with refused(StatusCode.FAILED_PRECONDITION):
            running.stub.Append(pb.AppendRequest(session_id="s", prompt=text("a" * 4000)))


def test_no_other_call_waits_for_a_question_that_is_long_only_by_its_many_choices(
    running, stub, monkeypatch
):
    threads, ids = set(), prompts.ids

    def note(*args, **more):
        threads.add(threading.current_thread())
        return ids(*args, **more)

    monkeypatch.setattr(prompts, "ids", note)
    _open(stub)
    threads.clear()
    choices = [text(f"{n:03} " + "a" * 60) for n in range(100)]
    asked = pb.Question(prompt=tokens([30]), choices=choices)
    with refused(StatusCode.INVALID_ARGUMENT):  # a choice is longer than a step
        list(stub.Query(pb.QueryRequest(session_id="s", question=asked), timeout=WAIT_S))
    assert len(threads) == 1 and running.loop._thread not in threads


def test_nothing_is_applied_behind_an_append_of_a_stream_that_fails(stub):
    name = _open(stub)
    sizes = (10, 20, 60, 5, 5)  # the third does not fit
    requests = [pb.AppendRequest(session_id=name, prompt=tokens([1] * size)) for size in sizes]
    with refused(StatusCode.FAILED_PRECONDITION) as errors:
        stub.AppendStream(iter(requests), timeout=WAIT_S)
    info = grpc_service.detail(errors[0], "ErrorInfo")
    assert dict(info.metadata) == {"applied": "2", "version": "2"}
    session = stub.GetSession(pb.GetSessionRequest(session_id=name))
    assert (session.version, session.context_tokens) == (2, len(IDS) + 30)


# Late, lost, overlapping


def test_what_has_not_begun_by_its_deadline_is_not_run(running, stub, engine):
    name = _open(stub)
    forwarded = engine.executor.tokens_forwarded
    with grpc_service.held(running.service):
        for call in (
            lambda: list(stub.Query(query(name), timeout=0.1)),
            lambda: stub.Append(pb.AppendRequest(session_id=name, prompt=tokens([1])), timeout=0.1),
        ):
            with refused(StatusCode.DEADLINE_EXCEEDED):
                call()
    for job_class in (JobClass.QUERY, JobClass.APPEND):
        ended = running.service.metrics.by_class[job_class].ended
        grpc_service.wait_until(lambda ended=ended: ended[State.EXPIRED] == 1)
    assert engine.executor.tokens_forwarded == forwarded
    assert running.service.version(name) == 0


@pytest.mark.parametrize("commit", [False, True])
def test_a_client_that_goes_away_ends_its_answer_and_frees_its_cells(running, stub, engine, commit):
    name = _open(stub)
    held = engine.cells_held
    grpc_service.slow_down(running.service)
    stream = stub.Query(query(name, 80, commit=commit))
    while next(stream).WhichOneof("part") != "delta":
        pass
    assert engine.cells_held > held or commit
    stream.cancel()
    ended = running.service.metrics.by_class[JobClass.QUERY].ended
    grpc_service.wait_until(lambda: ended)
    assert dict(ended) == {State.CANCELLED: 1}
    running.service.wait_until_idle(WAIT_S)
    assert engine.cells_held == held
    session = stub.GetSession(pb.GetSessionRequest(session_id=name))
    assert (session.version, session.context_tokens) == (0, len(IDS))


def test_a_client_that_goes_away_before_its_turn_is_not_run_to_the_end(running, stub):
    name = _open(stub)
    grpc_service.slow_down(running.service)
    with grpc_service.held(running.service):
        stream = stub.Query(query(name, 80))
        grpc_service.wait_until(lambda: running.service._submitting[JobClass.QUERY])
        stream.cancel()
        grpc_service.wait_until(lambda: running.server._backend.num_calls == 0)
    ended = running.service.metrics.by_class[JobClass.QUERY].ended
    grpc_service.wait_until(lambda: ended)
    assert dict(ended) == {State.CANCELLED: 1}


def test_a_client_that_goes_away_leaves_no_session_behind(running, stub, engine):
    grpc_service.slow_down(running.service)
    for delay in (0.0, 0.02, 0.05):
        prefix = tokens([n % 40 + 20 for n in range(80)])
        future = stub.CreateSession.future(pb.CreateSessionRequest(prefix=prefix))
        grpc_service.time.sleep(delay)
        future.cancel()
        grpc_service.wait_until(lambda: running.server._backend.num_calls == 0)
    grpc_service.wait_until(lambda: engine.cells_held == 0 and not running.service._sessions)


def _wait_for_threads(running):
    """Wait for all that calls have left behind to be run."""
    barrier = threading.Barrier(rpc_calls.NUM_THREADS + 1)
    for _ in range(rpc_calls.NUM_THREADS):
        running.server._backend.later(barrier.wait, WAIT_S)
    barrier.wait(WAIT_S)


def _anothers(service):
    service.close_session("new")
    service.create(IDS, session_id="new")


USES = {
    "nothing": lambda service: None,
    "append": lambda service: service.append("new", [1]).result(WAIT_S),
    "query": lambda service: service.query("new", ASKED).result(WAIT_S),
    "register": lambda service: service.register("new", ASKED),
    "another's": _anothers,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("opens", ["CreateSession", "Fork"])
def test_a_session_that_is_in_use_outlives_the_call_that_opened_it(running, stub, opens, use):
    service, opened, release = running.service, threading.Event(), threading.Event()
    _open(stub, "parent")
    describe = service.describe

    def describe_later(name):
        opened.set()
        assert release.wait(WAIT_S)
        return describe(name)

    service.describe = describe_later
    requests = {
        "CreateSession": pb.CreateSessionRequest(session_id="new", prefix=tokens(IDS)),
        "Fork": pb.ForkRequest(session_id="parent", new_session_id="new"),
    }
    future = getattr(stub, opens).future(requests[opens])
    assert opened.wait(WAIT_S)
    USES[use](service)
    future.cancel()
    grpc_service.wait_until(lambda: running.server._backend.num_calls == 0)
    release.set()
    _wait_for_threads(running)
    assert ("new" in service._sessions) == (use != "nothing")


def test_a_numbered_append_that_was_given_up_is_applied_once(running, stub):
    name = _open(stub)
    request = pb.AppendRequest(session_id=name, prompt=tokens([1, 2]), writer="feed", sequence=1)
    with grpc_service.held(running.service), refused(StatusCode.DEADLINE_EXCEEDED):
        stub.Append(request, timeout=0.1)
    grpc_service.slow_down(running.service)
    given_up = stub.Append.future(request)
    grpc_service.time.sleep(0.03)
    given_up.cancel()
    assert stub.Append(request, timeout=WAIT_S).version == 1
    session = stub.GetSession(pb.GetSessionRequest(session_id=name))
    assert (session.version, session.context_tokens) == (1, len(IDS) + 2)
    other = pb.AppendRequest(session_id=name, prompt=tokens([3]), writer="feed", sequence=1)
    with refused(StatusCode.INVALID_ARGUMENT):
        stub.Append(other)


def test_a_numbered_append_that_comes_again_does_not_end_with_who_sent_it_first(running, stub):
    name = _open(stub)
    request = pb.AppendRequest(session_id=name, prompt=tokens([1, 2]), writer="feed", sequence=1)
    with grpc_service.held(running.service):
        first, cut = stub.Append.future(request, timeout=0.2), stub.Append.future(request)
        again = stub.Append.future(request, timeout=WAIT_S)
        grpc_service.wait_until(lambda: running.server._backend.num_calls == 3)
        cut.cancel()
        with refused(StatusCode.DEADLINE_EXCEEDED):
            first.result()
        grpc_service.wait_until(lambda: running.server._backend.num_calls == 1)
    assert again.result().version == 1
    assert stub.GetSession(pb.GetSessionRequest(session_id=name)).version == 1


def test_turns_to_be_committed_do_not_overlap(running, stub):
    name = _open(stub)
    grpc_service.slow_down(running.service)
    first = stub.Query(query(name, 20, commit=True))
    next(first)
    with refused(StatusCode.ABORTED):
        list(stub.Query(query(name, commit=True)))
    appended = stub.Append.future(pb.AppendRequest(session_id=name, prompt=tokens([1])))
    list(first)
    assert appended.result(WAIT_S).version == 2
    assert list(stub.Query(query(name, commit=True)))[-1].answer.version == 2


def test_a_session_that_is_closed_ends_its_streams(running, stub):
    name = _open(stub)
    grpc_service.slow_down(running.service)
    watch, stream = (
        stub.WatchAnswers(pb.WatchAnswersRequest(session_id=name)),
        stub.Query(query(name, 80)),
    )
    next(stream)
    stub.CloseSession(pb.CloseSessionRequest(session_id=name))
    with refused(StatusCode.ABORTED):
        list(stream)
    with refused(StatusCode.NOT_FOUND):
        list(watch)


# Start and end


def _health(channel):
    check = health_pb2_grpc.HealthStub(channel).Check
    return check(health_pb2.HealthCheckRequest(service="jaxstate.v1.JaxState")).status


def test_nothing_is_served_before_the_model_is_there():
    with grpc_service.bound() as (_, _, channel, _):
        assert _health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        stub = grpc_service.jaxstate_pb2_grpc.JaxStateStub(channel)
        with refused(StatusCode.UNAVAILABLE) as errors:
            stub.GetStats(pb.GetStatsRequest())
        assert grpc_service.detail(errors[0], "RetryInfo").retry_delay.seconds == 1


def test_a_server_that_stops_finishes_what_is_under_way(running, stub):
    name = _open(stub)
    grpc_service.slow_down(running.service)
    watch = stub.WatchAnswers(pb.WatchAnswersRequest(session_id=name))
    stream = stub.Query(query(name, 60))
    next(stream)
    stopped = running.loop.submit(running.server.stop())
    grpc_service.wait_until(
        lambda: _health(running.channel) == health_pb2.HealthCheckResponse.NOT_SERVING
    )
    with refused(StatusCode.UNAVAILABLE):
        stub.GetStats(pb.GetStatsRequest())
    with refused(StatusCode.UNAVAILABLE):
        list(watch)
    assert list(stream)[-1].HasField("answer")
    stopped.result(WAIT_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_calls_of_a_service_that_ends_by_itself_end_too(running, stub):
    name = _open(stub)
    grpc_service.slow_down(running.service)
    watch = stub.WatchAnswers(pb.WatchAnswersRequest(session_id=name))
    stream = stub.Query(query(name, 80))
    next(stream)

    def broken():
        raise RuntimeError("broken")

    running.service._after_steps.evaluate = broken
    for call in (stream, watch, stub.Query(query(name))):
        with refused(StatusCode.UNAVAILABLE):
            list(call)
    grpc_service.wait_until(
        lambda: _health(running.channel) == health_pb2.HealthCheckResponse.NOT_SERVING
    )


def test_a_taken_port_is_not_shared(running):
    with pytest.raises(RuntimeError), grpc_service.bound(port=running.port):
        raise AssertionError("bound twice")
