"""How long a saved session takes to its first token, against computing it again."""

from __future__ import annotations

import pathlib
import time

import numpy as np
from served import CALL_S, Server, answer_of, serving, tokens

from jaxstate.serving import jaxstate_pb2 as pb

CONTEXT, QUESTION = 7000, 12


def _first_token(server: Server, session: str, question: list[int]) -> list[int]:
    asked = pb.Question(prompt=tokens(question), max_new_tokens=1)
    request = pb.QueryRequest(session_id=session, question=asked)
    return list(answer_of(server.stub.Query(request, timeout=CALL_S)).token_ids)


def measure(
    model: object, vocab_size: int, directory: pathlib.Path, *, rounds: int, context: int = CONTEXT
) -> dict[str, list[float]]:
    """Return seconds of both by round: restored by a server that was just started, and computed.

    Every round has a context of its own, and a server of its own for what is restored: nothing of
    it is in its memory. The answers are compared.
    """
    found: dict[str, list[float]] = {"restored_s": [], "computed_s": []}
    rng = np.random.default_rng(0)
    state = directory / "state"
    arguments = ("--max-model-len", 8192, "--kv-cells", 16384, "--state-dir", state)
    for number in range(rounds):
        ids = rng.integers(0, vocab_size, context).tolist()
        question = rng.integers(0, vocab_size, QUESTION).tolist()
        name = f"round-{number}"
        with serving(model, *arguments, log=directory / "log") as server:
            began = time.perf_counter()
            request = pb.CreateSessionRequest(session_id=name, prefix=tokens(ids))
            server.stub.CreateSession(request, timeout=CALL_S)
            computed = _first_token(server, name, question)
            found["computed_s"].append(time.perf_counter() - began)
            server.stub.Snapshot(pb.SnapshotRequest(session_id=name, name=name), timeout=CALL_S)
            server.stub.CloseSession(pb.CloseSessionRequest(session_id=name), timeout=CALL_S)
        with serving(model, *arguments, log=directory / "log") as server:
            began = time.perf_counter()
            server.stub.Restore(pb.RestoreRequest(name=name), timeout=CALL_S)
            restored = _first_token(server, name, question)
            found["restored_s"].append(time.perf_counter() - began)
            assert restored == computed, (restored, computed)
            server.stub.CloseSession(pb.CloseSessionRequest(session_id=name), timeout=CALL_S)
            server.stub.DeleteSnapshot(pb.DeleteSnapshotRequest(name=name))
    return found
