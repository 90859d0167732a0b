"""The Python client against a real server: as in process, and over a network that fails."""

from __future__ import annotations

import asyncio
import contextlib
import decimal
import json
import subprocess
import sys
import threading
import time

import certificates
import command_line
import cut_proxy
import grpc
import grpc_service
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from grpc_service import WAIT_S

from jaxstate import errors
from jaxstate.answer import FinishReason, Source
from jaxstate.scheduler import State
from jaxstate.serving import (
    AsyncClient,
    Client,
    Tls,
    client_channel,
    client_rows,
    rpc_calls,
    rpc_errors,
    tls,
    tokens_file,
)
from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving.auth import Access
from jaxstate.serving.journal import Journal
from jaxstate.serving.local_service import LocalService
from jaxstate.serving.rpc_calls import Served

IDS = [20, 31, 22, 43, 24, 35]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return grpc_service.load(tmp_path_factory.mktemp("client"))


@pytest.fixture(scope="module")
def engine(model):
    return grpc_service.engine_of(model)


@pytest.fixture(scope="module")
def dense(model):
    return command_line.Dense(model, 64)


@pytest.fixture(scope="module")
def spare(model):
    """For services of a test's own: an engine has one at a time."""
    return grpc_service.engine_of(model)


@pytest.fixture(scope="module")
def running(engine, model):
    with grpc_service.serving(engine, model.tokenizer) as running:
        yield running


@pytest.fixture
def client(running):
    with Client(f"localhost:{running.port}", timeout_s=WAIT_S) as client:
        yield client


@pytest.fixture
def session(client):
    with client.create(IDS) as session:
        yield session


def _context(running, session):
    """What the engine holds behind the prefix."""
    engine = running.service._engine
    held = engine.session(session.session_id)
    return list(held.token_ids[held.frozen_len :])


def _text(running, session):
    return running.service.text(_context(running, session))


# The verbs


def test_a_session_answers_as_the_model_does(session, dense):
    assert session.append([50, 51, 52]) == 1
    stream = session.query([60, 61], max_new_tokens=6, top_logprobs=2, ignore_model_eos=True)
    tokens = list(stream)
    answer = stream.answer
    assert [token.token_id for token in tokens] == list(answer.token_ids)
    assert list(answer.token_ids) == dense.greedy([*IDS, 50, 51, 52, 60, 61], 6)
    expected = dense.logprobs([*IDS, 50, 51, 52, 60, 61])[-1]
    assert tokens[0].logprob == pytest.approx(expected[tokens[0].token_id], abs=1e-4)
    assert sorted(tokens[0].top_logprobs) == sorted(np.argsort(-expected)[:2].tolist())
    assert "".join(token.text for token in tokens) == answer.text
    assert answer.tokens == tuple(tokens) and answer is stream.result()
    assert (answer.finish_reason, answer.source) == (FinishReason.LENGTH, Source.COMPUTED)
    assert (answer.version, answer.age, answer.context_len) == (1, 0, len(IDS) + 3)
    assert (answer.usage.prompt_tokens, answer.usage.answer_tokens) == (2, 6)
    assert stream.prompt.prompt_tokens == 2


def test_choices_are_compared_by_their_probability(session, dense):
    answer = session.query([60], choices=[[70], [71], np.array([72])]).result()
    expected = dense.logprobs([*IDS, 60])[-1][[70, 71, 72]]
    expected -= np.log(np.exp(expected).sum())
    assert answer.choice == int(expected.argmax())
    assert answer.choice_logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_durable_verbs_change_the_session_and_count_its_versions(running, session):
    assert session.append("abcd") == 1
    assert session.rollback(1) == 2
    assert _text(running, session) == "abc"
    assert session.update("abxy") == 3 == session.version
    assert _text(running, session) == "abxy"
    answer = session.query("?", max_new_tokens=2, commit=True).result()
    assert _context(running, session)[-2:] == list(answer.token_ids) and session.version == 4
    info = session.describe()
    assert (info.version, info.context_len, info.frozen_len) == (4, len(IDS) + 4 + 1 + 2, len(IDS))


