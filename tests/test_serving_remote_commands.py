"""Commands that speak to a server: what they print, what they refuse, and how they find it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re

import certificates
import command_line
import grpc_service
import pytest
from command_line import run

from jaxstate.serving import Client, doctor_server, rpc_calls, serve_command, tls
from jaxstate.serving.snapshot_store import SnapshotStore

CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def jax_settings():
    with command_line.kept_jax_settings():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return grpc_service.load(tmp_path_factory.mktemp("remote"))


@pytest.fixture(scope="module")
def running(model, tmp_path_factory):
    engine = grpc_service.engine_of(model)
    store = SnapshotStore(tmp_path_factory.mktemp("saved"), fingerprint=model.fingerprint)
    with grpc_service.serving(engine, model.tokenizer, snapshots=store) as running:
        yield running


@pytest.fixture(scope="module")
def spare(model):
    """For a server of a test's own: an engine has one at a time."""
    return grpc_service.engine_of(model)


@pytest.fixture
def server(running, monkeypatch):
    """Its address; commands find it in the environment."""
    address = f"127.0.0.1:{running.port}"
    monkeypatch.setenv("JAXSTATE_SERVER", address)
    monkeypatch.delenv("JAXSTATE_TOKEN", raising=False)
    return address


@pytest.fixture
def client(server):
    with Client(server) as client:
        yield client


@pytest.fixture
def session(client):
    with client.create("Some context.", session_id="feed", when_full="slide") as session:
        yield session


def _refused(result, status, message):
    assert result.status == status and result.out == "", result
    assert re.search(message, result.err.splitlines()[-1]), result.err
    assert "Traceback" not in result.err


# ask


