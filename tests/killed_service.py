"""A service that does random verbs and says what it is about to do and what it was told: to be
killed at any moment. Arguments: directory of the journal, seed, durability."""

from __future__ import annotations

import json
import os
import pathlib
import random
import sys
import threading

import jax
import tiny_engine

from jaxstate.errors import JaxStateError
from jaxstate.flash import Question
from jaxstate.serving.journal import Journal
from jaxstate.serving.local_service import LocalService
from jaxstate.serving.snapshots import Snapshots

FINGERPRINT = "tiny"
WRITERS = 3


def say(kind: str, **what) -> None:
    os.write(1, (json.dumps({"kind": kind, **what}) + "\n").encode())  # whole lines, at once


def write(service: LocalService, session: str, seed: int, first: int) -> None:
    """Change one session for ever."""
    rng = random.Random(f"{session} {seed}")
    sequence = first

    def ids(count):
        return [rng.randrange(tiny_engine.MODEL.vocab_size - 1) for _ in range(count)]

    while True:
        verb = rng.choice(["append", "append", "append", "rollback", "update", "turn", "ask"])
        now = service._call(lambda: list(service._engine.session(session).token_ids[3:]))
        what: dict = dict(verb=verb, session=session)
        if verb == "append":
            sequence += 1
            what |= dict(ids=ids(rng.randint(1, 30)), sequence=sequence)
        elif verb == "rollback":
            what |= dict(count=rng.randint(1, 6))
        elif verb == "update":
            what |= dict(ids=(now[: rng.randint(0, len(now))] + ids(rng.randint(1, 8)))[:90])
        else:
            what |= dict(ids=ids(4))
        say("try", **what)
        question = Question(token_ids=tuple(what.get("ids", ())), max_new_tokens=3)
        try:
            if verb == "append":
                number = (session, sequence)
                pending = service.append(session, what["ids"], number=number)
                say("done", **what, version=pending.result())
            elif verb == "rollback":
                say("done", **what, version=service.rollback(session, what["count"]).result())
            elif verb == "update":
                say("done", **what, version=service.update(session, what["ids"]).result())
            elif verb == "turn":
                answer = service.query(session, question, commit=True).result()
                say("done", **what, answer=answer.token_ids, version=answer.version + 1)
            else:
                answer = service.query(session, question).result()
                say("told", session=session, version=answer.version)
        except JaxStateError as error:
            say("refused", **what, error=str(error))


def main() -> None:
    directory, seed, durability = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    jax.config.update("jax_compilation_cache_dir", str(directory / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    engine = tiny_engine.build(num_pages=64)
    journal = Journal(directory / "journal", durability=durability, fingerprint=FINGERPRINT)
    snapshots = Snapshots(directory / "snapshots", fingerprint=FINGERPRINT, idle_s=0.01)
    service = LocalService(engine, journal=journal, snapshots=snapshots)
    for n in range(WRITERS):
        session = f"w{n}"
        if session not in service._sessions:
            frozen = [n, 5, 6]
            say("try", verb="create", session=session, ids=frozen)
            service.create(frozen, session_id=session, when_full="slide")
            say("done", verb="create", session=session, ids=frozen, version=0)
        sequence = max([0, *service._sessions[session].memory._highest.values()])
        threading.Thread(target=write, args=(service, session, seed, sequence), daemon=True).start()
    threading.Event().wait(120)  # whoever started it is gone then


if __name__ == "__main__":
    main()