def test_sessions_are_listed_over_pages_forked_and_closed_by_their_blocks(client, monkeypatch):
    monkeypatch.setattr("jaxstate.serving.rpc_sessions._DEFAULT_PAGE", 2)
    with client.create(IDS, session_id="p1", when_full="slide") as parent:
        with parent.fork(new_id="p2") as child, client.create(session_id="p3", keep=True) as kept:
            child.append("x")
            listed = {one.session_id: one for one in client.sessions()}
            assert list(listed) == ["p1", "p2", "p3"]
            assert (listed["p1"].context_len, listed["p2"].context_len) == (6, 7)
            assert listed["p1"].when_full == "slide" and listed["p3"].when_full == "error"
        assert [one.session_id for one in client.sessions()] == ["p1", "p3"]
        with client.session("p3") as attached:  # a handle that has not opened it leaves it
            assert attached.describe().version == 0
    assert [one.session_id for one in client.sessions()] == ["p3"]
    kept.close()
    with pytest.raises(errors.UnknownSessionError) as caught:
        kept.describe()
    assert caught.value.session_id == "p3"


def test_a_registered_question_is_answered_before_it_is_asked(session, dense):
    registered = session.register([60, 61], max_new_tokens=3, ignore_model_eos=True)
    assert (registered.question, registered.max_new_tokens) == ((60, 61), 3)
    fresh = next(iter(session.watch()))
    expected = dense.greedy([*IDS, 60, 61], 3)
    assert list(fresh.answer.token_ids) == expected and fresh.flash_id == registered.flash_id
    answer = session.query([60, 61], max_new_tokens=3, ignore_model_eos=True).result()
    assert answer.source is Source.FLASH and list(answer.token_ids) == expected
    listed = session.flash_queries()
    assert [(one.flash_id, one.hits, one.error) for one in listed] == [(registered.flash_id, 1, "")]
    session.unregister(registered.flash_id)
    held = session.register([60, 61], max_new_tokens=3, regex="a+")
    assert [one.constraint for one in session.flash_queries()] == [("regex", "a+")]
    session.unregister(held.flash_id)
    assert session.flash_queries() == []


def test_a_question_can_wait_for_what_its_handle_has_written(running, client, session):
    assert session.query("?", max_new_tokens=1, min_version="mine").result().version == 0
    session.append("a")
    with pytest.raises(errors.ExpiredError):
        session.query("?", max_new_tokens=1, min_version=2, deadline_s=0.2).result()
    waiting = session.query("?", max_new_tokens=1, min_version=2)
    client.session(session.session_id).append("b")
    assert waiting.result().version == 2
    session.append("c")
    assert session.query("?", max_new_tokens=1, min_version="mine").result().version == 3


def test_ahead_of_questions_text_and_the_server(running, client, session, model, dense):
    ahead = session.advance([60, 61], max_new_tokens=4)
    assert list(ahead.token_ids) == dense.greedy([*IDS, 60, 61], 4)
    assert session.query([60, 61], max_new_tokens=2).result().source is Source.RESUMED
    session.declare("Answer:")
    assert client.detokenize(client.tokenize("some text")) == "some text"
    rendered = client.render_template([{"role": "user", "content": "Hi"}])
    assert rendered.text == "<|im_start|>Hi:"
    assert (
        list(rendered.token_ids)
        == model.tokenizer.encode_chat([{"role": "user", "content": "Hi"}]).ids
    )
    info, stats = client.model_info(), client.stats()
    assert (info.name, info.vocab_size, info.eos_ids) == ("tiny", 264, (2,))
    assert stats.cells == info.cells and stats.classes["query"].ended["done"] >= 1
    prompt = [{"role": "user", "content": "Hi"}]
    answer = client.generate(prompt, max_new_tokens=3, ignore_model_eos=True).result()
    assert list(answer.token_ids) == dense.greedy(rendered.token_ids, 3)


def test_an_answer_can_be_held_to_a_form(session):
    answer = session.query("?", max_new_tokens=8, regex="(ab){2}c").result()
    assert answer.text == "ababc"
    answer = session.query("?", max_new_tokens=9, json_schema={"enum": ["up", "down"]}).result()
    assert json.loads(answer.text) in ("up", "down")
    with pytest.raises(errors.InputError) as caught:
        session.query("?", regex="(").result()
    assert caught.value.field == "question.regex"


