"""The files of a report, made of one view: HTML, and Markdown that is short enough for a pull request.

The HTML file contains all it needs, and may load nothing. Its policy allows its own style and script by
their digests, and images and sounds from data URLs. Nothing else runs or is loaded, whatever an answer
contains. The templates escape texts of the runs, or the script shows them as text.

Lines are JSON inside the page. The columns of the table are read when the page opens, before the browser has
read the rest. A chunk with details is read when one of its lines is opened or searched. A text that occurs in
several lines of a chunk is in it once: a number stands for its place in `texts`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import resources
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from mlxrun import __version__
from mlxrun.evals.history import CellTrend, list_cells
from mlxrun.evals.reports import report_view, shown_text
from mlxrun.evals.reports.charts import draw_axis, draw_trend, format_seconds
from mlxrun.evals.reports.report_lines import ABSENT, FLIP, LineRow, Prompt
from mlxrun.evals.reports.report_runs import ReportRuns, collect_settings, list_differences
from mlxrun.evals.reports.speed import list_speeds
from mlxrun.evals.run_folders.run_folder import RUNNING

_SCRIPTS = ("text.js", "lines.js", "detail.js", "live.js", "page.js")
MOST_SCORED = 6  # runs whose scores by group are shown at once
MOST_DIFFERENCES = 40  # settings
CHUNK = 100  # lines
_TEXTS = ("answer", "reasoning", "note", "error")  # of an answer
_SHARED = 80  # characters from which a text that repeats is shared
# Inside a script element, HTML would read these; as JSON escapes they are the same text.
_ESCAPES = {ord(each): f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"}


def render_page(runs: ReportRuns, *, digest: str = "", is_live: bool = False) -> str:
    """Render the page of a report. `digest`: of a page that a server sends, and that asks whether there is a
    newer one; `is_live`: whether a run goes on."""
    return render_template(
        "report.html",
        digest,
        is_live=is_live,
        report=build_view(runs),
        head=dump_json(build_head(runs.rows, [run.label for run in runs.runs], runs.tasks)),
        chunks=build_chunks(runs.rows, len(runs.runs)),
    )


def render_index(runs: Sequence[Any], name: str, digest: str) -> str:
    """Render the index of the runs of a folder. `name`: of the folder."""
    is_live = any(run.state == RUNNING for run in runs)
    return render_template("runs.html", digest, is_live=is_live, runs=runs, name=name)


def render_history(trends: Sequence[CellTrend], name: str) -> str:
    """Render the trends of a history file as a page. `name`: of the file."""
    cells = []
    for trend, row in zip(trends, list_cells(trends), strict=True):
        rows, (first, last) = trend.rows, (each.time[:10] for each in (trend.rows[0], trend.rows[-1]))
        label = f"{trend.cell}: {len(rows)} runs from {first} to {last}"
        plot = draw_trend([each.value for each in rows], [each.interval for each in rows], label)
        cells.append({**row, "plot": plot, "alarm": trend.has_jumped or trend.has_drifted})
    return render_template("history.html", cells=cells, name=name)


def render_template(template: str, digest: str = "", **values: Any) -> str:
    """Render a template of a page, with its style, script and policy."""
    style, script = Markup(_read_asset("report.css")), Markup(build_script())
    policy = build_policy(style, script, is_served=bool(digest))
    page: str = (
        make_environment()
        .get_template(template)
        .render(digest=digest, policy=policy, style=style, script=script, version=__version__, **values)
    )
    return page


def build_served_policy() -> str:
    """Build the policy of pages that a server sends."""
    policy = build_policy(_read_asset("report.css"), build_script(), is_served=True)
    return f"{policy}; frame-ancestors 'none'"


def render_markdown(runs: ReportRuns) -> str:
    """Render the report as Markdown: scores, differences, failures, speed, versions."""
    environment = make_environment(is_html=False)
    environment.filters.update(show=shown_text.show_markdown, plain=shown_text.escape_markdown)
    text = environment.get_template("report.md").render(report=build_view(runs))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def build_view(runs: ReportRuns) -> SimpleNamespace:
    """Build what the templates show."""
    all_runs, difference = runs.runs, None
    if len(runs.paths) == 2:
        from mlxrun.evals.reports.difference import describe_difference  # SciPy takes a second to import

        difference = describe_difference(*runs.paths)
    view = SimpleNamespace(
        title=report_view.build_title(runs),
        lead=report_view.build_lead(runs),
        facts=report_view.list_facts(runs),
        labels=[run.label for run in all_runs],
        runs=all_runs,
        many=len(all_runs) > 1,
        count=len(runs.rows),
        difference=difference,
        matrix=report_view.build_matrix(runs),
        score_rows=report_view.list_score_rows(all_runs),
        scores_folded=len(all_runs) > MOST_SCORED,
        score_axis=draw_axis(report_view.SHARE_DOMAIN),
        metrics=sorted(
            {name for run in all_runs for group in run.scores.groups.values() for name in group.metrics}
        ),
        metric_notes=report_view.list_metric_notes(all_runs),
        unscored=any(group.unscored for run in all_runs for group in run.scores.groups.values()),
        reasons=report_view.list_reasons(all_runs),
        troubled=[run for run in all_runs if any(value for value, _ in run.troubles)],
        flips=[row for row in runs.rows if row.is_flip] if len(all_runs) == 2 else [],
        problems=[problem for run in all_runs for problem in run.problems],
        speeds=list_speeds(all_runs),
        differences=list_differences(all_runs)[:MOST_DIFFERENCES] if 1 < len(all_runs) <= MOST_SCORED else [],
        settings=[
            (run, json.dumps(collect_settings(run.manifest), indent=1, ensure_ascii=False))
            for run in all_runs
        ],
        states=report_view.count_states(runs),
    )
    groups = sorted({row.group for row in runs.rows if row.group is not None})
    choices = [("group", "Group", groups), ("task", "Task", runs.tasks), ("run", "Run", view.labels)]
    view.choices = [choice for choice in choices if len(choice[2]) > 1]
    return view


def build_script() -> str:
    """Join the scripts to one, which keeps its names to itself."""
    parts = "\n".join(_read_asset(name) for name in _SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}}})();\n'


def build_policy(style: str, script: str, *, is_served: bool = False) -> str:
    """Build the page's Content-Security-Policy: no network, no other script or style. A page that a server
    sends may ask this server."""
    own = "'self'" if is_served else "'none'"
    return (
        f"default-src 'none'; script-src {_hash_source(script)}; style-src {_hash_source(style)}; "
        f"img-src data:; media-src data:; base-uri 'none'; form-action {own}; connect-src {own}"
    )


def _hash_source(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _read_asset(name: str) -> str:
    return resources.files("mlxrun.evals.reports").joinpath("assets", name).read_text(encoding="utf-8")


def make_environment(*, is_html: bool = True) -> Any:
    """The Jinja environment of the report, which escapes values if it is HTML."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=is_html,
        trim_blocks=not is_html,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(_read_asset),
        keep_trailing_newline=True,
    )
    environment.filters.update(
        show=shown_text.show_html,
        plain=shown_text.mark_invisible,
        count=shown_text.format_count,
        share=shown_text.format_share,
        style=shown_text.style_numbers,
        address=partial(quote, safe=""),
        seconds=format_seconds,
    )
    return environment


