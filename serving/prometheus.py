"""A service's figures for Prometheus, under the names that operators of vLLM know.

exporter = Exporter(service, "smollm2-135m")     # listens from now on
body = exporter.exposition()                       # of CONTENT_TYPE

What vLLM calls a request is here a query or a prompt that somebody waits for: appends, evaluations
of registered questions and what is paid ahead are told by class, in metrics of their own. Figures
are those of all tenants together and name no session; those that begin with "tenant_" have a label
for whose they are, and its values are the tenants of the tokens file and of open sessions.

Source of the names: vLLM's production metrics (docs.vllm.ai/en/stable/usage/metrics).
"""

from __future__ import annotations

from collections.abc import Iterator

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from jaxstate.answer import Answer, Source
from jaxstate.plan import JobClass
from jaxstate.scheduler import State, Ticket
from jaxstate.serving.auth import Access
from jaxstate.serving.description import Overview
from jaxstate.serving.local_service import LocalService

SECONDS = tuple(
    round(digit * 10.0**power, 9) for power in range(-5, 3) for digit in (1, 2, 5)
)  # from a dictionary's look-up to minutes of prefill
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
VERSIONS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

_ENDS = tuple(state for state in State if state not in (State.WAITING, State.RUNNING))
_LABEL = "model_name"  # vLLM's, on every metric


