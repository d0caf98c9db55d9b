"""The dashboard and the alert rules in packaging/ agree with /metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from mlxrun.engine.thread import EngineStats
from tests.helpers.server_fakes import FakeEngine, make_chat_body, run_server
from tools.grafana_dashboard import COLUMNS, FILE, HEIGHT, PANELS, WIDTH, build_dashboard, render_dashboard

RULES = FILE.parent / "prometheus-alerts.yml"
MATCHER = re.compile(r'(\w+)(=~|!=|!~|=)"([^"]*)"')
OUTSIDE = {"up"}  # what Prometheus itself adds, beside the labels of a target
OF_PROCESS = ("process_open_fds", "process_max_fds", "process_resident_memory_bytes")  # on Linux only
TARGET = {"instance", "job", "le"}
Series = dict[str, list[dict[str, str]]]  # the labels of each sample, by its name


class LimitedEngine(FakeEngine):
    """With a limit of memory, which is a series of its own."""

    def read_stats(self) -> EngineStats:
        stats = super().read_stats()
        return EngineStats(stats.counts, 10**9, stats.time, stats.busy)


@pytest.fixture
async def series() -> Series:
    found: Series = {}
    async with run_server(engine=LimitedEngine()) as s:
        await s.post("/v1/chat/completions", make_chat_body())
        await s.post("/v1/chat/completions", {})
        for family in text_string_to_metric_families((await s.get("/metrics")).body.decode()):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample.labels)
    return found


def read_rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def list_queries() -> Iterator[tuple[str, str]]:
    """Each query with the name of what it is for."""
    yield from ((rule["alert"], rule["expr"]) for rule in read_rules())
    yield from ((panel.title, query) for panel in PANELS for query in panel.queries.values())


def find_problems(query: str, series: Series) -> list[str]:
    """What a query names that /metrics does not have: metrics, labels and values."""
    problems = []
    for name, matchers in re.findall(r"\b((?:mlxrun|process)_\w+|up)\b(?:\{([^}]*)\})?", query):
        if name in OUTSIDE:
            continue
        if name not in series:
            problems.append(name)
            continue
        for label, operator, value in MATCHER.findall(matchers):
            known = {labels.get(label) for labels in series[name]}
            if label not in TARGET and (known == {None} or (operator == "=" and value not in known)):
                problems.append(f'{name}{{{label}="{value}"}}')
    grouped = {
        label
        for labels in re.findall(r"\b(?:by|ignoring) \(([^)]*)\)", query)
        for label in labels.split(", ")
    }
    known_labels = {label for samples in series.values() for labels in samples for label in labels} | TARGET
    return [*problems, *sorted(grouped - known_labels)]


def test_every_query_names_what_metrics_have(series: Series) -> None:
    known = series | {name: [{}] for name in OF_PROCESS}
    problems = {place: found for place, query in list_queries() if (found := find_problems(query, known))}
    assert problems == {"MlxrunRefuses": ['mlxrun_requests_total{status="429"}']}, "there was no 429 here"


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("rate(mlxrun_request_total[5m])", "mlxrun_request_total"),
        ('mlxrun_requests_live{state="queued"}', 'mlxrun_requests_live{state="queued"}'),
        ('mlxrun_requests_live{phase="waiting"}', 'mlxrun_requests_live{phase="waiting"}'),
        ("sum by (phases) (mlxrun_requests_live)", "phases"),
    ],
)
def test_what_metrics_do_not_have_is_found(series: Series, query: str, problem: str) -> None:
    assert find_problems(query, series) == [problem]


@pytest.mark.parametrize(("place", "query"), list(list_queries()), ids=lambda value: value[:24])
def test_brackets_are_closed(place: str, query: str) -> None:
    opened: list[str] = []
    for char in re.sub(r'"[^"]*"', "", query):
        if char in "([{":
            opened.append(char)
        elif char in ")]}":
            assert opened and opened.pop() + char in ("()", "[]", "{}"), place
    assert not opened, place


def test_rules_say_what_they_mean() -> None:
    rules = read_rules()
    assert len({rule["alert"] for rule in rules}) == len(rules) > 8
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert (
            "{{ $labels.instance }}" in rule["annotations"]["summary"] and rule["annotations"]["description"]
        )


def test_the_dashboard_is_fresh_and_its_panels_are_side_by_side() -> None:
    """`make generate` writes it."""
    assert FILE.read_text(encoding="utf-8") == render_dashboard()
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in build_dashboard()["panels"]]
    assert len(set(places)) == len(PANELS) and {x for x, _ in places} == {n * WIDTH for n in range(COLUMNS)}
    assert {y % HEIGHT for _, y in places} == {0}
    assert (
        json.loads(FILE.read_text())["templating"]["list"][1]["query"]
        == "label_values(mlxrun_ready, instance)"
    )


def test_the_page_names_both_files() -> None:
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    assert "packaging/grafana-dashboard.json" in page and "packaging/prometheus-alerts.yml" in page