def test_sampling_is_taken_as_in_process_or_as_names(session):
    from jaxstate import Sampling

    drawn = {
        session.query("?", max_new_tokens=8, sampling=given).result().token_ids
        for given in (Sampling(temperature=2.0, seed=5), {"temperature": 2.0, "seed": 5})
    }
    greedy = session.query("?", max_new_tokens=8).result().token_ids
    assert len(drawn) == 1 and greedy not in drawn
    with pytest.raises(errors.InputError, match="sampling: expected any of temperature"):
        session.query("?", sampling={"temprature": 1.0})


# What is appended


@pytest.mark.parametrize(
    "rows, text, versions",
    [
        ("a b\n", "a b\n", 1),
        ({"t": 1, "px": 2.5}, '{"t": 1, "px": 2.5}\n', 1),
        (["a\n", "b\n", "c\n"], "a\nb\nc\n", 3),
        ((f"{n};" for n in range(5)), "0;1;2;3;4;", 5),
        ([{"px": np.float64(0.5)}, {"px": decimal.Decimal("1.25")}],
         '{"px": 0.5}\n{"px": "1.25"}\n', 2),
        (pd.DataFrame({"t": [1, 2], "s": ["x", "y,z"]}), '1,x\n2,"y,z"\n', 1),
        (pd.DataFrame({"px": [1.5]}, index=pd.Index(["09:30"], name="t")), "09:30,1.5\n", 1),
        (pa.table({"t": [1, 2], "s": ["x", "y"]}), '1,"x"\n2,"y"\n', 1),
        (pa.RecordBatch.from_pydict({"t": [7]}), "7\n", 1),
    ],
)  # fmt: skip
def test_rows_of_many_kinds_become_text(running, session, rows, text, versions):
    assert session.append(rows) == versions
    assert _text(running, session) == text


def test_ids_and_messages_are_appended_as_such(running, session, model):
    messages = [{"role": "user", "content": "Hi"}]
    assert session.append(np.array([50, 51])) == 1
    assert session.append([[52], [53, 54]]) == 3
    assert session.append(messages) == 4
    chat = model.tokenizer.encode_chat(messages).ids
    assert _context(running, session) == [50, 51, 52, 53, 54, *chat]


def test_rows_are_gathered_into_larger_appends(running, session):
    assert session.append((f"{n};" for n in range(5)), batch_rows=2) == 3
    assert _text(running, session) == "0;1;2;3;4;"


def test_a_tables_header_is_for_the_prefix():
    frame = pd.DataFrame({"px": [1.5]}, index=pd.Index(["09:30"], name="t"))
    assert client_rows.header(frame) == "t,px\n"
    assert client_rows.header(pa.table({"a": [1], "b": [2]})) == '"a","b"\n'


@pytest.mark.parametrize("wrong", [5, b"ab", [1, "a"], [1.5], [-1], {1, 2}, [["a"]], None])
def test_what_cannot_be_appended_is_refused(session, wrong):
    with pytest.raises(errors.InputError, match="append"):
        session.append(wrong)
    assert session.describe().version == 0


def test_long_text_is_split_at_its_lines(monkeypatch):
    monkeypatch.setattr(client_rows, "_TEXT_BYTES", 40)
    text = "".join(f"line {n}\n" for n in range(20)) + "ü" * 55
    pieces = [prompt.text.text for prompt in client_rows.appends(text)]
    assert "".join(pieces) == text and len(pieces) > 4
    assert all(len(piece.encode()) <= 40 for piece in pieces)
    assert all(piece.endswith("\n") for piece in pieces[:3])


def test_more_rows_than_a_call_takes_go_in_several(running, client, monkeypatch):
    monkeypatch.setattr("jaxstate.serving.client_session.SERIES_MESSAGES", 7)
    with client.create(when_full="slide") as session:
        assert session.append(chr(97 + n % 26) for n in range(60)) == 60
        assert _text(running, session) == "".join(chr(97 + n % 26) for n in range(60))


def test_what_an_iterable_raises_is_raised_behind_the_rows_before_it(running, session):
    def rows():
        yield from "ab"
        raise KeyError("feed")

    with pytest.raises(KeyError, match="feed"):
        session.append(rows())
    assert _text(running, session) == "ab"


