"""Who may call a server: tokens, certificates, and what is refused before anything is loaded."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat

import certificates
import command_line
import grpc
import grpc_service
import live_page
import pytest
import served
from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_service import WAIT_S, refused

from jaxstate.errors import DeniedError, QuotaError, UnauthenticatedError
from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving import jaxstate_pb2_grpc, rpc_handlers, tokens_file
from jaxstate.serving.auth import Access
from jaxstate.serving.grpc_server import ServerConfig
from jaxstate.serving.quotas import Quota, Requests
from jaxstate.serving.serve_command import ServeOptions
from jaxstate.serving.serve_sizes import Sizes
from jaxstate.serving.tls import Tls

HASH = tokens_file.digest("a")
INFO = pb.GetModelInfoRequest()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tokens"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return certificates.Authority(tmp_path_factory.mktemp("authority"), "authority")


def _bearer(token):
    return (("authorization", f"Bearer {token}"),)


def _line(**fields):
    return json.dumps({"tenant": "ann", "token_sha256": HASH} | fields) + "\n"


# The file


def test_a_token_is_kept_as_its_hash_alone_in_a_file_of_its_owners(path):
    token = tokens_file.issue(path, "ann", replace=False)
    assert len(token) > 40 and token != tokens_file.issue(path, "bob", replace=False)
    text = path.read_text()
    assert token not in text and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(text.splitlines()[0]) == {
        "tenant": "ann",
        "token_sha256": hashlib.sha256(token.encode()).hexdigest(),
    }
    assert os.listdir(path.parent) == ["tokens"]


def test_another_token_takes_the_place_of_the_hash_and_of_nothing_else(path):
    lines = ["# ours", _line(max_cells=7)[:-1], "", _line(tenant="bob", token_sha256="0" * 64)[:-1]]
    path.write_text("\n".join(lines))
    path.chmod(0o644)
    with pytest.raises(ValueError, match=r"tokens, line 2: tenant ann is there already; --replace"):
        tokens_file.issue(path, "ann", replace=False)
    assert path.read_text() == "\n".join(lines)
    token = tokens_file.issue(path, "ann", replace=True)
    found = path.read_text().splitlines()
    assert [found[0], found[2], found[3]] == [lines[0], lines[2], lines[3]]
    assert json.loads(found[1])["token_sha256"] == tokens_file.digest(token)
    assert tokens_file.read(path)[0].quota == Quota(max_cells=7)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    tokens_file.remove(path, "ann")
    assert path.read_text().splitlines() == [lines[0], lines[2], lines[3]]
    with pytest.raises(ValueError, match="expected a line of tenant ann, got none"):
        tokens_file.remove(path, "ann")


def test_two_writers_do_not_undo_each_other(path):
    with tokens_file._replacing(path) as lines:
        with pytest.raises(ValueError, match="tokens.new is there: somebody changes the file"):
            tokens_file.issue(path, "bob", replace=False)
        lines.append(_line()[:-1])
    tokens_file.issue(path, "bob", replace=False)
    assert [entry.tenant for entry in tokens_file.read(path)] == ["ann", "bob"]


@pytest.mark.parametrize(
    "text, pattern",
    [
        ("tenant ann", "line 1: expected a JSON object, got something else"),
        ("\n[1]", "line 2: expected a JSON object, got list"),
        (_line(tenant="a/b"), "line 1: tenant: expected a name of .*, got \"a/b\""),
        (_line(tenant=""), "line 1: tenant: expected a name"),
        (_line(tenant=".."), "line 1: tenant: expected a name"),
        (_line(tenant="a" * 65), "line 1: tenant: expected a name"),
        (_line(tenant="ann\n"), "line 1: tenant: expected a name"),
        (_line(tenant=3), "line 1: tenant: expected a name of .*, got 3"),
        (_line(token_sha256="jst_secret"), "token_sha256: expected 64 .*hex digits"),
        (_line(token="x"), "key: expected one of tenant, token_sha256, .*, got \"token\""),
        ('{"tenant": "ann"}', "tenant: expected token_sha256 or certificates with it"),
        (_line(certificates="x"), "certificates: expected a list of names, got \"x\""),
        (_line(max_cells=0), "max_cells: expected a number above 0, got 0"),
        (_line(max_sessions=1.5), "max_sessions: expected a number above 0, got 1.5"),
        (_line(max_requests=True), "max_requests: expected a number above 0, got true"),
        (_line(requests_per_s=float("nan")), "requests_per_s: expected a number above 0, got NaN"),
        (_line() + _line(token_sha256="0" * 64), "line 2: expected every tenant once, got that of "
         "line 1 again"),
        (_line() + _line(tenant="bob"), "line 2: expected every token once, got that of line 1"),
        (_line(certificates=["x"]) + _line(tenant="bob", token_sha256="", certificates=["x"]),
         "line 2: expected every certificate once"),
        (b"\xff", ": expected text in UTF-8"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_its_line(path, text, pattern):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{pattern}") as error:
        Access(path)
    assert "secret" not in str(error.value)


# From what a call brings to a tenant


def test_right_wrong_missing_and_revoked_tokens(path, caplog):
    ann = tokens_file.issue(path, "ann", replace=False)
    access = Access(path)
    assert access.tenant_of(_bearer(ann), ()) == "ann"
    assert access.tenant_of((("authorization", f"bearer {ann}"), ("x", "y")), ()) == "ann"
    bad = [
        (), _bearer(""), _bearer(ann[:-1]), _bearer(f"{ann} "), _bearer(HASH), _bearer("ü"),
        _bearer(tokens_file.digest(ann)), _bearer(ann) * 2, (("authorization", ann),),
        (("authorization", f"Basic {ann}"),), (("authorisation", f"Bearer {ann}"),),
    ]  # fmt: skip
    for metadata in bad:
        with pytest.raises(UnauthenticatedError, match="^authorization: expected") as error:
            access.tenant_of(metadata, ())
        assert ann not in str(error.value)
    # From now on, without being told.
    bob = tokens_file.issue(path, "bob", replace=False)
    assert access.tenant_of(_bearer(bob), ()) == "bob"
    newer = tokens_file.issue(path, "ann", replace=True)
    assert access.tenant_of(_bearer(newer), ()) == "ann"
    with pytest.raises(UnauthenticatedError, match="was revoked"):
        access.tenant_of(_bearer(ann), ())
    tokens_file.remove(path, "ann")
    with pytest.raises(UnauthenticatedError, match="was revoked"):
        access.tenant_of(_bearer(newer), ())
    assert not any(token in caplog.text for token in (ann, bob, newer))


@pytest.mark.parametrize("broken", ["gone", "wrong"])
def test_a_file_that_breaks_leaves_all_as_it_was_and_the_log_says_so(path, broken, caplog):
    ann = tokens_file.issue(path, "ann", replace=False)
    access = Access(path)
    path.write_text("{") if broken == "wrong" else path.unlink()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert access.tenant_of(_bearer(ann), ()) == "ann"
    assert caplog.text.count("tokens stay as they were") == 1
    path.write_text(_line(tenant="bob"))
    with pytest.raises(UnauthenticatedError):
        access.tenant_of(_bearer(ann), ())


def test_certificates_alone_and_with_a_token(path):
    lines = (
        _line(),
        _line(tenant="both", token_sha256=tokens_file.digest("b"), certificates=["both"]),
        _line(tenant="cert", token_sha256="", certificates=["one", "two"]),
        _line(tenant="else", token_sha256="", certificates=["three"]),
    )
    path.write_text("".join(lines))
    access = Access(path)
    assert access.tenant_of((), [b"two"]) == access.tenant_of((), [b"x", b"one"]) == "cert"
    assert access.tenant_of(_bearer("a"), [b"two"]) == "ann"
    assert access.tenant_of(_bearer("b"), [b"both"]) == "both"
    with pytest.raises(UnauthenticatedError, match="Bearer TOKEN"):
        access.tenant_of((), [b"both"])
    with pytest.raises(UnauthenticatedError, match="unknown"):
        access.tenant_of(_bearer("c"), [b"two"])  # a wrong token is never passed over
    for names in ((), [b"two"]):
        with pytest.raises(DeniedError, match="also needs one of its client certificates"):
            access.tenant_of(_bearer("b"), names)
    for names, count in (([b"TWO", b"tw", b"\xff"], 0), ([b"one", b"three"], 2)):
        with pytest.raises(DeniedError, match=f"got names of {count}"):
            access.tenant_of((), names)


def test_calls_are_counted_while_they_run_and_paced_over_time():
    now, quotas = [0.0], {"ann": Quota(max_requests=2), "bob": Quota(requests_per_s=2.0)}
    requests = Requests(quotas.__getitem__, lambda: now[0])
    with requests.under_way("ann"), requests.under_way("ann"):
        with pytest.raises(QuotaError, match="max_requests: expected at most 2 calls under way"):
            with requests.under_way("ann"):
                pass
        with requests.under_way("bob"):
            pass
    with requests.under_way("ann"):
        assert requests.running == {"ann": 1, "bob": 0}
    with requests.under_way("bob"):
        pass
    with pytest.raises(QuotaError, match="requests_per_s: expected at most 2") as error:
        with requests.under_way("bob"):
            pass
    assert error.value.retry_after_s == 0.5
    now[0] += 0.5
    with requests.under_way("bob"):
        pass
    now[0] += 100.0  # what was not used adds up to no more than a second's
    for fits in (True, True, False):
        if fits:
            with requests.under_way("bob"):
                pass
    with pytest.raises(QuotaError), requests.under_way("bob"):
        pass
    assert requests.begun == {"ann": 3, "bob": 5}
    assert requests.refused == {("ann", "max_requests"): 1, ("bob", "requests_per_s"): 2}


# A server


def _generic(channel, method, request: bytes, **how):
    kinds = {True: "stream", False: "unary"}
    name = f"{kinds[method.client_streaming]}_{kinds[method.server_streaming]}"
    call = getattr(channel, name)(
        f"/{rpc_handlers.SERVICE.full_name}/{method.name}", lambda message: message,
        GetMessageClass(method.output_type).FromString,
    )  # fmt: skip
    answer = call(iter([request]) if method.client_streaming else request, timeout=WAIT_S, **how)
    list(answer) if method.server_streaming else None


def test_no_method_does_anything_for_those_nobody_knows(path):
    ann = tokens_file.issue(path, "ann", replace=False)
    with grpc_service.bound(access=Access(path)) as (_, _, channel, _):
        for method in rpc_handlers.SERVICE.methods:
            for request in (b"", b"\xff\xff\xff"):
                for metadata in ((), _bearer("wrong")):
                    with refused(StatusCode.UNAUTHENTICATED):
                        _generic(channel, method, request, metadata=metadata)
                with refused(StatusCode.UNAVAILABLE) as errors:  # let in, and told what is wrong
                    _generic(channel, method, request, metadata=_bearer(ann))
                assert "not loaded yet" in errors[0].details()


def test_probes_and_descriptions_of_the_interface_need_no_token(path):
    path.write_text(_line())
    with grpc_service.bound(access=Access(path)) as (_, _, channel, _):
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([asked]), timeout=WAIT_S
        )
    names = {service.name for service in answer.list_services_response.service}
    assert rpc_handlers.SERVICE.full_name in names


def _tls(authority, client_ca=None):
    cert, key = authority.sign("server", "127.0.0.1")
    return Tls(cert=cert, key=key, client_ca=client_ca)


def _connect(port, authority, pair=None):
    key, cert = (pair[1].read_bytes(), pair[0].read_bytes()) if pair else (None, None)
    credentials = grpc.ssl_channel_credentials(authority.path.read_bytes(), key, cert)
    return grpc.secure_channel(f"127.0.0.1:{port}", credentials)


def _ask(channel, code, **how):
    """Ask a server that has nothing loaded: UNAVAILABLE with these words is let in."""
    with channel, refused(code) as errors:
        jaxstate_pb2_grpc.JaxStateStub(channel).GetModelInfo(INFO, timeout=WAIT_S, **how)
    return "not loaded yet" in errors[0].details()


def test_with_tls_tokens_travel_encrypted_and_others_do_not_connect(path, authority, tmp_path):
    token = tokens_file.issue(path, "ann", replace=False)
    stranger = certificates.Authority(tmp_path, "stranger")
    with grpc_service.bound(access=Access(path), tls=_tls(authority)) as (_, _, plain, port):
        assert _ask(_connect(port, authority), StatusCode.UNAVAILABLE, metadata=_bearer(token))
        _ask(_connect(port, authority), StatusCode.UNAUTHENTICATED)
        assert not _ask(_connect(port, stranger), StatusCode.UNAVAILABLE, metadata=_bearer(token))
        assert not _ask(plain, StatusCode.UNAVAILABLE, metadata=_bearer(token))


def test_with_mutual_tls_the_certificate_says_who_calls(path, authority, tmp_path):
    path.write_text(
        _line(tenant="desk", token_sha256="", certificates=["desk.example.org"])
        + _line(tenant="old", token_sha256="", certificates=["by-common-name"])
    )
    access = Access(path)
    assert access.asks_for_certificates
    stranger = certificates.Authority(tmp_path, "stranger")
    clients = {
        "known": authority.sign("known", "desk.example.org", "other.example.org"),
        "common": authority.sign("by-common-name"),
        # A name of another's as common name counts for nothing beside alternative names.
        "crafted": authority.sign("desk.example.org", "nobody.example.org"),
        "unsigned": stranger.sign("unsigned", "desk.example.org"),
    }
    tls = _tls(authority, client_ca=authority.path)
    with grpc_service.bound(access=access, tls=tls) as (_, _, _, port):
        for name in ("known", "common"):
            assert _ask(_connect(port, authority, clients[name]), StatusCode.UNAVAILABLE)
        _ask(_connect(port, authority, clients["crafted"]), StatusCode.PERMISSION_DENIED)
        for pair in (None, clients["unsigned"]):
            assert not _ask(_connect(port, authority, pair), StatusCode.UNAVAILABLE)
        known = clients["known"]
        wrong = _connect(port, authority, known)
        _ask(wrong, StatusCode.UNAUTHENTICATED, metadata=_bearer("wrong"))


def test_a_server_for_others_is_safe_by_its_options(tmp_path, authority, capsys):
    cert, key = authority.sign("server", "127.0.0.1")
    path = tmp_path / "tokens"
    ann, bob = (tokens_file.issue(path, name, replace=False) for name in ("ann", "bob"))
    path.write_text(path.read_text().replace('"ann",', '"ann", "max_sessions": 1,'))
    with served.ready(
        tmp_path / "log", served.write_model(tmp_path), "--cache-dir", tmp_path,
        "--host", "0.0.0.0", "--tls-cert", cert, "--tls-key", key, "--auth-tokens", path,
    ) as serving, _connect(serving.port, authority) as channel:  # fmt: skip
        assert f"page and metrics on http://127.0.0.1:{serving.page_port}/" in serving.ready
        stub = jaxstate_pb2_grpc.JaxStateStub(channel)
        with refused(StatusCode.UNAUTHENTICATED):
            stub.ListSessions(pb.ListSessionsRequest(), timeout=WAIT_S)
        for token in (ann, bob, bob):
            grpc_service.As(stub, token).CreateSession(pb.CreateSessionRequest())
        with refused(StatusCode.RESOURCE_EXHAUSTED):
            grpc_service.As(stub, ann).CreateSession(pb.CreateSessionRequest())
        text = live_page.get(serving.page_port, "/metrics")[2].decode()
        assert 'jaxstate:tenant_sessions{model_name="tiny",tenant="bob"} 2.0' in text
        assert command_line.run(capsys, "token", "ann", "--file", path, "--remove").status == 0
        with refused(StatusCode.UNAUTHENTICATED):
            grpc_service.As(stub, ann).CreateSession(pb.CreateSessionRequest())
    said = (tmp_path / "log").read_text()
    assert "tokens read again; tenants: 1" in said and ann not in said + text


# The command line


def _serve(capsys, tmp_path, *arguments):
    """Start a server of a model that is not there: what comes first is refused first."""
    with command_line.kept_jax_settings():
        return command_line.run(
            capsys, "serve", tmp_path / "no model", "--port", 0, "--metrics-port", 0, "--cache-dir",
            tmp_path, *arguments,
        )  # fmt: skip


def test_bad_files_are_one_sentence_before_anything_is_loaded(capsys, tmp_path, authority, path):
    cert, key = authority.sign("server", "127.0.0.1")
    _, other = authority.sign("other")
    path.write_text(_line(certificates=["x"]))
    junk = tmp_path / "junk"
    junk.write_text("junk")
    for arguments, pattern in (
        (("--tls-cert", cert), "tls-cert and tls-key: expected both"),
        (("--tls-client-ca", cert), "tls-cert and tls-key: expected both"),
        (("--tls-cert", tmp_path / "no", "--tls-key", key), "no: no such file"),
        (("--tls-cert", cert, "--tls-key", tmp_path / "no"), "no: no such file"),
        (("--tls-cert", junk, "--tls-key", key), "tls-cert: expected a certificate in PEM, got"),
        (("--tls-cert", cert, "--tls-key", junk), "tls-key: expected the key of .*server.crt"),
        (("--tls-cert", cert, "--tls-key", other), "tls-key: .*mismatch"),
        (
            ("--tls-cert", cert, "--tls-key", key, "--tls-client-ca", junk),
            "tls-client-ca: expected certificates in PEM",
        ),
        (("--auth-tokens", tmp_path / "no"), "no: no such file"),
        (("--auth-tokens", junk), "junk, line 1: expected a JSON object"),
        (("--auth-tokens", path), "tls-client-ca: expected who signs the certificates"),
    ):
        result = _serve(capsys, tmp_path, *arguments)
        assert result.status == 2 and result.err.count("\n") == 1
        assert re.match(f"jaxstate: .*{pattern}", result.err), (arguments, result.err)
        assert "no model" not in result.err


SIZES = Sizes(
    max_model_len=None, kv_cells=None, page_size=64, prefix_share=0, host_bytes=0, swap_dir=None
)


@pytest.mark.parametrize(
    "host, tls, tokens, metrics_host, force, pattern",
    [
        ("127.0.0.1", False, False, None, False, None),
        ("0.0.0.0", False, False, None, False, "^host: .*--tls-cert, --tls-key and --auth-tokens"),
        ("0.0.0.0", True, False, None, False, "^host: "),
        ("0.0.0.0", False, True, None, False, "^host: "),
        ("0.0.0.0", True, True, None, False, None),
        ("0.0.0.0", False, False, None, True, None),
        ("0.0.0.0", True, True, "0.0.0.0", False, "^metrics-host: .* shows all tenants' sessions"),
        ("127.0.0.1", False, False, "10.0.0.1", False, "^metrics-host: "),
        ("0.0.0.0", False, False, "0.0.0.0", True, None),
    ],
)
def test_others_are_let_in_with_tls_and_tokens_only(
    tmp_path, host, tls, tokens, metrics_host, force, pattern
):
    def options():
        return ServeOptions(
            model="m", served_model_name=None, dtype="float32", weights="float", sizes=SIZES,
            server=ServerConfig(host=host), metrics_port=0, metrics_host=metrics_host,
            tls=Tls(cert=tmp_path, key=tmp_path) if tls else None,
            auth_tokens=tmp_path if tokens else None, force=force,
        )  # fmt: skip

    if pattern is None:
        # What shows everything stays on the loopback unless told otherwise.
        assert options().page_host == (metrics_host or "127.0.0.1")
    else:
        with pytest.raises(ValueError, match=pattern):
            options()


def test_the_command_prints_a_token_once(capsys, path):
    made = command_line.run(capsys, "token", "ann", "--file", path)
    assert made.status == 0 and made.out.strip() not in made.err + path.read_text()
    assert Access(path).tenant_of(_bearer(made.out.strip()), ()) == "ann"
    again = command_line.run(capsys, "token", "ann", "--file", path)
    assert (again.status, again.out) == (2, "") and "--replace" in again.err
    assert command_line.run(capsys, "token", "ann", "--file", path, "--replace").out != made.out
    before = path.read_text()
    both = command_line.run(capsys, "token", "ann", "--file", path, "--replace", "--remove")
    assert (both.status, both.out, path.read_text()) == (2, "", before)
    assert "expected --replace or --remove, got both" in both.err
    wrong = command_line.run(capsys, "token", "a/b", "--file", path)
    assert wrong.status == 2 and "got 'a/b'" in wrong.err
    assert command_line.run(capsys, "token", "ann", "--file", path, "--remove").status == 0
    assert tokens_file.read(path) == ()
