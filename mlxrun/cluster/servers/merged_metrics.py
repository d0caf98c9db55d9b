"""The metrics of several workers as those of one server, each sample with a label for its worker.

A worker that ends takes its counters with it. `PastCounts` keeps them, so that they never go back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_COUNTED = ("counter", "histogram")
_TIMES = "_created"  # of counters: when they began
SampleKey = tuple[str, tuple[tuple[str, str], ...]]  # its name and its labels
CountKey = tuple[str, SampleKey]  # behind the name of its family


def _make_key(sample: Sample) -> SampleKey:
    return sample.name, tuple(sorted(sample.labels.items()))


class PastCounts:
    """The counters of workers that have ended, by the worker's label."""

    def __init__(self) -> None:
        self.families: dict[str, Any] = {}  # without samples, by name
        self.values: defaultdict[str, defaultdict[CountKey, float]] = defaultdict(lambda: defaultdict(float))

    def add(self, worker: str, text: str) -> None:
        """Add the counters in the metrics of a worker that ends."""
        for family in text_string_to_metric_families(text):
            if family.type in _COUNTED:
                for sample in family.samples:
                    if not sample.name.endswith(_TIMES):
                        self.values[worker][family.name, _make_key(sample)] += sample.value
                family.samples = []
                self.families.setdefault(family.name, family)

    def copy_values(self, worker: str) -> dict[CountKey, float]:
        """A copy of what a worker's ended lives have counted."""
        return dict(self.values[worker]) if worker in self.values else {}


class MergedMetrics:
    """The metric families of all workers. `label`: the name of the label for the worker."""

    def __init__(self, label: str, past: PastCounts | None = None) -> None:
        self._label = label
        self._past = past or PastCounts()
        self._families: dict[str, Any] = {}
        self._texts: dict[str, str] = {}

    def add(self, worker: str, text: str) -> None:
        """Add the metrics of a worker."""
        past = self._past.copy_values(worker)
        for family in text_string_to_metric_families(text):
            samples = [
                sample._replace(value=sample.value + past.pop((family.name, _make_key(sample)), 0.0))
                for sample in family.samples
            ]
            self._extend(family, worker, samples)
        self._add_past(worker, past)

    def add_ended(self, worker: str) -> None:
        """Add what is known of a worker that does not run now."""
        self._add_past(worker, self._past.copy_values(worker))

    def add_families(self, families: Iterable[Any]) -> None:
        """Add families whose samples have the label already."""
        for family in families:
            self._get(family).samples.extend(family.samples)

    def add_samples(self, worker: str, families: Iterable[Any]) -> None:
        """Add families whose samples are of a worker."""
        for family in families:
            self._extend(family, worker, family.samples)

    def encode(self) -> bytes:
        """Encode all in Prometheus' text format."""
        return generate_latest(self)

    def collect(self) -> Iterable[Any]:
        """The families, as generate_latest reads them."""
        return self._families.values()

    def _add_past(self, worker: str, values: dict[CountKey, float]) -> None:
        for (family, (name, labels)), value in values.items():
            self._extend(self._past.families[family], worker, [Sample(name, dict(labels), value)])

    def _extend(self, family: Any, worker: str, samples: Iterable[Sample]) -> None:
        labelled = (each._replace(labels={**each.labels, self._label: worker}) for each in samples)
        self._get(family).samples.extend(labelled)

    def _get(self, family: Any) -> Any:
        """The family of this name, which begins without samples."""
        found = self._families.get(family.name)
        if found is None:
            found = self._families[family.name] = Metric(family.name, family.documentation, family.type)
        return found
