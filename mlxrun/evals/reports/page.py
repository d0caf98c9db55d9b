"""The HTML file of a report: one file that contains all it needs, and that may load nothing.

Its policy allows the style and the script in it by their digests, and images from data URLs; nothing else
runs or is loaded, whatever an answer contains. Texts of the runs are escaped by the templates, or are JSON
that the script shows as text.
"""

from __future__ import annotations

import base64
import hashlib
from functools import partial
from importlib import resources
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from mlxrun import __version__
from mlxrun.evals.reports import facts, report_view, shown_text
from mlxrun.evals.reports.charts import format_seconds
from mlxrun.evals.reports.difference import METHOD, describe_difference
from mlxrun.evals.reports.line_data import build_chunks, build_head, dump_json
from mlxrun.evals.reports.report_runs import ReportRuns
from mlxrun.evals.reports.speed_view import list_speeds
from mlxrun.evals.reports.suite_matrix import build_matrix

_SCRIPTS = ("text.js", "lines.js", "detail.js", "page.js")
MOST_SCORED = 6  # runs whose scores by group are shown at once
MOST_DIFFERENCES = 40  # settings
SCORE_NOTE = "Failed lines score 0. The dot is the mean score, the line its 95 % interval, from 0 to 100 %."


def render_page(runs: ReportRuns) -> str:
    """The page of a report."""
    style, script = Markup(_read_asset("report.css")), Markup(build_script())
    page: str = (
        _make_environment()
        .get_template("report.html")
        .render(
            report=build_view(runs),
            head=dump_json(build_head(runs.rows, [run.label for run in runs.runs], runs.tasks)),
            chunks=build_chunks(runs.rows, len(runs.runs)),
            policy=build_policy(style, script),
            style=style,
            script=script,
            version=__version__,
        )
    )
    return page


def build_view(runs: ReportRuns) -> SimpleNamespace:
    """What the templates show."""
    all_runs = runs.runs
    view = SimpleNamespace(
        title=report_view.build_title(runs),
        lead=report_view.build_lead(runs),
        facts=report_view.list_facts(runs),
        labels=[run.label for run in all_runs],
        runs=all_runs,
        many=len(all_runs) > 1,
        count=len(runs.rows),
        difference=describe_difference(runs.paths),
        difference_method=METHOD,
        matrix=build_matrix(runs),
        score_rows=report_view.list_score_rows(all_runs),
        scores_folded=len(all_runs) > MOST_SCORED,
        score_axis=report_view.draw_score_axis(),
        score_note=SCORE_NOTE,
        metrics=sorted(
            {name for run in all_runs for group in run.scores.groups.values() for name in group.metrics}
        ),
        unscored=any(group.unscored for run in all_runs for group in run.scores.groups.values()),
        reliability=report_view.list_reliability(all_runs),
        reasons=report_view.list_reasons(all_runs),
        problems=[problem for run in all_runs for problem in run.problems],
        speeds=list_speeds(all_runs),
        differences=_list_differences(runs),
        settings=[
            {"label": run.label, "paths": f"{run.folder.paths.out}", "text": report_view.dump_settings(run)}
            for run in all_runs
        ],
        states=report_view.count_states(runs),
    )
    groups = sorted({row.group for row in runs.rows if row.group is not None})
    choices = [("group", "Group", groups), ("task", "Task", runs.tasks), ("run", "Run", view.labels)]
    view.choices = [choice for choice in choices if len(choice[2]) > 1]
    return view


def _list_differences(runs: ReportRuns) -> list[tuple[str, list[str]]]:
    if not 1 < len(runs.runs) <= MOST_SCORED:
        return []
    return facts.list_differences(runs.runs)[:MOST_DIFFERENCES]


def build_script() -> str:
    """The scripts as one, which keeps its names to itself."""
    parts = "\n".join(_read_asset(name) for name in _SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}}})();\n'


def build_policy(style: str, script: str) -> str:
    """The content of the page's Content-Security-Policy: no network, no other script or style."""
    return (
        f"default-src 'none'; script-src {_hash_source(script)}; style-src {_hash_source(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hash_source(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _read_asset(name: str) -> str:
    return resources.files("mlxrun.evals.reports").joinpath("assets", name).read_text(encoding="utf-8")


def _make_environment() -> Any:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(_read_asset),
        keep_trailing_newline=True,
    )
    environment.filters.update(
        show=shown_text.show_html,
        plain=shown_text.mark_invisible,
        count=shown_text.format_count,
        share=shown_text.format_share,
        interval=shown_text.format_bounds,
        address=partial(quote, safe=""),
        seconds=format_seconds,
    )
    return environment
