"""A client that asks one registered question again and again, and prints what it waited, in ms.

python bench/service_probe.py HOST:PORT SECONDS
"""

from __future__ import annotations

import sys
import time

import grpc
from served import CALL_S, answer_of, tokens

from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving.jaxstate_pb2_grpc import JaxStateStub

EVERY_S = 0.05
SESSION, CONTEXT = "probe", [1 + n % 9 for n in range(300)]
QUESTION = pb.Question(prompt=tokens([3, 1, 4, 1, 5]), max_new_tokens=4, ignore_model_eos=True)


def ask(stub: JaxStateStub) -> tuple[float, pb.Answer]:
    """Ask once; returns milliseconds, and the answer."""
    began = time.perf_counter()
    request = pb.QueryRequest(session_id=SESSION, question=QUESTION)
    answer = answer_of(stub.Query(request, timeout=CALL_S))
    return (time.perf_counter() - began) * 1e3, answer


def prepare(stub: JaxStateStub) -> None:
    """Open a session with the question, and wait until it is answered."""
    stub.CreateSession(
        pb.CreateSessionRequest(session_id=SESSION, prefix=tokens(CONTEXT)), timeout=CALL_S
    )
    stub.Register(pb.RegisterRequest(session_id=SESSION, question=QUESTION), timeout=CALL_S)
    while ask(stub)[1].source != pb.SOURCE_FLASH:
        time.sleep(0.05)


def main() -> None:
    """Ask for some seconds."""
    address, seconds = sys.argv[1], float(sys.argv[2])
    with grpc.insecure_channel(address) as channel:
        stub = JaxStateStub(channel)
        prepare(stub)
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            took, answer = ask(stub)
            assert answer.source == pb.SOURCE_FLASH, answer
            print(took, flush=True)
            time.sleep(EVERY_S)
        stub.CloseSession(pb.CloseSessionRequest(session_id=SESSION), timeout=CALL_S)


if __name__ == "__main__":
    main()