def dump_json(value: Any) -> Markup:
    """Dump JSON that may stand inside a script element, whatever texts it has."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).translate(_ESCAPES)
    return Markup(text.encode("utf-8", "backslashreplace").decode())  # lone surrogates as escapes


def build_head(rows: Sequence[LineRow], runs: Sequence[str], tasks: Sequence[str]) -> dict[str, Any]:
    """Build what the table shows, column by column. Of several runs, the last one's answer is shown."""
    groups = sorted({row.group for row in rows if row.group is not None})
    places = {name: at for at, name in enumerate(groups)}
    last = [row.answers[max(row.answers)] for row in rows]
    answers = [[row.answers.get(run) for run in range(len(runs))] for row in rows]
    return {
        "count": len(rows),
        "chunk": CHUNK,
        "runs": [{"label": label} for label in runs],
        "groups": groups,
        "tasks": list(tasks),
        "columns": {
            "ids": [row.id for row in rows],
            "groups": [-1 if row.group is None else places[row.group] for row in rows],
            "tasks": [row.task for row in rows],
            "marks": ["".join(each.mark if each else ABSENT for each in found) for found in answers],
            "flags": [
                "".join(f"{each.flags | FLIP * row.is_flip:x}" if each else "0" for each in found)
                for row, found in zip(rows, answers, strict=True)
            ],  # those of each run are a hexadecimal digit
            "answers": [answer.answer for answer in last],
            "expected": [answer.expected for answer in last],
            "scores": [answer.score for answer in last],
            "output": [answer.output for answer in last],
            "took": [answer.took for answer in last],
        },
    }


def build_chunks(rows: Sequence[LineRow], runs: int) -> Iterator[Markup]:
    """Yield the details of all lines, CHUNK of them at a time. `runs`: the number of runs."""
    for start in range(0, len(rows), CHUNK):
        shared, chunk = _SharedTexts(), rows[start : start + CHUNK]
        for row in chunk:
            _build_row(row, runs, shared.count)
        yield dump_json(
            {"rows": [_build_row(row, runs, shared.share) for row in chunk], "texts": shared.texts}
        )


def _build_row(row: LineRow, runs: int, change: Callable[[Any], Any]) -> dict[str, Any]:
    """What is shown of a row. `change`: gets each text that the page looks up in `texts`, those of prompts
    and answers, and images, and returns what stands for it."""
    answers = [row.answers.get(run) for run in range(runs)]
    shown = [None if answer is None else dict(answer.shown) for answer in answers]
    prompt = None if row.prompt is None else _change_prompt(row.prompt, change)
    for each in filter(None, shown):
        talks = {name: each[name] for name in ("prompt", "transcript") if name in each}
        each |= {name: _change_prompt(talk, change) for name, talk in talks.items()}
    for each in filter(None, shown):
        each |= {key: change(each[key]) for key in _TEXTS if key in each}
        if "choices" in each:
            each["choices"] = [change(choice) for choice in each["choices"]]
    return {"prompt": prompt, "runs": shown}


def _change_prompt(prompt: Prompt, change: Callable[[Any], Any]) -> list[Any]:
    return [
        [role, change(text), [[change(url), name] for url, name in media], *more]
        for role, text, media, *more in prompt
    ]


class _SharedTexts:
    """Replaces long texts that occur more than once by the number of their place in `texts`."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self._counts: Counter[str] = Counter()

    def count(self, text: Any) -> Any:
        """Count a text, and return it."""
        if isinstance(text, str) and len(text) >= _SHARED:
            self._counts[text] += 1
        return text

    def share(self, text: Any) -> Any:
        """Return the number of a text that was counted twice; any other as it is."""
        if not isinstance(text, str) or self._counts[text] < 2:
            return text
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]
