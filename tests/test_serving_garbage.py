"""Full collections of garbage wait until nobody does."""

from __future__ import annotations

import contextlib
import gc
import threading
import time

import pytest
import tiny_engine

from jaxstate.serving import garbage
from jaxstate.serving.local_service import LocalService


@contextlib.contextmanager
def _full_collections():
    """Count the full collections that happen inside."""
    found = []

    def note(phase, info):
        if phase == "stop" and info["generation"] == 2:
            found.append(threading.current_thread().name)

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


def _make_objects(times: int) -> None:
    """Have Python collect young objects as often, which outlive it."""
    kept = []
    for _ in range(times * (gc.get_threshold()[0] + 1) * (gc.get_threshold()[1] + 1)):
        kept.append([])


def test_python_collects_all_by_itself_only_where_it_is_not_deferred():
    before = gc.get_threshold()
    assert before[2] < garbage.WORTH * 2, "else this test shows nothing"
    with garbage.deferred():
        with garbage.deferred():
            pass  # another one's end is not the end
        with _full_collections() as full:
            _make_objects(2 * garbage.WORTH)
            assert not full
    assert gc.get_threshold() == before
    with _full_collections() as full:
        _make_objects(2 * garbage.WORTH)
        assert full


def test_a_service_that_rests_collects(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(garbage, "REST_S", 0.01)
    service = LocalService(tiny_engine.build())
    try:
        service.create([1, 2, 3], session_id="a")
        service.wait_until_idle(60)
        with _full_collections() as full:
            _make_objects(2 * garbage.WORTH)
            assert not full
            service.append("a", [4]).result(60)  # it has something to do, and then nothing
            until = time.monotonic() + 60
            while not full and time.monotonic() < until:
                time.sleep(0.01)
        assert full[:1] == ["jaxstate-worker"]
        assert garbage.rest_s() is None  # and rests on
    finally:
        service.close()
        service.close()