def test_a_server_is_asked_without_a_session(capsys, client):
    result = run(capsys, "ask", "--prompt", "Hello", "--max-new-tokens", 4, "--json")
    expected = client.generate(CHAT, max_new_tokens=4).result()
    found = json.loads(result.out)
    assert result.status == 0
    assert (found["ids"], found["text"]) == (list(expected.token_ids), expected.text)
    assert found["source"] == "computed" and found["session"] is None
    assert found["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    assert 0 < found["timings"]["first_token_ms"] <= found["timings"]["total_ms"]


def test_a_session_of_a_server_is_asked(capsys, session, server):
    command = ("ask", "--session", "feed", "--server", server, "--prompt", "up?", "--raw")
    result = run(capsys, *command, "--max-new-tokens", 4)
    answer = session.query("up?", max_new_tokens=4).result()
    assert (result.status, result.out) == (0, f"{answer.text}\n")
    assert "4 tokens after" in result.err
    session.register("up?", max_new_tokens=4)
    next(iter(session.watch()))
    result = run(capsys, *command, "--max-new-tokens", 4)
    assert result.out == f"{answer.text}\n" and ", flash, ended by length" in result.err


def test_a_model_here_and_a_server_are_not_asked_both(capsys, server):
    result = run(capsys, "ask", "--model", "m", "--server", server, "--prompt", "a")
    _refused(result, 2, "model: expected a model here or a server and its session, got both")
    result = run(capsys, "ask", "--model", "m", "--session", "s", "--prompt", "a")
    _refused(result, 2, "got both")


# sessions, snapshot, restore


def test_sessions_are_listed_and_closed(capsys, client, session):
    other = client.create("x", keep=True)
    session.append("rows")
    listed = run(capsys, "sessions", "--json").out.splitlines()
    assert list(map(json.loads, listed)) == [dataclasses.asdict(one) for one in client.sessions()]
    table = run(capsys, "sessions").out
    assert "feed" in table and "slide" in table and other.session_id in table
    assert run(capsys, "sessions", "close", other.session_id).status == 0
    assert [one.session_id for one in client.sessions()] == ["feed"]
    _refused(run(capsys, "sessions", "close", "none"), 1, "session none is unknown or closed")


def test_a_session_is_saved_and_brought_back(capsys, client, session):
    session.register("up?", max_new_tokens=2)
    saved = run(capsys, "snapshot", "feed", "monday", "--json")
    assert json.loads(saved.out) == dataclasses.asdict(client.snapshots().saved[0])
    listed = run(capsys, "snapshot").out
    assert "monday" in listed and "feed" in listed
    assert "monday2: session feed at version 0" in run(capsys, "snapshot", "feed", "monday2").out
    _refused(run(capsys, "snapshot", "feed", "monday"), 1, "monday")
    session.append("more")
    restored = run(capsys, "restore", "monday", "--session", "again", "--json")
    assert json.loads(restored.out)["num_flash"] == 1
    before = client.session("again").describe()
    assert before.context_len == before.frozen_len == session.describe().frozen_len
    client.session("again").close()
    client.delete_snapshot("monday")
    _refused(run(capsys, "restore", "monday"), 1, "monday")
    said = run(capsys, "restore", "monday2").out  # in the place of what it was
    assert "session feed at version" in said and "1 questions" in said


# Where the server is, and who calls


def test_no_server_is_told_in_a_sentence(capsys, monkeypatch):
    monkeypatch.setenv("JAXSTATE_SERVER", "127.0.0.1:1")
    _refused(run(capsys, "sessions"), 1, "^jaxstate: .*refused")


def test_tokens_come_from_the_environment_or_a_file(capsys, server, monkeypatch, tmp_path):
    sent = []

    def tenant_of(context, access):
        sent.append(dict(context.invocation_metadata()).get("authorization"))
        return ""

    monkeypatch.setattr(rpc_calls, "tenant_of", tenant_of)
    run(capsys, "sessions")
    monkeypatch.setenv("JAXSTATE_TOKEN", "of-environment")
    run(capsys, "sessions")
    path = tmp_path / "token"
    path.write_text("of-file\n")
    run(capsys, "sessions", "--token-file", path)
    assert sent == [None, "Bearer of-environment", "Bearer of-file"]
    result = run(capsys, "sessions", "--token-file", path, "--server", "example.org:1")
    _refused(result, 2, "token: expected tls to example.org:1")


@pytest.mark.parametrize(
    "wrong", ["s3cret\nof desk", "s3cret\r", "s3cret\tx", "s3cret\x7f", "s3crét"]
)
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(
    capsys, server, monkeypatch, tmp_path, wrong
):
    path = tmp_path / "token"
    path.write_text(f"a{wrong}b\n", encoding="utf-8")
    message = "^jaxstate: token: expected one line of printable ASCII"
    result = run(capsys, "sessions", "--token-file", path)
    _refused(result, 2, message)
    monkeypatch.setenv("JAXSTATE_TOKEN", wrong)
    of_environment = run(capsys, "sessions")
    _refused(of_environment, 2, message)
    assert "s3cr" not in result.err + of_environment.err


def test_tls_is_by_flags(capsys, spare, model, tmp_path):
    authority = certificates.Authority(tmp_path, "authority")
    cert, key = authority.sign("localhost", "localhost")
    asks = tls.Tls(cert=cert, key=key, client_ca=authority.path)
    with grpc_service.serving(spare, model.tokenizer, tls=asks) as running:
        server = ("--server", f"localhost:{running.port}", "--tls-ca", authority.path)
        cert, key = authority.sign("operator")
        mine = ("--tls-cert", cert, "--tls-key", key)
        result = run(capsys, "doctor", *server, *mine)
        assert result.status == 0 and "tiny: llama" in result.out, result
        _refused(run(capsys, "sessions", *server), 1, "^jaxstate: ")
    _refused(run(capsys, "sessions", *server, *mine[:2]), 2, "a certificate and its key")
    _refused(run(capsys, "sessions", "--tls-ca", tmp_path / "no.pem"), 2, "no.pem: no such file")


# doctor


def test_a_doctor_tells_what_a_server_serves(capsys, server, monkeypatch):
    result = run(capsys, "doctor", "--server", server, "--json")
    found = {one["check"]: one for one in map(json.loads, result.out.splitlines())}
    assert list(found) == ["server", "versions", "model", "load"] and result.status == 0
    assert {one["verdict"] for one in found.values()} == {"ok"}
    assert "0 sessions" in found["load"]["text"] and "264" in found["model"]["text"]
    monkeypatch.setattr(doctor_server.importlib.metadata, "version", lambda name: "9.9")
    assert "! versions       server 9.9, this" not in run(capsys, "doctor").out


def test_a_doctor_tells_of_a_server_that_serves_nothing_yet(capsys):
    with grpc_service.bound() as (_, _, _, port):
        result = run(capsys, "doctor", "--server", f"127.0.0.1:{port}")
    assert result.status == 1 and "loads its model" in result.out


# serve --config


@pytest.fixture
def served(monkeypatch):
    """What `serve` would serve."""
    options = []
    monkeypatch.setattr(serve_command, "run", lambda given, **_: options.append(given))
    return options


def _config(tmp_path: pathlib.Path, text: str) -> pathlib.Path:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    return path


def test_a_file_stands_for_flags_and_flags_win(capsys, tmp_path, served):
    text = 'model = "m.gguf"\nport = 7000\nmax-model-len = 64\ngrace-s = 2.5\nforce = true\n'
    path = _config(tmp_path, text)
    result = run(capsys, "serve", "--config", path, "--port", 7001, "--cache-dir", tmp_path)
    assert result.status == 0, result.err
    (options,) = served
    assert (options.model, options.force, options.sizes.max_model_len) == ("m.gguf", True, 64)
    assert (options.server.port, options.server.grace_s) == (7001, 2.5)
    run(capsys, "serve", "other.gguf", "--config", path, "--cache-dir", tmp_path)
    assert served[1].model == "other.gguf" and served[1].server.port == 7000


@pytest.mark.parametrize(
    "text, message",
    [
        ("max-model-length = 1", "got max-model-length; nearest is max-model-len$"),
        ("max_model_len = 1", "got max_model_len; nearest is max-model-len$"),
        ('port = "many"', "--port"),
        ("port = 70000", "--port.*65535"),
        ("port = [1]", r"expected one value of port in .*, got \[1\]"),
        ("port", "config: expected TOML"),
        ("config = 'x'", "expected the name of a flag"),
        ("return = 'x'", "expected the name of a flag"),
        ("port = true", "config: expected a value of port in .*, got true"),
        ("grace-s = false", "config: expected a value of grace-s in .*, got false"),
        ("host = true", "config: expected a value of host in .*, got true"),
        ("tls-cert = true", "config: expected a value of tls-cert in .*, got true"),
        ('state-dir = ""', "config: expected a path of state-dir in .*, got an empty text"),
        ('swap-dir = ""', "config: expected a path of swap-dir in .*, got an empty text"),
    ],
)
def test_a_wrong_file_is_refused_in_a_sentence(capsys, tmp_path, served, text, message):
    path = _config(tmp_path, text)
    _refused(run(capsys, "serve", "m", "--config", path), 2, message)
    assert served == []


def test_a_file_that_is_not_there_is_told(capsys, tmp_path, served):
    _refused(run(capsys, "serve", "m", "--config", tmp_path / "no"), 2, "no: no such file")