@pytest.mark.parametrize("batch_rows", [1, 2])
def test_a_series_says_how_many_of_its_appends_were_applied(running, session, batch_rows):
    rows = [letter * (30 // batch_rows) for letter in "abcd"[: 2 * batch_rows]] + ["e" * 60, "f"]
    with pytest.raises(errors.CapacityError) as caught:
        session.append(rows, batch_rows=batch_rows)
    assert caught.value.applied == 2 and session.describe().version == 2

    async def one_by_one():
        for row in rows:
            yield row

    async def run():
        async with AsyncClient(f"127.0.0.1:{running.port}") as client:
            async with await client.create() as session:
                with pytest.raises(errors.CapacityError) as caught:
                    await session.append(one_by_one(), batch_rows=batch_rows)
                return caught.value.applied

    assert asyncio.run(asyncio.wait_for(run(), WAIT_S)) == 2


def test_threads_can_write_through_one_handle(running, client):
    with client.create(when_full="slide") as session:
        threads = [
            threading.Thread(target=lambda: [session.append("x") for _ in range(10)])
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert session.describe().version == 60 and _text(running, session) == "x" * 60


# Ends


def _cancelled(running):
    return sum(one.ended[State.CANCELLED] for one in running.service.metrics.by_class.values())


def test_leaving_the_loop_ends_the_answer_on_the_server(running, session, monkeypatch):
    scheduler = running.service._scheduler
    monkeypatch.setattr(scheduler, "step", scheduler.step)  # to be put back
    grpc_service.slow_down(running.service)
    before = _cancelled(running)
    stream = session.query("?", max_new_tokens=80, ignore_model_eos=True)
    for count, _ in enumerate(stream, 1):
        if count == 3:
            break
    grpc_service.wait_until(lambda: _cancelled(running) == before + 1)
    with pytest.raises(errors.CancelledError):
        stream.result()
    assert session.query("?", max_new_tokens=1).result().version == 0


def test_a_stream_that_nobody_holds_any_more_is_ended(running, session):
    before = _cancelled(running)
    stream = session.query("?", max_new_tokens=80, ignore_model_eos=True)
    next(iter(stream))
    del stream
    grpc_service.wait_until(lambda: _cancelled(running) == before + 1)


# Errors


_BUILT = {
    errors.UnknownSessionError: lambda: errors.UnknownSessionError("s9", ["a"]),
    errors.BusyError: lambda: errors.BusyError("queue: full", 0.25),
    errors.QuotaError: lambda: errors.QuotaError(
        "sessions: expected at most 2", quota="sessions", tenant="desk", retry_after_s=1.0
    ),
    errors.UnavailableError: lambda: errors.UnavailableError("going down", 0.5),
}
_SENT = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type)
    and issubclass(kind, errors.JaxStateError)
    and rpc_errors.code_of(_BUILT.get(kind, lambda kind=kind: kind("what"))())
    is not grpc.StatusCode.INTERNAL
]


@pytest.mark.parametrize("kind", _SENT, ids=lambda kind: kind.__name__)
def test_every_error_of_the_process_is_raised_by_the_client(running, monkeypatch, kind):
    raised = _BUILT.get(kind, lambda: kind("tokens: expected something else"))()

    def describe(session_id):
        raise raised

    monkeypatch.setattr(running.service, "describe", describe)
    with Client(f"127.0.0.1:{running.port}", retry=False) as client:
        with pytest.raises(kind) as caught:
            client.session("s9").describe()
    assert type(caught.value) is kind and isinstance(caught.value.__cause__, grpc.RpcError)
    for name in ("retry_after_s", "session_id", "quota", "tenant"):
        assert getattr(caught.value, name, None) == getattr(raised, name, None)
    # Not everybody is told which sessions there are, nor what files.
    if kind not in (errors.UnknownSessionError, errors.JournalError):
        assert str(caught.value) == str(raised)
    field = "tokens" if issubclass(kind, errors.InputError) else ""
    assert caught.value.field == field


def test_a_fault_of_the_server_is_no_fault_of_the_request(running, client, monkeypatch):
    def describe(session_id):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(running.service, "describe", describe)
    with pytest.raises(errors.RemoteError, match=r"server's log says why \(INTERNAL\)"):
        client.session("s").describe()


def test_wrong_arguments_name_their_field(session):
    with pytest.raises(errors.InputError) as caught:
        session.query("?", max_new_tokens=-1)
    assert "max_new_tokens" in str(caught.value)
    with pytest.raises(errors.InputError) as caught:
        session.query("?", max_new_tokens=0).result()
    assert caught.value.field == "question.max_new_tokens"
    with pytest.raises(errors.InputError, match="stale: expected one of compute, wait, serve"):
        session.query("?", stale="maybe")  # pyright: ignore[reportArgumentType]
    with pytest.raises(errors.InputError, match="regex and grammar: expected one of them"):
        session.query("?", regex="a", grammar="b")


def test_a_server_that_is_not_there_is_unavailable():
    with Client("127.0.0.1:1", retry=False, timeout_s=WAIT_S) as client:
        with pytest.raises(errors.UnavailableError) as caught:
            client.stats()
    assert caught.value.retry_after_s > 0
    with pytest.raises(errors.ClosedError, match="is closed"):
        client.stats()


def test_a_token_is_sent_to_this_machine_or_behind_tls_only(running, monkeypatch):
    sent = []

    def tenant_of(context, access):
        sent.append(dict(context.invocation_metadata()).get("authorization"))
        return ""

    monkeypatch.setattr(rpc_calls, "tenant_of", tenant_of)
    with Client(f"localhost:{running.port}", token="t0k") as client:
        client.stats()
    assert sent == ["Bearer t0k"]
    with pytest.raises(errors.InputError, match="token: expected tls to example.org:50051"):
        Client("example.org:50051", token="t0k")


def test_tenants_call_with_their_tokens_behind_tls(spare, model, tmp_path):
    authority = certificates.Authority(tmp_path, "authority")
    cert, key = authority.sign("box", "box")
    token = tokens_file.issue(tmp_path / "tokens", "ann", replace=False)
    with grpc_service.serving(
        spare, model.tokenizer, access=Access(tmp_path / "tokens"), tls=tls.Tls(cert=cert, key=key)
    ) as running:
        address, trusted = f"127.0.0.1:{running.port}", Tls(ca=authority.path, server_name="box")
        with Client(address, tls=trusted, token=token) as client:
            with client.create(IDS, session_id="s") as session, session.fork(new_id="t"):
                assert [one.session_id for one in client.sessions()] == ["s", "t"]
            with pytest.raises(errors.UnknownSessionError) as caught:
                session.describe()
            assert caught.value.session_id == "s"  # not what the engine calls it
        with Client(address, tls=trusted, token="other") as client:
            with pytest.raises(errors.UnauthenticatedError):
                client.stats()
        for wrong in (Tls(), Tls(ca=authority.path, server_name="other")):
            with Client(address, tls=wrong, token=token, retry=False) as client:
                with pytest.raises(errors.UnavailableError):
                    client.stats()
    with pytest.raises(errors.InputError, match="a certificate and its key"):
        Tls(cert="cert.pem")


# A network that fails


@contextlib.contextmanager
def _over_proxy(running, **how):
    with cut_proxy.before(running.port) as proxy:
        with Client(f"127.0.0.1:{proxy.port}", **how) as client:
            yield proxy, client


def _in_thread(function, *args):
    """Run something beside the test; returns a function that waits for its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*args)))
    thread.start()

    def result():
        thread.join(WAIT_S)
        assert results, "it raised, or goes on"
        return results[0]

    return result


@pytest.mark.parametrize("rows, applied", [("abc", 1), (["a", "b", "c"], 3)])
def test_an_append_whose_acknowledgement_was_lost_is_applied_once(running, rows, applied):
    with _over_proxy(running) as (proxy, client), client.create(IDS) as session:
        proxy.hold_answers()
        appended = _in_thread(session.append, rows)
        grpc_service.wait_until(lambda: running.service.version(session.session_id) == applied)
        proxy.cut()  # applied, and nobody was told
        assert appended() == applied
        assert session.append("d") == applied + 1 and _text(running, session) == "abcd"
        assert proxy.num_connections >= 2


def test_a_turn_is_not_committed_twice(running):
    with _over_proxy(running) as (proxy, client), client.create(IDS) as session:
        session.query("?", max_new_tokens=2, commit=True).result()  # it is connected now
        proxy.hold_answers()

        def turn():
            with pytest.raises(errors.UnavailableError):
                session.query("?", max_new_tokens=2, commit=True).result()
            return True

        asked = _in_thread(turn)
        grpc_service.wait_until(lambda: running.service.version(session.session_id) == 2)
        proxy.cut()
        assert asked()
        time.sleep(0.5)  # the channel would have tried again by now
        assert session.describe().version == 2


def test_a_question_whose_answer_was_lost_is_asked_again(running, dense):
    with _over_proxy(running) as (proxy, client), client.create(IDS) as session:
        proxy.hold_answers()
        done = running.service.metrics.answers.total()
        asked = _in_thread(lambda: session.query([60], max_new_tokens=3).result())
        grpc_service.wait_until(lambda: running.service.metrics.answers.total() > done)
        proxy.cut()
        assert list(asked().token_ids) == dense.greedy([*IDS, 60], 3)


def test_a_busy_server_is_asked_again_when_it_says(spare, model):
    with grpc_service.serving(spare, model.tokenizer, max_waiting=1) as running:
        address = f"127.0.0.1:{running.port}"
        with Client(address) as patient, Client(address, retry=False) as hasty:
            session = patient.create(IDS)
            with grpc_service.held(running.service):
                first = session.query("a", max_new_tokens=1)
                submitting = running.service._submitting
                grpc_service.wait_until(lambda: submitting.total() == 1)
                with pytest.raises(errors.BusyError) as caught:
                    hasty.session(session.session_id).query("b", max_new_tokens=1).result()
                assert caught.value.retry_after_s > 0
                second = session.query("b", max_new_tokens=1)
            assert first.result().version == second.result().version == 0


def _versions(fresh, count, flash_id=None):
    found = []
    for one in fresh:
        found.append((one.answer.version, one.missed))
        if len(found) == count:
            return found


def test_a_watcher_misses_nothing_while_the_network_is_down(running):
    with _over_proxy(running) as (proxy, client), client.create(when_full="slide") as session:
        session.register("up?", max_new_tokens=1)
        writer = Client(f"127.0.0.1:{running.port}").session(session.session_id)

        def append():
            version = writer.append("x")
            log = running.service._sessions[session.session_id].log
            grpc_service.wait_until(lambda: log._kept and log._kept[-1].answer.version == version)

        watch = session.watch()
        fresh = iter(watch)
        assert next(fresh).answer.version == 0
        append()
        assert next(fresh).answer.version == 1
        proxy.hold_answers()
        for _ in range(3):
            append()
        proxy.cut()
        append()
        assert _versions(fresh, 4) == [(2, False), (3, False), (4, False), (5, False)]
        writer._client.close()


@contextlib.contextmanager
def _restartable(engine, model, directory, port=0):
    """A server that keeps its sessions in a journal, started anew on its port."""
    with grpc_service.bound(port=port, grace_s=0) as (loop, server, _, port):
        journal = Journal(directory / "journal", durability="normal", fingerprint="tiny")
        service = LocalService(engine, journal=journal)
        loop.run(server.open(Served(service=service, tokenizer=model.tokenizer, name="tiny")))
        yield service, port
        loop.run(server.stop())
        service.close()
    for name in engine.session_ids:
        engine.close(name)
    engine.verbs.prefixes.tree.clear()


def test_a_watcher_goes_on_after_the_server_was_restarted_and_says_what_it_may_have_missed(
    spare, model, tmp_path, caplog
):
    with contextlib.ExitStack() as first:
        service, port = first.enter_context(_restartable(spare, model, tmp_path))
        client = Client(f"127.0.0.1:{port}")
        session = client.create(IDS)
        session.register("up?", max_new_tokens=1)
        fresh = iter(session.watch())
        assert _versions(fresh, 1) == [(0, False)]
        session.append("x")
        assert _versions(fresh, 1) == [(1, False)]
        told = _in_thread(_versions, fresh, 2)
        time.sleep(0.1)  # it waits
    time.sleep(0.3)  # it tries to reach what is not there
    with _restartable(spare, model, tmp_path, port) as (service, _):
        handle = client.session(session.session_id)
        assert handle.append("y") == 2
        # The newest answer is what it begins with again, which may be that to the version before.
        grpc_service.wait_until(lambda: "answers may have been missed" in caplog.text)
        log = service._sessions[session.session_id].log
        grpc_service.wait_until(lambda: log._kept and log._kept[-1].answer.version == 2)
        time.sleep(0.1)
        assert handle.append("z") == 3
        assert told() == [(2, True), (3, False)]
        client.close()


def test_a_watch_ends_when_it_is_told_to_and_when_its_session_is_gone(client, session):
    watch = session.watch()
    ended = _in_thread(list, watch)
    watch.cancel()
    assert ended() == []
    other = client.create()
    other.register("up?", max_new_tokens=1)
    fresh = iter(other.watch())
    next(fresh)
    other.close()
    with pytest.raises(errors.UnknownSessionError):
        next(fresh)


# In an event loop


def test_the_asynchronous_client_has_the_same_verbs(running, dense):
    async def rows():
        for row in ("a", "b"):
            yield row

    async def run():
        async with AsyncClient(f"localhost:{running.port}", timeout_s=WAIT_S) as client:
            async with await client.create(IDS) as session:
                assert await session.append([50, 51]) == 1
                assert await session.append(["c", "d"]) == 3
                assert await session.append(rows(), batch_rows=2) == 4
                assert await session.append(rows()) == 6
                assert await client.is_serving()
                context = [*IDS, 50, 51, *await client.tokenize("c"), *await client.tokenize("d")]
                context += 2 * [*await client.tokenize("a"), *await client.tokenize("b")]
                stream = session.query([60], max_new_tokens=4, ignore_model_eos=True)
                drawn = [token.token_id async for token in stream]
                assert drawn == dense.greedy([*context, 60], 4) == list(stream.answer.token_ids)
                registered = await session.register([61], max_new_tokens=1)
                async for fresh in session.watch():
                    assert fresh.flash_id == registered.flash_id
                    break
                async with await session.fork() as child:
                    assert await child.rollback(1) == 7
                await asyncio.gather(*(session.append("x") for _ in range(8)))
                info = await session.describe()
                assert info.version == 14 == session.version
                assert [one.session_id for one in await client.sessions()] == [info.session_id]
                before = _cancelled(running)
                async for _ in session.query("?", max_new_tokens=60, ignore_model_eos=True):
                    break
                while _cancelled(running) == before:
                    await asyncio.sleep(0.01)
            with pytest.raises(errors.UnknownSessionError):
                await session.describe()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_a_stream_that_is_cancelled_tells_its_reader_and_a_cancelled_reader_ends(
    running, session, monkeypatch
):
    scheduler = running.service._scheduler
    monkeypatch.setattr(scheduler, "step", scheduler.step)  # to be put back
    grpc_service.slow_down(running.service)
    how = dict(max_new_tokens=80, ignore_model_eos=True)
    stream = session.query("?", **how)
    next(iter(stream))
    stream.cancel()
    with pytest.raises(errors.CancelledError) as blocking:
        stream.result()

    async def run():
        async with AsyncClient(f"127.0.0.1:{running.port}") as client:
            stream = client.session(session.session_id).query("?", **how)
            reading = asyncio.create_task(stream.result())
            await asyncio.sleep(0.05)
            stream.cancel()
            with pytest.raises(errors.CancelledError) as caught:
                await reading
            assert str(caught.value) == str(blocking.value)
            with pytest.raises(errors.CancelledError):
                await stream.result()
            other = client.session(session.session_id).query("?", **how)
            reading = asyncio.create_task(other.result())
            await asyncio.sleep(0.05)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert reading.cancelled()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.session(session.session_id).query("?", **how).result()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_asynchronous_calls_are_tried_again_as_well(running):
    async def run(proxy):
        async with AsyncClient(f"127.0.0.1:{proxy.port}") as client:
            async with await client.create() as session:
                proxy.hold_answers()
                appending = asyncio.create_task(session.append("abc"))
                while running.service.version(session.session_id) == 0:
                    await asyncio.sleep(0.01)
                proxy.cut()
                assert await appending == 1 == (await session.describe()).version

    with cut_proxy.before(running.port) as proxy:
        asyncio.run(asyncio.wait_for(run(proxy), WAIT_S))


# What it costs


def test_a_client_needs_no_jax():
    program = (
        "import sys; from jaxstate.serving import AsyncClient, Client, Tls; from jaxstate import "
        "errors; print([m for m in ('jax', 'jaxlib', 'numpy', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_every_public_name_can_be_imported():
    import jaxstate
    from jaxstate import serving

    for package in (jaxstate, serving):
        for name in package.__all__:
            assert getattr(package, name).__name__ == name
        with pytest.raises(AttributeError):
            package.Nothing  # noqa: B018


def test_what_is_tried_again_are_methods_of_the_service():
    service = pb.DESCRIPTOR.services_by_name["JaxState"]
    for config in json.loads(client_channel.service_config())["methodConfig"]:
        for one in config["name"]:
            assert one["service"] == service.full_name
            assert one["method"] in service.methods_by_name
