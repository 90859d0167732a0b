"""A server whose in-process verbs can be timed beside those over gRPC, on the same engine.

    python bench/service_host.py MODEL

Prints the port. For every line with a number of tokens on stdin it asks in process for an answer of
that length and prints the milliseconds from its first token to its last.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterable

from served import LOCALHOST

from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.flash import Question
from jaxstate.models import loading
from jaxstate.serving.grpc_server import GrpcServer, ServerConfig
from jaxstate.serving.local_service import LocalService
from jaxstate.serving.rpc_calls import Served

SESSION, CONTEXT, PROMPT = "s", [1 + n % 9 for n in range(300)], [3, 1, 4, 1, 5]


def between(tokens: Iterable[object]) -> float:
    """Return milliseconds from the first token to the last."""
    times = [time.perf_counter() for _ in tokens]
    return (times[-1] - times[0]) * 1e3


def main() -> None:
    """Serve until stdin ends."""
    model = loading.load(sys.argv[1])
    config = EngineConfig(num_pages=64, page_size=64, context_len=1024, evict_quantum=64)
    engine = Engine(model.params, model.config, config, tokenizer=model.tokenizer)
    service = LocalService(engine)
    service.create(CONTEXT, session_id=SESSION)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def start() -> int:
        server = GrpcServer(ServerConfig(host=LOCALHOST, port=0))
        port = await server.start()
        await server.open(Served(service=service, tokenizer=model.tokenizer, name="host"))
        return port

    print(asyncio.run_coroutine_threadsafe(start(), loop).result(), flush=True)
    for line in sys.stdin:
        question = Question(token_ids=tuple(PROMPT), max_new_tokens=int(line))
        print(between(service.query(SESSION, question, top_logprobs=0)), flush=True)
    service.close()


if __name__ == "__main__":
    main()
