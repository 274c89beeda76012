"""Prometheus metrics: one registry per app, so that two apps in one process do not meet."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """Counters, gauges and durations by name, made on first use. Names end in their unit."""

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        self._service = service
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        if name not in self._counters:
            self._counters[name] = Counter(
                f"deltawire_{name}", name, sorted(labels), registry=self.registry
            )
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(amount)

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        if name not in self._gauges:
            self._gauges[name] = Gauge(f"deltawire_{name}", name, registry=self.registry)
        self._gauges[name].set(value)

    def observe(self, name: str, seconds: float) -> None:
        """Record a duration."""
        if name not in self._histograms:
            self._histograms[name] = Histogram(
                f"deltawire_{name}_seconds", name, buckets=_BUCKETS_S, registry=self.registry
            )
        self._histograms[name].observe(seconds)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record how long the block took."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.observe(name, time.perf_counter() - started)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)