class Exporter(Collector):
    """Listens to what a service counts and tells it to whoever scrapes."""

    def __init__(self, service: LocalService, model_name: str, access: Access | None = None):
        """Count from now on.

        Args:
          access: counts tenants' calls; None = there is one tenant.
        """
        self._access = access
        self._service = service
        self._model = model_name
        self._registry = prometheus_client.CollectorRegistry()
        self._first_token_s = self._histogram(
            "time_to_first_token_seconds", "From a query's call to its first token.", SECONDS
        )
        self._latency_s = self._histogram(
            "e2e_request_latency_seconds", "From a query's call to its whole answer.", SECONDS
        )
        self._queue_s = self._histogram(
            "request_queue_time_seconds", "From a query's call to its first step.", SECONDS
        )
        self._append_s = self._histogram(
            "append_lag_seconds", "From an append's call to when answers see it.", SECONDS
        )
        self._age = self._histogram(
            "answer_age_versions", "Versions that answers at hand were behind.", VERSIONS
        )
        self._requests = self._counter(
            "request_success", "Answers, by why and where from.", "finished_reason", "source"
        )
        self._prompt_tokens = self._counter(
            "prompt_tokens", "Tokens forwarded of what callers sent: prompts, questions, appends."
        )
        self._cached_tokens = self._counter(
            "prompt_tokens_cached", "Tokens of computed questions and prompts found computed."
        )
        self._generation_tokens = self._counter(
            "generation_tokens", "Tokens drawn for queries and prompts."
        )
        self._registry.register(self)
        prometheus_client.ProcessCollector(registry=self._registry)
        service.metrics.listeners.append(self)

    def close(self) -> None:
        """Count no more."""
        self._service.metrics.listeners.remove(self)

    def exposition(self) -> bytes:
        """Return all metrics as they are between two steps of the service.

        Always in Prometheus's own text format, whatever a scraper likes better: in OpenMetrics the
        library turns the colon into an underscore, and dashboards would not find the names.

        Raises:
          ClosedError: the service is closed.
        """
        return prometheus_client.generate_latest(self._registry)

    # What happens, from the thread in which it does, see metrics.Listener

    def end(self, ticket: Ticket) -> None:
        """See metrics.Listener."""
        asked = ticket.asked or ticket.submitted
        if ticket.job_class is JobClass.APPEND:
            self._prompt_tokens.inc(ticket.tokens_forwarded)
            if ticket.state is State.DONE:
                assert ticket.ended is not None
                self._append_s.observe(ticket.ended - asked)
        if ticket.job_class is JobClass.QUERY:
            if ticket.started is not None:
                self._queue_s.observe(max(ticket.started - asked, 0.0))
            begun = ticket.first_output is not None
            self._prompt_tokens.inc(ticket.tokens_to_first if begun else ticket.tokens_forwarded)
            self._generation_tokens.inc(len(ticket.tokens))
            if ticket.state is State.DONE and isinstance(ticket.result, Answer):
                self._cached_tokens.inc(ticket.result.cached_tokens)

    def answer(self, answer: Answer, asked_s: float, first_s: float) -> None:
        """See metrics.Listener."""
        self._first_token_s.observe(first_s)
        self._latency_s.observe(asked_s)
        self._requests.labels(self._model, answer.finish_reason.value, answer.source.value).inc()
        if answer.source in (Source.FLASH, Source.GATED):
            self._age.observe(answer.age)

    # What is there when somebody asks

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield what the service counts itself, and how it stands."""
        overview = self._service.overview()
        yield from self._standing(overview)
        yield from self._counted()
        if self._access is not None:
            yield from self._of_tenants(overview, self._access)

    def _standing(self, overview: Overview) -> Iterator[GaugeMetricFamily]:
        cells = overview.cells
        resident = {
            ("sessions", "device"): cells.sessions,
            ("prefixes", "device"): cells.prefixes,
            ("tails", "device"): cells.tails,
            ("sessions", "host"): cells.host,
            ("sessions", "disk"): cells.disk,
            ("copies", "host"): cells.copies,
        }
        used = cells.sessions + cells.prefixes + cells.tails
        sessions = [info for info, _ in overview.sessions]
        asked = [(info, query) for info, queries in overview.sessions for query in queries]
        fresh = sum(bool(one.answer and one.answer.version == info.version) for info, one in asked)
        failed = sum(query.error is not None for _, query in asked)
        outdated = [
            (overview.now - query.answered_at, info.version - query.answer.version)
            for info, query in asked
            if query.answer is not None and query.answer.version != info.version
        ]
        yield self._gauge(
            "num_requests_running", "Queries and prompts that have begun.",
            {(): overview.running[JobClass.QUERY]},
        )  # fmt: skip
        yield self._gauge(
            "num_requests_waiting", "Queries and prompts that have not begun.",
            {(): overview.waiting[JobClass.QUERY]},
        )  # fmt: skip
        yield self._gauge(
            "verbs", "Verbs of every class under way.",
            {
                (one.name.lower(), state): counts[one]
                for state, counts in (("waiting", overview.waiting), ("running", overview.running))
                for one in JobClass
            },
            "class", "state",
        )  # fmt: skip
        yield self._gauge(
            "kv_cache_usage_perc", "Share of the pool's pages in use; 1 = all.",
            {(): used / (used + cells.free)},
        )  # fmt: skip
        yield self._gauge(
            "resident_cells", "Cells by where they are and whose, in whole pages.", resident,
            "owner", "tier",
        )  # fmt: skip
        yield self._gauge("free_cells", "Cells of the pool that are nobody's.", {(): cells.free})
        yield self._gauge("sessions", "Open sessions.", {(): len(sessions)})
        yield self._gauge(
            "context_tokens", "Tokens of all contexts.",
            {(): sum(info.context_len for info in sessions)},
        )  # fmt: skip
        yield self._gauge(
            "append_pending_tokens", "Tokens taken but not yet seen by answers.",
            {(): sum(info.lag_tokens for info in sessions)},
        )  # fmt: skip
        yield self._gauge(
            "append_pending_seconds", "For how long the oldest of these has waited, or 0.",
            {(): max((info.lag_s for info in sessions), default=0.0)},
        )  # fmt: skip
        yield self._gauge(
            "flash_queries", "Registered questions, by how their answers stand.",
            {("fresh",): fresh, ("outdated",): len(asked) - fresh - failed, ("failed",): failed},
            "state",
        )  # fmt: skip
        yield self._gauge(
            "flash_age_versions", "Versions that the oldest registered answer is behind.",
            {(): max((versions for _, versions in outdated), default=0)},
        )  # fmt: skip
        yield self._gauge(
            "flash_age_seconds", "How long ago the oldest outdated registered answer came.",
            {(): max((seconds for seconds, _ in outdated), default=0.0)},
        )  # fmt: skip

    def _counted(self) -> Iterator[CounterMetricFamily]:
        metrics = self._service.metrics
        classes = metrics.by_class.items()
        yield self._total(
            "answers", "Answers by where they came from.",
            {(source.value,): metrics.answers[source] for source in Source}, "source",
        )  # fmt: skip
        yield self._total("flash_hits", "Answers looked up.", {(): metrics.answers[Source.FLASH]})
        yield self._total(
            "flash_stale_hits", "Of these, of an older version, by the caller's wish.",
            {(): metrics.stale_answers},
        )  # fmt: skip
        yield self._total(
            "gate_fires", "Answers given at a measured risk.", {(): metrics.answers[Source.GATED]}
        )
        yield self._total("entries_paid", "Tails paid ahead.", {(): metrics.entries_paid})
        yield self._total(
            "entries_used", "Questions that one made cheaper.", {(): metrics.entries_used}
        )
        yield self._total(
            "forwarded_tokens", "Tokens that ran through the model, by class.",
            {(one.name.lower(),): figures.tokens for one, figures in classes}, "class",
        )  # fmt: skip
        yield self._total(
            "verbs_ended", "Verbs that are over, by class and how they ended.",
            {
                (one.name.lower(), state.value): figures.ended[state]
                for one, figures in classes
                for state in _ENDS
            },
            "class", "state",
        )  # fmt: skip
        yield self._total("busy_seconds", "Time within steps.", {(): metrics.busy_s})
        if metrics.compilations is not None:
            yield self._total(
                "compilations_after_ready", "Programs compiled since the service was ready.",
                {(): metrics.compilations},
            )  # fmt: skip

    def _of_tenants(
        self, overview: Overview, access: Access
    ) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        sessions = dict.fromkeys(access.tenants, 0)
        cells = dict(sessions)
        for info, _ in overview.sessions:
            sessions[info.tenant] = sessions.get(info.tenant, 0) + 1
            cells[info.tenant] = cells.get(info.tenant, 0) + info.context_len
        requests = access.requests
        yield self._gauge("tenant_sessions", "Open sessions.", _by(sessions), "tenant")
        yield self._gauge(
            "tenant_context_tokens", "Cells of all contexts, wherever they are.", _by(cells),
            "tenant",
        )  # fmt: skip
        yield self._gauge(
            "tenant_requests_running", "Calls under way.", _by(requests.running), "tenant"
        )
        yield self._total("tenant_requests", "Calls begun.", _by(requests.begun), "tenant")
        yield self._total(
            "tenant_requests_refused", "Calls refused, by the quota that was used up.",
            dict(requests.refused), "tenant", "quota",
        )  # fmt: skip

    # Families

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...]
    ) -> prometheus_client.Histogram:
        return prometheus_client.Histogram(
            f"jaxstate:{name}", text, (_LABEL,), registry=self._registry, buckets=buckets
        ).labels(self._model)

    def _counter(self, name: str, text: str, *labels: str) -> prometheus_client.Counter:
        counter = prometheus_client.Counter(
            f"jaxstate:{name}", text, (_LABEL, *labels), registry=self._registry
        )
        return counter if labels else counter.labels(self._model)

    def _gauge(
        self, name: str, text: str, values: dict[tuple[str, ...], float], *labels: str
    ) -> GaugeMetricFamily:
        return self._filled(GaugeMetricFamily, name, text, values, labels)

    def _total(
        self, name: str, text: str, values: dict[tuple[str, ...], float], *labels: str
    ) -> CounterMetricFamily:
        return self._filled(CounterMetricFamily, name, text, values, labels)

    def _filled(self, family, name, text, values, labels):
        filled = family(f"jaxstate:{name}", text, labels=(_LABEL, *labels))
        for found, value in values.items():
            filled.add_metric((self._model, *found), value)
        return filled


def _by(figures: dict[str, int]) -> dict[tuple[str, ...], float]:
    return {(name,): value for name, value in dict(figures).items()}
