"""The page of a running service tells what is there, to those whom it concerns."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import re
import socket
import threading
import time

import grpc_service
import live_page as client
import pytest
import tiny_engine
import tiny_service

from jaxstate.answer import Answer, FinishReason, Source
from jaxstate.flash import FlashQuery, Question
from jaxstate.serving import live_feed, live_page, live_state
from jaxstate.serving.live_page import LivePage

WAIT_S = 60


@functools.cache
def _compiled():
    return tiny_engine.build(num_pages=96, tokenizer=tiny_engine.LetterTokenizer())


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(live_feed, "EVERY_S", 0.02)


@pytest.fixture
def service():
    with tiny_service.started(_compiled(), preposition=0) as service:
        yield service


@pytest.fixture
def page(service):
    page = LivePage(host="127.0.0.1", port=0)
    page.open(service, "tiny")
    yield page
    page.close()


def _question(seed, **how):
    return Question(token_ids=tuple(tiny_engine.random_ids(seed, 5)), max_new_tokens=3, **how)


def _text(ids):
    return tiny_engine.LetterTokenizer().decode(ids)


def test_sessions_and_answers_are_shown_as_they_change(service, page):
    session = service.create(tiny_engine.random_ids(1, 10), session_id="feed:1", tenant="ann")
    service.register(session, _question(2), risk=0.05)
    service.wait_until_idle(WAIT_S)
    with contextlib.closing(client.events(page.port)) as stream:
        first = next(stream)
        answer = service.query(session, _question(2)).result(WAIT_S)
        assert (first["state"], first["model"], first["tenant"]) == ("ready", "tiny", None)
        (shown,) = first["sessions"]
        assert (shown["id"], shown["tenant"], shown["version"]) == ("feed:1", "ann", 0)
        assert (shown["context_tokens"], shown["prefix_tokens"], shown["lag_tokens"]) == (10, 10, 0)
        (question,) = shown["questions"]
        assert question["question"] == _text(_question(2).token_ids)
        found = question["answer"]
        assert found["text"] == _text(answer.token_ids)
        assert (found["source"], found["version"], found["behind"]) == ("computed", 0, 0)
        assert 0 <= found["age_s"] < WAIT_S and question["risk"] == 0.05
        assert first["cells"]["sessions"] == 16 and first["cells"]["free"] < 96 * 8

        service.append(session, tiny_engine.random_ids(3, 20)).result(WAIT_S)
        changed = client.until(stream, lambda event: event["sessions"][0]["version"] == 1)
        assert changed["sessions"][0]["context_tokens"] == 30
        fresh = client.until(
            stream, lambda event: event["sessions"][0]["questions"][0]["answer"]["version"] == 1
        )
        (question,) = fresh["sessions"][0]["questions"]
        assert (question["evaluations"], question["hits"]) == (2, 1)
        assert question["answer"]["text"] == _text(
            service.query(session, _question(2)).result(WAIT_S).token_ids
        )
        service.close_session(session)
        client.until(stream, lambda event: not event["sessions"])


def test_an_append_under_way_is_shown_as_lag_and_its_answers_as_outdated(service, page):
    session = service.create(tiny_engine.random_ids(4, 10))
    service.register(session, _question(5))
    service.wait_until_idle(WAIT_S)
    step, go_on = service._scheduler.step, threading.Event()

    def held(*args):
        go_on.wait(0.2)  # long enough to be looked at between two steps
        return step(*args)

    service._scheduler.step = held
    with contextlib.closing(client.events(page.port)) as stream:
        next(stream)
        service.append(session, tiny_engine.random_ids(6, 40))
        lagging = client.until(stream, lambda event: event["sessions"][0]["lag_tokens"])
        assert lagging["sessions"][0]["lag_tokens"] == 40
        assert 0 <= lagging["sessions"][0]["lag_s"] < WAIT_S
        behind = client.until(
            stream, lambda event: event["sessions"][0]["questions"][0]["answer"]["behind"]
        )
        assert behind["sessions"][0]["questions"][0]["answer"]["behind"] == 1
        assert behind["sessions"][0]["lag_tokens"] == 0
        go_on.set()


def test_a_named_tenant_is_shown_nothing_of_others(service, page):
    for tenant in ("ann", "bob", ""):
        name = service.create(tiny_engine.random_ids(7, 4), tenant=tenant)
        service.register(name, _question(8))
    service.wait_until_idle(WAIT_S)
    everybody = next(client.events(page.port))
    assert len(everybody["sessions"]) == 3
    for tenant, path in (
        ("ann", "?tenant=ann"),
        ("", "?tenant="),
        ("nobody", "?tenant=nobody"),
        ("ann' or ''='", "?tenant=ann%27%20or%20%27%27=%27"),
    ):
        event = next(client.events(page.port, f"/events{path}"))
        assert event.keys() == {"state", "model", "tenant", "sessions"}
        assert event["tenant"] == tenant
        expected = [one for one in everybody["sessions"] if one["tenant"] == tenant]
        assert [one["id"] for one in event["sessions"]] == [one["id"] for one in expected]
        assert len(expected) == (tenant in ("ann", "", "bob"))


def test_many_viewers_cost_what_one_costs_and_nobody_costs_nothing(service, page, monkeypatch):
    calls = []
    overview = service.overview
    monkeypatch.setattr(live_feed, "EVERY_S", 0.5)
    monkeypatch.setattr(service, "overview", lambda: calls.append(1) or overview())
    time.sleep(0.6)
    assert not calls
    streams = [client.events(page.port) for _ in range(8)]
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(len(streams)) as threads:
        assert len(list(threads.map(next, streams))) == 8
    assert len(calls) <= 2 + (time.monotonic() - began) / 0.5
    for stream in streams:
        stream.close()
    grpc_service.wait_until(lambda: not page.feed._viewers)
    time.sleep(0.6)
    seen = len(calls)
    time.sleep(0.6)
    assert len(calls) == seen


def test_more_viewers_than_the_limit_are_refused_until_one_goes(page):
    streams = [client.events(page.port) for _ in range(live_page.MOST_VIEWERS)]
    for stream in streams:
        next(stream)
    status, _, body = client.get(page.port, "/events")
    assert status == 503 and str(live_page.MOST_VIEWERS).encode() in body
    for stream in streams:
        stream.close()
    grpc_service.wait_until(lambda: page.viewers.acquire(blocking=False))
    page.viewers.release()
    with contextlib.closing(client.events(page.port)) as stream:
        next(stream)


def test_the_page_loads_nothing_else_and_runs_its_own_script_alone(page):
    status, headers, body = client.get(page.port, "/")
    html = body.decode()
    assert status == 200 and headers["Content-Type"].startswith("text/html")
    assert not re.search(r"(src|href)=\"(?!events|metrics)", html)
    assert "http:" not in html and "https:" not in html
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert unsafe not in html
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert policy.count("'sha256-") == 2
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "10.1.2.3", ""])
def test_a_foreign_name_of_the_server_is_refused(page, host):
    for path in ("/", "/events", "/metrics"):
        assert client.get(page.port, path, Host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "[::1]:50052"])
def test_names_of_the_loopback_are_taken(page, host):
    assert client.get(page.port, "/", Host=host)[0] == 200


def test_unknown_paths_are_not_found_and_other_methods_not_supported(page):
    assert client.get(page.port, "/../pyproject.toml")[0] == 404
    with socket.create_connection(("127.0.0.1", page.port), WAIT_S) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b" 501 " in connection.recv(100)


def test_before_the_model_is_there_the_page_says_so(service):
    page = LivePage(host="127.0.0.1", port=0)
    with contextlib.closing(client.events(page.port)) as stream:
        assert next(stream) == {"state": "loading", "tenant": None, "sessions": []}
        assert client.get(page.port, "/metrics")[0] == 503
        page.open(service, "tiny")
        assert client.until(stream, lambda event: event["state"] == "ready")["model"] == "tiny"
        assert client.get(page.port, "/metrics")[0] == 200
        page.drain()
        service.create([1, 2])
        client.until(stream, lambda event: event["state"] == "draining")
        page.close()
        assert not list(stream)  # it ends
    with pytest.raises(ConnectionRefusedError):
        client.get(page.port, "/")


def test_a_service_that_is_closed_ends_what_is_watched(service, page):
    with contextlib.closing(client.events(page.port)) as stream:
        next(stream)
        service.close()
        assert len(list(stream)) < 100
    assert client.get(page.port, "/metrics")[0] == 503


def test_what_has_no_text_and_what_is_long_can_be_read():
    answer = Answer(
        token_ids=(7, 8), text="", finish_reason=FinishReason.LENGTH, source=Source.RESUMED,
        version=1, context_len=1, tokens_forwarded=1, gap=1.0,
    )  # fmt: skip
    query = FlashQuery(
        flash_id=1, question=_question(9, choices=((1,), (2, 3))), answer=answer, answered_at=5.0,
        error=ValueError("<b>"),
    )  # fmt: skip
    shown = live_state._question(8.0, 3, query, lambda ids: "")
    assert shown["question"] == "tokens " + " ".join(map(str, _question(9).token_ids))
    assert shown["choices"] == ["tokens 1", "tokens 2 3"] and shown["error"] == "<b>"
    assert (shown["answer"]["behind"], shown["answer"]["age_s"]) == (2, 3.0)
    long = live_state._question(8.0, 3, query, lambda ids: "a" * 5000 + "z")
    assert len(long["question"]) < 500 and long["question"].endswith("az")
    json.dumps(shown, allow_nan=False)
