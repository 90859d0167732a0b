"""What Prometheus scrapes is what was done."""

from __future__ import annotations

import grpc_service
import pytest
import tiny_engine
import tiny_service
from prometheus_client import parser

from jaxstate.errors import ClosedError
from jaxstate.flash import Question
from jaxstate.sampling import Sampling
from jaxstate.serving.prometheus import Exporter

WAIT_S = 60


@pytest.fixture
def service():
    with tiny_service.started(preposition=0) as service:
        yield service


@pytest.fixture
def exporter(service):
    return Exporter(service, "tiny")


def _question(seed, count=3, **how):
    return Question(token_ids=tuple(tiny_engine.random_ids(seed, 5)), max_new_tokens=count, **how)


def _scrape(exporter) -> dict[tuple, float]:
    """All samples by their name, less the prefix, and their labels but for the model's."""
    found = {}
    for family in parser.text_string_to_metric_families(exporter.exposition().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("jaxstate:"):
                assert labels.pop("model_name") == "tiny"
                key = sample.name.removeprefix("jaxstate:"), *labels.values()
                assert found.setdefault(key, sample.value) is sample.value, key
    return found


def test_requests_tokens_and_times_are_those_of_what_was_asked(service, exporter):
    session = service.create(tiny_engine.random_ids(2, 10))
    service.append(session, tiny_engine.random_ids(3, 7)).result(WAIT_S)
    service.register(session, _question(4))
    service.wait_until_idle(WAIT_S)
    answers = [service.query(session, _question(4)).result(WAIT_S) for _ in range(5)]
    answers.append(service.query(session, _question(5, 4)).result(WAIT_S))
    other = service.generate(tiny_engine.random_ids(6, 9), max_new_tokens=2).result(WAIT_S)
    found = _scrape(exporter)
    assert found["request_success_total", "length", "flash"] == 5
    assert found["request_success_total", "length", "computed"] == 2
    assert found["answers_total", "flash"] == found["flash_hits_total",] == 5
    assert found["answers_total", "computed"] == 2
    assert found["flash_stale_hits_total",] == found["gate_fires_total",] == 0
    # Of looked-up answers nothing is forwarded or drawn; an answer's last token is not forwarded.
    assert found["prompt_tokens_total",] == 10 + 7 + 5 + 9
    assert found["generation_tokens_total",] == len(answers[-1].token_ids) + len(other.token_ids)
    assert found["forwarded_tokens_total", "query"] == (5 + 3) + (9 + 1)
    assert found["forwarded_tokens_total", "append"] == 17
    assert found["forwarded_tokens_total", "flash"] == 5 + 2
    assert found["verbs_ended_total", "query", "done"] == 2
    for name, count in (
        ("time_to_first_token_seconds", 7),
        ("e2e_request_latency_seconds", 7),
        ("request_queue_time_seconds", 2),
        ("append_lag_seconds", 2),
        ("answer_age_versions", 5),
    ):
        assert found[f"{name}_count",] == found[f"{name}_bucket", "+Inf"] == count, name
    # Five look-ups take no step, which no query does without.
    assert found["e2e_request_latency_seconds_bucket", "0.001"] >= 4
    assert found["time_to_first_token_seconds_sum",] < found["e2e_request_latency_seconds_sum",]
    assert found["request_queue_time_seconds_sum",] < found["time_to_first_token_seconds_sum",]
    assert 0 < found["e2e_request_latency_seconds_sum",] < WAIT_S
    assert found["answer_age_versions_bucket", "0.0"] == 5
    assert found["compilations_after_ready_total",] == 0
    assert found["busy_seconds_total",] == pytest.approx(service.metrics.busy_s)


def test_cells_and_sessions_are_told_as_they_stand(service, exporter):
    first = service.create(tiny_engine.random_ids(8, 25))
    service.create(tiny_engine.random_ids(9, 3))
    service.register(first, _question(10))
    service.wait_until_idle(WAIT_S)
    found = _scrape(exporter)
    # Pages of 8; of the evaluation's five and two tokens one is kept.
    assert found["resident_cells", "sessions", "device"] == 32 + 8
    assert found["resident_cells", "tails", "device"] == 8
    assert found["resident_cells", "sessions", "host"] == 0
    assert found["free_cells",] == 96 * 8 - 48
    assert found["kv_cache_usage_perc",] == pytest.approx(48 / (96 * 8))
    assert (found["sessions",], found["context_tokens",]) == (2, 28)
    assert found["flash_queries", "fresh"] == 1
    assert found["append_pending_tokens",] == found["append_pending_seconds",] == 0
    assert found["num_requests_running",] == found["num_requests_waiting",] == 0


def test_what_waits_lags_and_outdated_answers_are_seen_while_they_do(service, exporter):
    session = service.create(tiny_engine.random_ids(11, 4))
    service.register(session, _question(12))
    service.wait_until_idle(WAIT_S)
    stuck = Question(
        token_ids=(1, 2), max_new_tokens=60, sampling=Sampling(temperature=1.0, seed=1)
    )
    grpc_service.slow_down(service, 0.05)
    running = service.query(session, stuck)
    next(iter(running))
    pending = service.append(session, tiny_engine.random_ids(13, 30))
    found = _scrape(exporter)
    assert found["num_requests_running",] == found["verbs", "query", "running"] == 1
    assert found["append_pending_tokens",] == 30
    assert 0 < found["append_pending_seconds",] < WAIT_S
    assert found["verbs", "append", "waiting"] + found["verbs", "append", "running"] == 1
    assert pending.result(WAIT_S) == 1
    found = _scrape(exporter)
    assert found["append_pending_tokens",] == 0
    assert found["append_lag_seconds_count",] == 2
    assert found["flash_queries", "outdated"] == found["flash_age_versions",] == 1
    stale = service.query(session, _question(12), stale="serve").result(WAIT_S)
    assert stale.age == 1
    found = _scrape(exporter)
    assert found["flash_stale_hits_total",] == 1
    assert found["answer_age_versions_bucket", "0.0"] == 0
    assert found["answer_age_versions_bucket", "1.0"] == 1
    running.cancel()
    service.wait_until_idle(WAIT_S)
    found = _scrape(exporter)
    assert found["verbs_ended_total", "query", "cancelled"] == 1
    assert found["flash_queries", "fresh"] == 1 and found["flash_age_versions",] == 0


def test_a_closed_service_has_no_figures_and_a_closed_exporter_hears_nothing(service, exporter):
    exporter.close()
    service.generate(tiny_engine.random_ids(15, 4), max_new_tokens=2).result(WAIT_S)
    assert _scrape(exporter)["time_to_first_token_seconds_count",] == 0
    service.close()
    with pytest.raises(ClosedError):
        exporter.exposition()
