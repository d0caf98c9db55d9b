"""`python -m tools.grafana_dashboard` writes packaging/grafana-dashboard.json, a dashboard for /metrics."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "packaging" / "grafana-dashboard.json"
COLUMNS, WIDTH, HEIGHT = 3, 8, 8  # panels beside each other, and units of Grafana's grid
SOURCE = {"type": "prometheus", "uid": "${source}"}
OF = 'instance=~"$instance"'


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over time. `queries`: PromQL by the legend of its lines; `unit`: as Grafana names it."""

    title: str
    unit: str
    queries: dict[str, str]


def sum_rate(metric: str, *labels: str, more: str = "") -> str:
    """The rate of a counter, one line for each value of the labels. `more`: other matchers."""
    return sum_gauge(metric, *labels, more=more, over="rate({}[$__rate_interval])")


def sum_gauge(metric: str, *labels: str, more: str = "", over: str = "{}") -> str:
    """The sum of a gauge, one line for each value of the labels. `more`: other matchers; `over`: what is
    summed, of the metric."""
    matchers = ", ".join(filter(None, (OF, more)))
    by = f" by ({', '.join(labels)})" if labels else ""
    return f"sum{by} ({over.format(f'{metric}{{{matchers}}}')})"


def list_quantiles(metric: str) -> dict[str, str]:
    """The median and high quantiles of a histogram."""
    rate = sum_rate(f"{metric}_bucket", "le")
    return {f"p{part * 100:g}": f"histogram_quantile({part}, {rate})" for part in (0.5, 0.9, 0.99)}


CACHED, PROMPT = (sum_rate("mlxrun_tokens_total", more=f'kind="{kind}"') for kind in ("cached", "prompt"))
PANELS = (
    Panel("Requests by status", "reqps", {"{{status}}": sum_rate("mlxrun_requests_total", "status")}),
    Panel("Requests in flight", "short", {"{{phase}}": sum_gauge("mlxrun_requests_live", "phase")}),
    Panel("Tokens per second", "short", {"{{kind}}": sum_rate("mlxrun_tokens_total", "kind")}),
    Panel("Time to first token", "s", list_quantiles("mlxrun_time_to_first_token_seconds")),
    Panel("Time in the queue", "s", list_quantiles("mlxrun_queue_seconds")),
    Panel("Time between tokens", "s", list_quantiles("mlxrun_inter_token_seconds")),
    Panel("Time of a request", "s", list_quantiles("mlxrun_request_duration_seconds")),
    Panel(
        "Rows",
        "short",
        {
            "{{state}}": sum_gauge("mlxrun_engine_requests", "state"),
            "background, {{state}}": sum_gauge("mlxrun_engine_background", "state"),
            "most that run": sum_gauge("mlxrun_limits", more='name="max_running"'),
        },
    ),
    Panel(
        "Preemptions and failed steps",
        "cpm",
        {
            "preemptions": f"60 * {sum_rate('mlxrun_preemptions_total')}",
            "failed steps": f"60 * {sum_rate('mlxrun_engine_errors_total')}",
        },
    ),
    Panel(
        "Prompt tokens from the prefix cache",
        "percentunit",
        {"share": f"{CACHED} / {PROMPT}"},
    ),
    Panel("Prompts by kind of hit", "reqps", {"{{hit}}": sum_rate("mlxrun_cache_lookups_total", "hit")}),
    Panel("Prefix cache", "bytes", {"{{tier}}": sum_gauge("mlxrun_cache_bytes", "tier")}),
    Panel("Memory of the device", "bytes", {"{{kind}}": sum_gauge("mlxrun_memory_bytes", "kind")}),
    Panel(
        "The process",
        "bytes",
        {"resident": sum_gauge("process_resident_memory_bytes"), "files": sum_gauge("mlxrun_files_bytes")},
    ),
    Panel("Batches", "short", {"{{state}}": sum_gauge("mlxrun_batches", "state")}),
)


def build_dashboard() -> dict[str, Any]:
    """Build the dashboard, which asks for its data source and its servers."""
    return {
        "uid": "mlxrun",
        "title": "mlxrun",
        "tags": ["mlxrun"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "instance",
                    "type": "query",
                    "datasource": SOURCE,
                    "query": "label_values(mlxrun_ready, instance)",
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": [_build_panel(number, panel) for number, panel in enumerate(PANELS)],
    }


def _build_panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    targets = [
        {"refId": chr(ord("A") + at), "expr": query, "legendFormat": legend, "datasource": SOURCE}
        for at, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "id": number + 1,
        "title": panel.title,
        "type": "timeseries",
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def render_dashboard() -> str:
    """Return the text of the file."""
    return json.dumps(build_dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(render_dashboard(), encoding="utf-8")
