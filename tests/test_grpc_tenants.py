"""Tenants of one server: nothing of one reaches another, by name, by price or by quota."""

from __future__ import annotations

import concurrent.futures
import json
import shutil

import grpc
import grpc_service
import pytest
from google.rpc import status_pb2
from grpc import StatusCode
from grpc_service import WAIT_S, As, refused, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import parser

from jaxstate.errors import QuotaError
from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving import rpc_handlers, tenants, tokens_file
from jaxstate.serving.auth import Access
from jaxstate.serving.journal import Journal
from jaxstate.serving.prometheus import Exporter
from jaxstate.serving.snapshot_store import SnapshotStore

IDS = tuple(range(20, 40))
QUESTION = pb.Question(prompt=tokens([30, 31]), max_new_tokens=3)
HEADER = pb.Header(prompt=tokens([30, 31]), max_new_tokens=2)
PROMPT = tokens([33, 34])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return grpc_service.load(tmp_path_factory.mktemp("grpc"))


@pytest.fixture(scope="module")
def engine(model):
    return grpc_service.engine_of(model, context_len=96, prefix_share=0.25)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tokens"


@pytest.fixture
def given_tokens(path):
    return {name: tokens_file.issue(path, name, replace=False) for name in ("ann", "bob")}


@pytest.fixture
def running(engine, model, path, given_tokens, tmp_path):
    store = SnapshotStore(tmp_path / "saved", fingerprint=model.fingerprint)
    with grpc_service.serving(
        engine, model.tokenizer, access=Access(path), snapshots=store
    ) as running:
        yield running


@pytest.fixture
def ann(running, given_tokens):
    return As(running.stub, given_tokens["ann"])


@pytest.fixture
def bob(running, given_tokens):
    return As(running.stub, given_tokens["bob"])


