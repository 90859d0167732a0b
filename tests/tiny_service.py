"""A service on a tiny engine that tests lend one another, and its worker held up between steps."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import tiny_engine

from jaxstate.engine import Engine
from jaxstate.serving.local_service import LocalService

WAIT_S = 60


@functools.cache
def engine() -> Engine:
    return tiny_engine.build(num_pages=96)


@contextlib.contextmanager
def started(lent: Engine | None = None, **how) -> Iterator[LocalService]:
    """Start a service whose engine must be left empty; closed at the end."""
    with tiny_engine.left_empty(lent or engine()) as empty:
        service = LocalService(empty, **how)
        yield service
        service.close()


def hold(service: LocalService) -> threading.Event:
    """Hold the worker up until the event returned is set; what is asked meanwhile gathers."""
    taken, release = threading.Event(), threading.Event()

    def command():
        taken.set()
        assert release.wait(WAIT_S)

    with service._changed:
        service._commands.enqueue(command)
    assert taken.wait(WAIT_S)
    return release


@contextlib.contextmanager
def held_behind_a_step(service: LocalService) -> Iterator[threading.Event]:
    """Hold the worker up behind the next step that forwards anything, till the end of the block.

    Yields what is set when that step has run.
    """
    step, taken, release = service._scheduler.step, threading.Event(), threading.Event()

    def held(*args):
        done = step(*args)
        if done.tokens and not taken.is_set():
            taken.set()
            assert release.wait(WAIT_S)
        return done

    service._scheduler.step = held
    try:
        yield taken
    finally:
        release.set()
        service._scheduler.step = step
