"""Metrics of workers with a label; counters of those that have ended are kept."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from mlxrun.cluster.servers.merged_metrics import MergedMetrics, PastCounts


def make_text(answers: int, rows: int) -> str:
    """The metrics of one life of a worker."""
    registry = CollectorRegistry()
    Counter("answers", "Answers.", ["status"], registry=registry).labels("200").inc(answers)
    Gauge("rows", "Rows.", registry=registry).set(rows)
    seconds = Histogram("seconds", "Seconds.", buckets=(1.0,), registry=registry)
    for _ in range(answers):
        seconds.observe(0.5)
    return generate_latest(registry).decode()


def encode(merged: MergedMetrics) -> list[str]:
    return merged.encode().decode().splitlines()


def test_each_sample_says_whose_it_is() -> None:
    merged = MergedMetrics("model")
    merged.add("a", make_text(1, 3))
    merged.add("b", make_text(2, 4))
    lines = encode(merged)
    assert 'answers_total{model="a",status="200"} 1.0' in lines
    assert 'answers_total{model="b",status="200"} 2.0' in lines
    assert 'rows{model="b"} 4.0' in lines
    assert len([line for line in lines if line.startswith("# TYPE answers_total ")]) == 1


def test_counters_of_earlier_lives_are_added() -> None:
    """Gauges, and the times at which counters began, are those of the life that runs."""
    past = PastCounts()
    past.add("a", make_text(3, 9))
    past.add("a", make_text(4, 9))
    merged = MergedMetrics("model", past)
    merged.add("a", make_text(1, 2))
    lines = encode(merged)
    assert 'answers_total{model="a",status="200"} 8.0' in lines
    assert 'seconds_bucket{le="1.0",model="a"} 8.0' in lines and 'seconds_count{model="a"} 8.0' in lines
    assert 'rows{model="a"} 2.0' in lines
    created = [line for line in lines if line.startswith("answers_created{")]
    assert len(created) == 1 and float(created[0].split()[-1]) < 4e9


def test_counters_of_a_worker_that_has_ended_stay() -> None:
    past = PastCounts()
    past.add("a", make_text(3, 9))
    for _ in range(2):  # reading changes nothing
        merged = MergedMetrics("model", past)
        merged.add_ended("a")
        merged.add_ended("never there")
        lines = encode(merged)
        assert 'answers_total{model="a",status="200"} 3.0' in lines
        assert not [line for line in lines if line.startswith("rows")]


def test_families_of_the_front_join_those_of_workers() -> None:
    own = GaugeMetricFamily("rows", "Rows.", labels=["model"])
    own.add_metric(["front"], 1)
    merged = MergedMetrics("model")
    merged.add("a", make_text(1, 3))
    merged.add_families([own])
    assert {'rows{model="a"} 3.0', 'rows{model="front"} 1.0'} <= set(encode(merged))