def _quota(path, tenant, **quota):
    """Write other quotas of a tenant; a server sees it with the next call."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["tenant"] == tenant:
            kept = {key: line[key] for key in ("tenant", "token_sha256")}
            line.clear()
            line.update(kept | quota)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _open(stub, name="s", ids=IDS[:9], **how):
    return stub.CreateSession(
        pb.CreateSessionRequest(session_id=name, prefix=tokens(ids), **how)
    ).session_id


def _ids(stub):
    return [one.session_id for one in stub.ListSessions(pb.ListSessionsRequest()).sessions]


def _session(stub, name="s"):
    return stub.GetSession(pb.GetSessionRequest(session_id=name))


# Names

NOT_THERE = {StatusCode.NOT_FOUND}
NAMED = {  # what names a session or something saved of one, and what comes of an unknown name
    "GetSession": (lambda name: pb.GetSessionRequest(session_id=name), NOT_THERE),
    "CloseSession": (lambda name: pb.CloseSessionRequest(session_id=name), NOT_THERE),
    "Fork": (lambda name: pb.ForkRequest(session_id=name), NOT_THERE),
    "Snapshot": (lambda name: pb.SnapshotRequest(session_id=name), NOT_THERE),
    "Restore": (lambda name: pb.RestoreRequest(name=name), NOT_THERE),
    "DeleteSnapshot": (lambda name: pb.DeleteSnapshotRequest(name=name), NOT_THERE),
    "Append": (lambda name: pb.AppendRequest(session_id=name, prompt=PROMPT), NOT_THERE),
    "AppendStream": (lambda name: pb.AppendRequest(session_id=name, prompt=PROMPT), NOT_THERE),
    "Update": (lambda name: pb.UpdateRequest(session_id=name, prompt=PROMPT), NOT_THERE),
    "Rollback": (lambda name: pb.RollbackRequest(session_id=name, tokens=1), NOT_THERE),
    "Query": (lambda name: pb.QueryRequest(session_id=name, question=QUESTION), NOT_THERE),
    "Register": (lambda name: pb.RegisterRequest(session_id=name, question=QUESTION), NOT_THERE),
    "Unregister": (lambda name: pb.UnregisterRequest(session_id=name, flash_id=1), NOT_THERE),
    "ListFlashQueries": (lambda name: pb.ListFlashQueriesRequest(session_id=name), NOT_THERE),
    "WatchAnswers": (lambda name: pb.WatchAnswersRequest(session_id=name), NOT_THERE),
    "Advance": (lambda name: pb.AdvanceRequest(session_id=name, header=HEADER), NOT_THERE),
    "Declare": (lambda name: pb.DeclareRequest(session_id=name, header=HEADER), NOT_THERE),
}
OF_SAVED = ("Restore", "DeleteSnapshot")
MORE = {
    "Query": [
        lambda name: pb.QueryRequest(session_id=name, question=QUESTION, min_version=1),
        lambda name: pb.QueryRequest(session_id=name, question=QUESTION, stale=pb.STALE_WAIT),
        lambda name: pb.QueryRequest(session_id=name, question=QUESTION, stale=pb.STALE_SERVE),
        lambda name: pb.QueryRequest(session_id=name, question=QUESTION, commit=True),
    ],
}  # other ways to the same


def _call(stub, method, request):
    """Make a call; returns what a client learns, or raises."""
    streams = rpc_handlers.SERVICE.methods_by_name[method]
    answer = getattr(stub, method)(iter([request]) if streams.client_streaming else request)
    return list(answer) if streams.server_streaming else answer


def _learned(stub, method, request) -> tuple[StatusCode, bytes]:
    """All that a client learns from a refusal."""
    with refused_somehow() as errors:
        _call(stub, method, request)
    metadata = dict(errors[0].trailing_metadata())
    whole = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    assert whole.message == errors[0].details()
    return errors[0].code(), whole.SerializeToString()


class refused_somehow:
    """Expect a refusal, whichever."""

    def __enter__(self) -> list:
        self._errors: list = []
        return self._errors

    def __exit__(self, kind, error, _) -> bool:
        assert kind is not None and issubclass(kind, grpc.RpcError), "expected a refusal"
        self._errors.append(error)
        return True


def test_every_method_that_names_a_session_is_tried():
    named = {
        method.name
        for method in rpc_handlers.SERVICE.methods
        if {"session_id", "name"} & set(method.input_type.fields_by_name)
    }
    assert named == {*NAMED, "CreateSession"}


@pytest.mark.parametrize("method", NAMED)
def test_anothers_session_is_like_one_that_is_not_there(ann, bob, running, method):
    _open(bob, "theirs")
    bob.Register(pb.RegisterRequest(session_id="theirs", question=QUESTION))
    if method in OF_SAVED:
        bob.Snapshot(pb.SnapshotRequest(session_id="theirs", name="theirs"))
    running.service.wait_until_idle(WAIT_S)
    before = (
        _session(bob, "theirs"),
        bob.ListFlashQueries(pb.ListFlashQueriesRequest(session_id="theirs")),
    )
    make, codes = NAMED[method]
    crafted = () if method in OF_SAVED else ("bob/theirs", "../bob/theirs")  # no names at all
    for request in (make, *MORE.get(method, ())):
        for name in ("theirs", *crafted):
            unknown = "x" * len(name)
            code, told = _learned(ann, method, request(name))
            assert code in codes
            assert (code, told.replace(name.encode(), unknown.encode())) == _learned(
                ann, method, request(unknown)
            )
    assert before == (
        _session(bob, "theirs"),
        bob.ListFlashQueries(pb.ListFlashQueriesRequest(session_id="theirs")),
    )


def test_two_tenants_have_snapshots_of_the_same_name(ann, bob):
    for stub, ids in ((ann, IDS[:5]), (bob, IDS[:9])):
        _open(stub, "s", ids)
        found = stub.Snapshot(pb.SnapshotRequest(session_id="s", name="monday"))
        assert (found.name, found.session_id, found.context_tokens) == ("monday", "s", len(ids))
        stub.CloseSession(pb.CloseSessionRequest(session_id="s"))
    ann.DeleteSnapshot(pb.DeleteSnapshotRequest(name="monday"))
    assert [len(one.ListSnapshots(pb.ListSnapshotsRequest()).snapshots) for one in (ann, bob)] == [
        0, 1,
    ]  # fmt: skip
    back = bob.Restore(pb.RestoreRequest(name="monday"))
    assert (back.session_id, back.context_tokens, _ids(bob), _ids(ann)) == ("s", 9, ["s"], [])


def test_what_an_operator_gives_to_another_tenant_becomes_his(ann, bob, tmp_path):
    _open(ann, "s", IDS[:5])
    ann.Snapshot(pb.SnapshotRequest(session_id="s", name="gift"))
    shutil.copytree(tmp_path / "saved" / "tenant-ann", tmp_path / "saved" / "tenant-bob")
    assert bob.Restore(pb.RestoreRequest(name="gift")).session_id == "s"
    assert bob.Append(pb.AppendRequest(session_id="s", prompt=PROMPT)).version == 1
    assert _session(ann).version == 0


def test_two_tenants_have_sessions_of_the_same_name(ann, bob):
    assert _open(ann, "s", IDS[:5]) == _open(bob, "s", IDS[:9]) == "s"
    assert _open(bob, "t", IDS[:3]) == "t"
    assert (_session(ann).context_tokens, _session(bob).context_tokens) == (5, 9)
    assert ann.Append(pb.AppendRequest(session_id="s", prompt=PROMPT)).version == 1
    assert _session(bob).version == 0
    assert (_ids(ann), _ids(bob)) == (["s"], ["s", "t"])
    page = bob.ListSessions(pb.ListSessionsRequest(page_size=1))
    assert page.next_page_token == "s"
    rest = bob.ListSessions(pb.ListSessionsRequest(page_size=1, page_token="s"))
    assert [one.session_id for one in rest.sessions] == ["t"] and not rest.next_page_token
    # A fork to a name that another has; and one that he has himself.
    assert ann.Fork(pb.ForkRequest(session_id="s", new_session_id="t")).session_id == "t"
    with refused(StatusCode.ALREADY_EXISTS) as errors:
        ann.Fork(pb.ForkRequest(session_id="s", new_session_id="t"))
    assert errors[0].details().startswith("session t exists already")
    ann.CloseSession(pb.CloseSessionRequest(session_id="s"))
    assert (_ids(ann), _ids(bob)) == (["t"], ["s", "t"])


def test_a_cursor_of_anothers_stream_is_none(ann, bob, running):
    for stub in (ann, bob):
        _open(stub)
        stub.Register(pb.RegisterRequest(session_id="s", question=QUESTION))
    running.service.wait_until_idle(WAIT_S)
    stream = bob.WatchAnswers(pb.WatchAnswersRequest(session_id="s"))
    cursor = next(stream).cursor
    stream.cancel()
    told = [
        _learned(ann, "WatchAnswers", pb.WatchAnswersRequest(session_id="s", cursor=one))[1]
        for one in (cursor, "x" * len(cursor))
    ]
    assert told[0].replace(cursor.encode(), b"x" * len(cursor)) == told[1]


def test_names_that_the_server_chooses_tell_nothing_of_others(ann, bob):
    first = ann.CreateSession(pb.CreateSessionRequest()).session_id
    for _ in range(5):
        bob.CreateSession(pb.CreateSessionRequest())
    second = ann.Fork(pb.ForkRequest(session_id=first)).session_id
    assert sorted([first, second]) == _ids(ann)
    assert all(tenants.qualified("", name) == name for name in (first, second))
    numbers = [int(name.removeprefix("s-"), 16) for name in (first, second)]
    assert abs(numbers[0] - numbers[1]) > 1000


CRAFTED = (
    "bob/theirs", "/theirs", "//theirs", "../bob/theirs", "ann/../bob/theirs", "bob//theirs",
    "bob/theirs/", "bob/theirs\0", "\0theirs", "bob\uff0ftheirs", "bob\u2215theirs", "theirs ",
    "THEIRS", "ｔheirs", "ann/mine", "ann/ann/mine", "bob/", "/", "..", "*", "%", "'",
    "bob%2Ftheirs",
)  # fmt: skip


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_names_lead_nowhere(ann, bob, name):
    _open(bob, "theirs"), _open(ann, "mine")
    with refused(StatusCode.NOT_FOUND) as errors:
        _session(ann, name)
    assert errors[0].details() == f"session {name} is unknown or closed; see ListSessions"
    with refused(StatusCode.NOT_FOUND):
        _call(ann, "Append", NAMED["Append"][0](name))
    if name == "..":  # a name like any other
        assert _open(ann, name) == ".."
    elif name == "THEIRS":
        assert _open(ann, name) == name
    else:
        with refused(StatusCode.INVALID_ARGUMENT):
            _open(ann, name)
    assert (_ids(bob), _session(bob, "theirs").version) == (["theirs"], 0)


def test_names_of_no_use_are_refused(ann):
    for name in ("", "x" * 129, "ü" * 100_000):
        with refused(StatusCode.INVALID_ARGUMENT):
            _session(ann, name)
    assert _open(ann, "x" * 128) == "x" * 128 == _session(ann, "x" * 128).session_id


def test_without_authentication_sessions_of_tenants_are_nobodys(engine, model):
    with grpc_service.serving(engine, model.tokenizer) as running:
        running.service.create(IDS[:5], session_id="bob/theirs", tenant="bob")
        running.service.create(IDS[:5], session_id="mine")
        assert _ids(running.stub) == ["mine"]
        with refused(StatusCode.NOT_FOUND):
            _session(running.stub, "bob/theirs")
        assert _session(running.stub, "mine").session_id == "mine"


NAMES = st.from_regex(tenants.NAME, fullmatch=True)


@settings(max_examples=300, deadline=None)
@given(NAMES, NAMES, st.text(max_size=8), st.text(max_size=8))
def test_no_two_tenants_names_ever_meet(one, other, first, second):
    names = {tenants.qualified(tenant, name) for tenant in (one, other) for name in (first, second)}
    assert len(names) == len({one, other}) * len({first, second})
    found = tenants.qualified(one, first)
    assert found is not None and tenants.unqualified(one, found) == first
    assert one == other or tenants.unqualified(other, found) is None
    assert tenants.unqualified("", found) is None and tenants.qualified("", found) is None


def test_messages_call_sessions_what_their_tenant_does(ann, running):
    _open(ann, "s")
    with refused(StatusCode.FAILED_PRECONDITION) as errors:
        ann.Rollback(pb.RollbackRequest(session_id="s", tokens=1))
    assert errors[0].details().startswith("session s: cannot roll back")
    assert tenants.shown("ann", "session new 17: cancelled") == "a new session: cancelled"


# Prices


def _generate(stub):
    _, _, answer = grpc_service.parts(
        stub.Generate(
            pb.GenerateRequest(question=pb.Question(prompt=tokens(IDS), max_new_tokens=3))
        )
    )
    return answer.usage.cached_tokens, answer.usage.forwarded_tokens


def test_a_beginning_that_another_has_computed_is_computed_again(ann, bob):
    cold = _generate(bob)
    assert cold[0] == 0 and cold[1] >= len(IDS)
    assert _generate(bob) == (19, cold[1] - 19)  # what would show, if it crossed
    assert _generate(ann) == cold
    created = pb.CreateSessionRequest(prefix=tokens(IDS))
    assert bob.CreateSession(created).cached_tokens > 0
    ann_again = As(ann._stub, ann._metadata[0][1].removeprefix("Bearer "))
    assert ann_again.CreateSession(created).cached_tokens > 0  # by its own


def test_beginnings_under_way_and_of_open_sessions_are_not_shared_either(ann, bob, running):
    created = pb.CreateSessionRequest(prefix=tokens(IDS))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        with grpc_service.held(running.service):
            calls = [pool.submit(stub.CreateSession, created) for stub in (ann, bob)]
            grpc_service.wait_until(lambda: len(running.service._commands) == 2)
        assert [call.result(WAIT_S).cached_tokens for call in calls] == [0, 0]
        bob.CreateSession(created)
    assert _generate(ann)[0] == 19  # of its own session
    before = running.service.metrics.by_class
    counted = sum(figures.tokens for figures in before.values())
    other = pb.Question(prompt=tokens([*IDS[:10], 41]), max_new_tokens=1)
    for stub in (ann, bob):
        list(stub.Generate(pb.GenerateRequest(question=other)))
    assert sum(figures.tokens for figures in before.values()) == counted + 2


# Quotas


def _race(service, count, function):
    """Have the worker find many calls at once; returns the errors of those that were refused."""
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        with grpc_service.held(service):
            calls = [pool.submit(function, number) for number in range(count)]
            grpc_service.wait_until(lambda: len(service._commands) == count)
        return [error for call in calls if (error := call.exception(WAIT_S))]


def _is_over(error, quota, tenant="ann"):
    assert error.code() is StatusCode.RESOURCE_EXHAUSTED, error.details()
    assert error.details().startswith(f"{quota}: expected at most ")
    (violation,) = grpc_service.detail(error, "QuotaFailure").violations
    assert violation.subject == f"tenant:{tenant}" and violation.description == error.details()
    assert grpc_service.detail(error, "RetryInfo").retry_delay.ToMilliseconds() > 0
    return True


def test_of_twenty_that_race_for_the_last_sessions_as_many_win_as_there_are(
    ann, bob, running, path
):
    _quota(path, "ann", max_sessions=3)
    _open(ann, "first")
    errors = _race(running.service, 20, lambda n: _open(ann, f"s{n}"))
    assert len(errors) == 18 and all(_is_over(error, "max_sessions") for error in errors)
    assert len(_ids(ann)) == 3
    for n in range(4):
        _open(bob, f"s{n}")
    with refused(StatusCode.RESOURCE_EXHAUSTED) as errors:
        ann.Fork(pb.ForkRequest(session_id="first"))
    assert errors[0].details() == (
        "max_sessions: expected at most 3 open sessions, got 3 and 1 more; close one, or have the "
        "quota raised"
    )
    ann.CloseSession(pb.CloseSessionRequest(session_id="first"))
    mine = _ids(ann)[0]
    errors = _race(running.service, 5, lambda n: ann.Fork(pb.ForkRequest(session_id=mine)))
    assert len(errors) == 4 and len(_ids(ann)) == 3


def test_cells_are_counted_with_what_is_under_way_and_come_back(ann, bob, running, path):
    _quota(path, "ann", max_cells=50)
    names = [_open(ann, f"s{n}", IDS[:5]) for n in range(4)]
    errors = _race(
        running.service,
        12,
        lambda n: ann.Append(pb.AppendRequest(session_id=names[n % 4], prompt=tokens(IDS[:7]))),
    )
    assert len(errors) == 8 and all(_is_over(error, "max_cells") for error in errors)
    stats = ann.GetStats(pb.GetStatsRequest())
    assert (stats.sessions, stats.cells_used) == (4, 48)
    with refused(StatusCode.RESOURCE_EXHAUSTED) as errors:  # 2 and 3
        list(ann.Query(pb.QueryRequest(session_id="s0", question=QUESTION)))
    assert _is_over(errors[0], "max_cells")
    with refused(StatusCode.RESOURCE_EXHAUSTED):
        _generate(ann)
    with refused(StatusCode.RESOURCE_EXHAUSTED) as errors:
        ann.Fork(pb.ForkRequest(session_id="s0"))
    many = (pb.AppendRequest(session_id="s0", prompt=tokens([n])) for n in range(20, 25))
    with refused(StatusCode.RESOURCE_EXHAUSTED) as errors:  # and not waited for without end
        ann.AppendStream(many)
    assert errors[0].details().endswith("2 appends before it were applied")
    ann.CloseSession(pb.CloseSessionRequest(session_id="s1"))
    assert grpc_service.parts(ann.Query(pb.QueryRequest(session_id="s0", question=QUESTION)))[
        2
    ].token_ids
    assert _generate(bob)[0] == 0


def test_a_session_that_slides_goes_on_with_cells_for_its_window(ann, running, path):
    _quota(path, "ann", max_cells=96)  # context_len
    _open(ann, "s", IDS[:2], when_full=pb.WHEN_FULL_SLIDE)
    for _ in range(30):
        ann.Append(pb.AppendRequest(session_id="s", prompt=tokens(IDS[:4])))
    assert _session(ann).evicted_tokens > 0
    errors = _race(
        running.service,
        8,
        lambda n: ann.Append(pb.AppendRequest(session_id="s", prompt=tokens(IDS[:20]))),
    )
    assert errors == []
    held = _session(ann).context_tokens
    with refused(StatusCode.RESOURCE_EXHAUSTED) as errors:
        _open(ann, "t", [3] * (97 - held))
    assert _is_over(errors[0], "max_cells")


def test_an_update_counts_for_what_it_adds(ann, path):
    _quota(path, "ann", max_cells=60)
    _open(ann, "s", IDS[:2])
    ann.Append(pb.AppendRequest(session_id="s", prompt=tokens(IDS * 2 + IDS[:10])))
    for count in (48, 58):  # shorter, then as much as there may be; nothing in common
        ids = [count + n for n in range(count)]
        ann.Update(pb.UpdateRequest(session_id="s", prompt=tokens(ids)))
    with refused(StatusCode.RESOURCE_EXHAUSTED) as errors:
        ann.Update(pb.UpdateRequest(session_id="s", prompt=tokens([3] * 59)))
    assert errors[0].details().startswith("max_cells: expected at most 60 cells")
    assert "got 60 and 1 more" in errors[0].details()


def test_what_is_restored_counts_unless_it_takes_the_place_of_as_much(ann, running, path, tmp_path):
    _quota(path, "ann", max_sessions=1, max_cells=9)
    _open(ann, "s", IDS[:9])
    saved, service = tmp_path / "kept", running.service
    service.snapshot("ann/s", saved, fingerprint="tiny")
    with pytest.raises(QuotaError, match="max_sessions: expected at most 1 open sessions"):
        service.restore(saved, fingerprint="tiny", session_id="ann/t")
    service.restore(saved, fingerprint="tiny")
    _quota(path, "ann", max_cells=9)
    assert _ids(ann) == ["s"]
    with pytest.raises(QuotaError, match="max_cells: expected at most 9 cells .*, got 9 and 9"):
        service.restore(saved, fingerprint="tiny", session_id="ann/t")


def test_calls_at_once_are_counted_streams_among_them(ann, running, path):
    _open(ann)
    _quota(path, "ann", max_requests=2)
    watching = [ann.WatchAnswers(pb.WatchAnswersRequest(session_id="s")) for _ in range(2)]
    grpc_service.wait_until(lambda: running.server._backend.access.requests.running["ann"] == 2)
    with refused(StatusCode.RESOURCE_EXHAUSTED) as errors:
        _session(ann)
    assert _is_over(errors[0], "max_requests")
    for one in watching:
        one.cancel()
    grpc_service.wait_until(lambda: running.server._backend.access.requests.running["ann"] == 0)
    assert _session(ann).session_id == "s"


# Revoked, restarted, seen


def test_a_revoked_token_ends_what_it_began(ann, bob, running, path):
    _open(ann)
    ann.Register(pb.RegisterRequest(session_id="s", question=QUESTION))
    stream = ann.WatchAnswers(pb.WatchAnswersRequest(session_id="s"))
    assert next(stream).answer.token_ids
    tokens_file.remove(path, "ann")
    running.service.append("ann/s", IDS[:2]).result(WAIT_S)
    with refused(StatusCode.UNAUTHENTICATED):
        list(stream)
    with refused(StatusCode.UNAUTHENTICATED):
        _session(ann)
    assert _ids(bob) == []
    again = As(running.stub, tokens_file.issue(path, "ann", replace=False))
    assert _session(again).version == 1


def test_after_a_restart_sessions_are_their_tenants(engine, model, path, given_tokens, tmp_path):
    def serving():
        journal = Journal(tmp_path / "journal", durability="normal", fingerprint="tiny")
        return grpc_service.serving(engine, model.tokenizer, access=Access(path), journal=journal)

    with serving() as running:
        ann, bob = (As(running.stub, given_tokens[name]) for name in ("ann", "bob"))
        _open(ann, "s", IDS[:5]), _open(bob, "s", IDS[:9]), _open(bob, "t")
        bob.Append(pb.AppendRequest(session_id="s", prompt=PROMPT))
    with serving() as running:
        ann, bob = (As(running.stub, given_tokens[name]) for name in ("ann", "bob"))
        assert (_ids(ann), _ids(bob)) == (["s"], ["s", "t"])
        assert (_session(ann).context_tokens, _session(bob).context_tokens) == (5, 11)
        with refused(StatusCode.NOT_FOUND):
            _session(ann, "t")
        assert bob.Append(pb.AppendRequest(session_id="s", prompt=PROMPT)).version == 2
        with refused(StatusCode.ALREADY_EXISTS):
            _open(ann, "s")


def test_figures_are_told_to_each_tenant_and_to_operators_by_tenant(ann, bob, running, path):
    exporter = Exporter(running.service, "tiny", running.server._backend.access)
    _open(ann, "s", IDS[:5]), _open(ann, "t", IDS[:6]), _open(bob, "s", IDS[:3])
    running.service.create(IDS[:2], session_id="ann/odd", tenant='a"\\\nb')
    assert _ids(ann) == ["s", "t"]
    _generate(bob)
    stats = ann.GetStats(pb.GetStatsRequest())
    assert stats == pb.Stats(sessions=2, cells_used=11)
    _quota(path, "bob", max_sessions=1)
    with refused(StatusCode.RESOURCE_EXHAUSTED):
        _open(bob, "t")
    text = exporter.exposition().decode()
    assert not any(one._metadata[0][1].split()[1] in text for one in (ann, bob))
    found = {
        (sample.name.removeprefix("jaxstate:tenant_"), *list(sample.labels.values())[1:]): (
            sample.value
        )
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("jaxstate:tenant_")
    }
    assert found == {
        ("sessions", "ann"): 2, ("sessions", "bob"): 1, ("sessions", 'a"\\\nb'): 1,
        ("context_tokens", "ann"): 11, ("context_tokens", "bob"): 3,
        ("context_tokens", 'a"\\\nb'): 2,
        ("requests_running", "ann"): 0, ("requests_running", "bob"): 0,
        ("requests_total", "ann"): 4, ("requests_total", "bob"): 3,
        ("requests_refused_total", "max_sessions", "bob"): 1,
    }  # fmt: skip
