"""Builds metric families that all carry the same labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric

from llmkit.metrics.histogram import HistogramCounts

Sample = tuple[Mapping[str, str], float]
"""Labels of its own, and a value."""


class Families:
    """prefix: of every name; labels: of every sample."""

    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        self._prefix = prefix if prefix.endswith((":", "_")) else f"{prefix}:"
        self._names = list(labels)
        self._values = list(labels.values())

    def gauge(self, name: str, help_text: str, *samples: Sample | float, own: tuple[str, ...] = ()) -> Metric:
        """A value that goes up and down. own: names of the samples' own labels."""
        family = GaugeMetricFamily(self._prefix + name, help_text, labels=[*self._names, *own])
        for labels, value in _samples(samples):
            family.add_metric([*self._values, *(labels[key] for key in own)], value)
        return family

    def counter(self, name: str, help_text: str, *samples: Sample | float, own: tuple[str, ...] = ()) -> Metric:
        """A value that only grows; its name gets the ending _total."""
        family = CounterMetricFamily(self._prefix + name, help_text, labels=[*self._names, *own])
        for labels, value in _samples(samples):
            family.add_metric([*self._values, *(labels[key] for key in own)], value)
        return family

    def histogram(self, name: str, help_text: str, counts: HistogramCounts) -> Metric:
        """Counts by bucket, made cumulative."""
        family = HistogramMetricFamily(self._prefix + name, help_text, labels=self._names)
        buckets, below = [], 0
        for bound, count in zip((*counts.bounds, None), counts.counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound is None else str(float(bound)), below))
        family.add_metric(self._values, buckets, counts.total)
        return family

    def summary(
        self, name: str, help_text: str, own: tuple[str, ...], samples: Iterable[tuple[Mapping[str, str], int, float]]
    ) -> Metric:
        """Counts and sums, for each set of own labels."""
        family = SummaryMetricFamily(self._prefix + name, help_text, labels=[*self._names, *own])
        for labels, count, total in samples:
            family.add_metric([*self._values, *(labels[key] for key in own)], count, total)
        return family


def _samples(samples: Iterable[Sample | float]) -> Iterable[Sample]:
    return (({}, sample) if isinstance(sample, (int, float)) else sample for sample in samples)
