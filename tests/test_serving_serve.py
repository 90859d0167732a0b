"""`jaxstate serve` as an operator meets it: a process, its ports, its figures, its end."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading

import command_line
import grpc
import grpc_service
import live_page as page_client
import pytest
import served
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_service import refused, text, tokens
from prometheus_client import parser

from jaxstate.models import loading
from jaxstate.models.config import DtypePolicy
from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving import machine, ports, serve_command, serve_sizes
from jaxstate.serving.local_service import LocalService
from jaxstate.serving.serve_sizes import Sizes

WAIT_S = served.WAIT_S


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def model(directory):
    return served.write_model(directory)


@pytest.fixture(scope="module")
def running(directory, model):
    with served.ready(directory / "log", model, "--cache-dir", directory) as serving:
        yield serving


def _health(channel):
    status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status
    return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


def _scrape(port):
    status, _, body = page_client.get(port, "/metrics")
    assert status == 200
    return {
        (sample.name, *(value for name, value in sample.labels.items() if name != "model_name")): (
            sample.value
        )
        for family in parser.text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


# Start


def test_what_it_takes_is_said_before_it_is_taken_and_then_that_it_is_ready(running, model):
    said = running.log.read_text().splitlines()
    config = loading.read_config(model, DtypePolicy.named("float32"))
    weights = f"weights {machine.weights_bytes(config) / 1e6:,.0f} MB"
    cells = f"keys and values {512 * config.bytes_per_cell / 1e6:,.0f} MB for 512 cells; headroom"
    assert said[0].startswith(f"{weights}, {cells}")
    assert said[1] == "loading tiny.gguf …"
    compiled = [line for line in said if re.fullmatch(r"compiling \d+/\d+ .* … \d+\.\d s", line)]
    total = int(compiled[0].split("/")[1].split()[0])
    assert [int(line.split()[1].split("/")[0]) for line in compiled] == [*range(1, total + 1)]
    assert re.fullmatch(
        rf"ready: tiny on 127\.0\.0\.1:{running.port}, page and metrics on "
        rf"http://127\.0\.0\.1:{running.page_port}/\n",
        running.ready,
    )
    with running.connected() as (channel, stub):
        assert _health(channel) == "SERVING"
        info = stub.GetModelInfo(pb.GetModelInfoRequest())
    # One position in sixteen is left to a question and its answer.
    assert (info.name, info.cells, info.page_size, info.context_tokens) == ("tiny", 512, 8, 15)


def test_a_taken_port_names_the_process_before_anything_is_loaded(running, tmp_path):
    for option, port in (("--port", running.port), ("--metrics-port", running.page_port)):
        others = {"--port": 0, "--metrics-port": 0, option: port}
        arguments = [word for pair in others.items() for word in pair]
        with served.started(tmp_path / "log", tmp_path / "no model", *arguments) as second:
            assert second.process.wait(WAIT_S) == 1
        (said,) = (tmp_path / "log").read_text().splitlines()
        assert said.startswith(
            f"jaxstate: {option[2:]}: expected a free port of 127.0.0.1, got {port}, which "
            f"process {running.process.pid} ({sys.executable} -c import sys"
        )


@pytest.mark.parametrize(
    "arguments, pattern",
    [
        (
            ("--host", "0.0.0.0"),
            "host: expected an address of the loopback.*got 0.0.0.0.*--force",
        ),
        (("--host", "::"), "host: expected an address of the loopback"),
        (("--host", "example.org"), "host: expected an address of the loopback"),
        (("--max-model-len", 1), "max-model-len: expected at least 2, got 1"),
        (("--max-model-len", 129), "max-model-len: expected at most the model's 128 positions"),
        (("--kv-cells", 0), "kv-cells: expected at least 1, got 0"),
        (("--kv-cells", 10**12), "memory: expected at most the .* that are free.*lower --kv-cells"),
        (("--dtype", "float8"), "dtype"),
        (("--prefix-share", 2), "prefix_share: expected 0 to 1"),
        (("--port", 65536), "Invalid value for '--port'"),
    ],
)
def test_wrong_options_are_one_sentence(capsys, tmp_path, model, arguments, pattern):
    with command_line.kept_jax_settings():
        result = command_line.run(
            capsys, "serve", model, "--port", 0, "--metrics-port", 0, "--cache-dir", tmp_path,
            *arguments,
        )  # fmt: skip
    assert result.status == 2 and result.out == ""
    assert re.match(rf"jaxstate: .*{pattern}", result.err), result.err
    assert result.err.count("\n") == 1


def test_sizes_follow_the_model_where_nothing_is_said(model):
    config = loading.read_config(model, DtypePolicy.named("float32"))
    unsaid = Sizes(
        max_model_len=None, kv_cells=None, page_size=64, prefix_share=0.25, host_bytes=0,
        swap_dir=None,
    )  # fmt: skip
    found = unsaid.engine_config(config)
    assert (found.context_len, found.num_cells) == (128 - 8, 4 * 128)
    assert max(shape.num_tokens for shape in found.step_shapes) == 128
    said = serve_sizes.memory(config, found, is_float=False)
    assert "weights at most" in said


# Ports


def test_a_listening_socket_is_found_by_its_port_and_a_closed_one_is_not(tmp_path):
    code = "import socket,time; s=socket.create_server(('', 0)); print(s.getsockname()[1])"
    code += "; import sys; sys.stdout.flush(); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        # It listens on all addresses, this one among them.
        with pytest.raises(ports.PortTakenError, match=rf"process {process.pid} \("):
            ports.check_free("127.0.0.1", port, "port")
        process.kill()
    ports.check_free("127.0.0.1", port, "port")
    with pytest.raises(OSError, match="host: expected an address of this machine, got 192.0.2.1"):
        ports.check_free("192.0.2.1", port, "port")


def test_connections_that_linger_do_not_keep_a_server_from_coming_back():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            listener.accept()[0].close()  # who closes first keeps the port for a while
            assert client.recv(1) == b""
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(("127.0.0.1", port))
    ports.check_free("127.0.0.1", port, "port")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_addresses_of_the_loopback_are_known(host):
    assert ports.is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "localhost.example.org", ""])
def test_others_are_not_taken_for_them(host):
    assert not ports.is_loopback(host)


# Figures


def test_metrics_and_page_tell_what_clients_did(running):
    before = _scrape(running.page_port)
    ids = tuple(range(20, 25))
    question = pb.Question(prompt=text("ab <i>?</i>"), max_new_tokens=2)
    with running.connected() as (_, stub):
        name = stub.CreateSession(pb.CreateSessionRequest(prefix=tokens(ids))).session_id
        stub.Append(pb.AppendRequest(session_id=name, prompt=tokens(ids[:3])))
        stub.Register(pb.RegisterRequest(session_id=name, question=question))
        with contextlib.closing(page_client.events(running.page_port)) as events:
            state = page_client.until(
                events,
                lambda event: event["sessions"] and event["sessions"][0]["questions"][0]["answer"],
            )
        answers = []
        for asked in (question, question, pb.Question(prompt=tokens(ids), max_new_tokens=4)):
            request = pb.QueryRequest(session_id=name, question=asked)
            answers.append(grpc_service.parts(stub.Query(request, timeout=WAIT_S))[2])
        after = _scrape(running.page_port)
        stub.CloseSession(pb.CloseSessionRequest(session_id=name))
    (shown,) = state["sessions"]
    assert (shown["id"], shown["version"], shown["context_tokens"]) == (name, 1, 8)
    assert shown["questions"][0]["question"] == "ab <i>?</i>"
    assert shown["questions"][0]["answer"]["version"] == answers[0].version == 1
    assert [answer.source for answer in answers] == [
        pb.SOURCE_FLASH, pb.SOURCE_FLASH, pb.SOURCE_COMPUTED,
    ]  # fmt: skip
    grown = {
        key[0].removeprefix("jaxstate:") if len(key) == 1 else key: after[key] - before.get(key, 0)
        for key in after
    }
    assert grown["flash_hits_total"] == 2
    assert grown["prompt_tokens_total"] == 5 + 3 + 5
    assert grown["generation_tokens_total"] == len(answers[2].token_ids)
    assert grown["time_to_first_token_seconds_count"] == 3
    assert grown["e2e_request_latency_seconds_count"] == 3
    assert grown["request_queue_time_seconds_count"] == 1
    assert grown["append_lag_seconds_count"] == 2
    assert grown["sessions"] == 1 and grown["context_tokens"] == 8
    assert after["jaxstate:compilations_after_ready_total",] == 0
    assert after["process_resident_memory_bytes",] > 50e6


# The end


def test_a_signal_lets_calls_end_and_refuses_new_ones(directory, model):
    more = threading.Event()

    def appends(name):
        yield pb.AppendRequest(session_id=name, prompt=tokens([20, 21]))
        assert more.wait(WAIT_S)
        yield pb.AppendRequest(prompt=tokens([22]))

    with served.ready(directory / "drained", model, "--cache-dir", directory) as serving:
        with serving.connected() as (channel, stub):
            name = stub.CreateSession(pb.CreateSessionRequest()).session_id
            stream = stub.AppendStream.future(appends(name), timeout=WAIT_S)
            grpc_service.wait_until(
                lambda: stub.GetSession(pb.GetSessionRequest(session_id=name)).version == 1
            )
            serving.process.send_signal(signal.SIGTERM)
            serving.wait_for_log("draining: ")
            grpc_service.wait_until(lambda: _health(channel) == "NOT_SERVING")
            with refused(grpc.StatusCode.UNAVAILABLE):
                stub.CreateSession(pb.CreateSessionRequest())
            assert serving.process.poll() is None
            more.set()
            done = stream.result()
            assert (done.version, done.appends, done.tokens) == (2, 2, 3)
        assert serving.process.wait(WAIT_S) == 0
        assert serving.log.read_text().endswith("\ndrained\n")
        assert serving.process.stdout is not None and serving.process.stdout.read() == ""


def test_a_killed_server_has_what_it_acknowledged_at_its_next_start(directory, model, tmp_path):
    kept = ("--cache-dir", directory, "--state-dir", tmp_path / "state")
    question = pb.Question(prompt=tokens([7, 8]), max_new_tokens=2)
    with served.ready(directory / "killed", model, *kept) as serving:
        with serving.connected() as (_, stub):
            name = stub.CreateSession(pb.CreateSessionRequest(prefix=tokens([5]))).session_id
            append = pb.AppendRequest(
                session_id=name, prompt=tokens([20, 21]), writer="feed", sequence=1
            )
            assert stub.Append(append).version == 1
            stub.Register(pb.RegisterRequest(session_id=name, question=question))
            *_, last = stub.Query(pb.QueryRequest(session_id=name, question=question))
        with served.started(directory / "beside", model, *kept, "--port", 0) as other:
            assert other.process.wait(WAIT_S) == 1
            assert "another process" in other.log.read_text().splitlines()[-1]
        serving.process.kill()
    with served.ready(directory / "again", model, *kept) as serving:
        assert "1 sessions are there from before" in serving.log.read_text()
        with serving.connected() as (_, stub):
            assert stub.Append(append).version == 1  # that was applied already
            session = stub.GetSession(pb.GetSessionRequest(session_id=name))
            assert (session.version, session.context_tokens) == (1, 3)
            registered = stub.ListFlashQueries(pb.ListFlashQueriesRequest(session_id=name))
            assert len(registered.queries) == 1
            *_, again = stub.Query(pb.QueryRequest(session_id=name, question=question))
            assert again.answer.token_ids == last.answer.token_ids
            assert (again.answer.version, again.answer.rebuilt) == (1, False)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_fails_ends_the_server_with_status_1(capsys, directory, model, monkeypatch):
    class Failing(LocalService):
        def listen(self, callback):
            if self._commands._listeners:  # all have been told of the service
                with self._changed:
                    self._commands.enqueue(lambda: 1 // 0)
            return super().listen(callback)

    monkeypatch.setattr(serve_command, "LocalService", Failing)
    with command_line.kept_jax_settings():
        result = command_line.run(
            capsys, "serve", model, *served.SMALL, "--port", 0, "--metrics-port", 0,
            "--cache-dir", directory,
        )  # fmt: skip
    assert result.status == 1
    assert result.err.splitlines()[-1].startswith("jaxstate: the worker ended: ZeroDivisionError")
    assert "drained" not in result.err


def test_a_second_signal_ends_it_at_once(directory, model):
    forever = threading.Event()

    def appends(name):
        yield pb.AppendRequest(session_id=name, prompt=tokens([20, 21]))
        forever.wait(WAIT_S)

    with served.ready(directory / "twice", model, "--cache-dir", directory) as serving:
        with serving.connected() as (_, stub):
            name = stub.CreateSession(pb.CreateSessionRequest()).session_id
            stream = stub.AppendStream.future(appends(name), timeout=WAIT_S)
            grpc_service.wait_until(
                lambda: stub.GetSession(pb.GetSessionRequest(session_id=name)).version == 1
            )
            serving.process.send_signal(signal.SIGTERM)
            serving.wait_for_log("draining: ")
            serving.process.send_signal(signal.SIGTERM)
            assert serving.process.wait(10) == -signal.SIGTERM
            forever.set()
            assert stream.exception(WAIT_S) is not None


def test_a_signal_while_it_loads_ends_it_without_waiting(directory, model, tmp_path):
    log = directory / "early"
    free = ("--port", 0, "--metrics-port", 0)
    with served.started(log, model, "--cache-dir", tmp_path, *free) as serving:
        serving.wait_for_log("compiling 1/")
        serving.process.send_signal(signal.SIGINT)
        assert serving.process.wait(WAIT_S) == 0
        assert serving.log.read_text().endswith("\nended before the model was loaded\n")
        assert serving.process.stdout is not None and serving.process.stdout.read() == ""


@pytest.mark.parametrize(
    "where", ["state/snapshots", "state/snapshots/mine", "state/../state/snapshots"]
)
def test_saved_sessions_are_not_kept_where_automatic_ones_are_removed(capsys, tmp_path, where):
    kept = ("--state-dir", tmp_path / "state", "--snapshot-dir", tmp_path / where)
    made = command_line.run(capsys, "serve", "no-such-model", *kept)
    assert made.status == 2 and "snapshot-dir: expected a directory of its own" in made.err
