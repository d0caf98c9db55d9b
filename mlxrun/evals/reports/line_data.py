"""The lines of a report as JSON inside its page: columns for the table, and chunks with the details.

The columns are read when the page opens; a chunk when one of its lines is opened or searched. A text that
occurs in several lines of a chunk is in it once: a number stands for its place in `texts`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup

from mlxrun.evals.reports.report_lines import ABSENT, FLIP, LineRow, Prompt, RunAnswer

CHUNK = 100  # lines
_SHARED = 80  # characters from which a text that repeats is shared
# Inside a script element, HTML would read these; as JSON escapes they are the same text.
_ESCAPES = {ord(each): f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"}


def dump_json(value: Any) -> Markup:
    """JSON that may stand inside a script element, whatever texts it has."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).translate(_ESCAPES)
    return Markup(text.encode("utf-8", "backslashreplace").decode())  # lone surrogates as escapes


def build_head(rows: Sequence[LineRow], runs: Sequence[str], tasks: Sequence[str]) -> dict[str, Any]:
    """What the table shows, column by column. Of several runs, the last one's answer is shown."""
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
            "flags": [_dump_flags(row, found) for row, found in zip(rows, answers, strict=True)],
            "answers": [answer.answer for answer in last],
            "expected": [answer.expected for answer in last],
            "output": [answer.output for answer in last],
            "took": [answer.took for answer in last],
        },
    }


def _dump_flags(row: LineRow, answers: Sequence[RunAnswer | None]) -> str:
    """The flags of each run as a hexadecimal digit."""
    flip = FLIP * row.is_flip
    return "".join("0" if answer is None else f"{answer.flags | flip:x}" for answer in answers)


def build_chunks(rows: Sequence[LineRow], runs: int) -> Iterator[Markup]:
    """The details of all lines, CHUNK of them at a time; `runs`: the number of runs."""
    for start in range(0, len(rows), CHUNK):
        shared = _SharedTexts()
        found = [_build_row(row, runs) for row in rows[start : start + CHUNK]]
        yield dump_json({"rows": shared.replace(found), "texts": shared.texts})


def _build_row(row: LineRow, runs: int) -> dict[str, Any]:
    """A copy of what is shown of a row, whose texts may be replaced."""
    answers = []
    for run in range(runs):
        answer = row.answers.get(run)
        shown = None if answer is None else dict(answer.shown)
        if shown is not None and "prompt" in shown:
            shown["prompt"] = _copy_prompt(shown["prompt"])
        answers.append(shown)
    return {"prompt": None if row.prompt is None else _copy_prompt(row.prompt), "runs": answers}


def _copy_prompt(prompt: Prompt) -> list[Any]:
    return [[role, text, [list(image) for image in images]] for role, text, images in prompt]


class _SharedTexts:
    """Replaces long texts that occur more than once by the number of their place in `texts`. Only texts that
    the page reads as such are replaced: those of prompts and answers, and images."""

    _KEYS = ("answer", "reasoning", "note", "error")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self._counts: Counter[str] = Counter()

    def replace(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for row in rows:
            self._visit(row, self._count)
        for row in rows:
            self._visit(row, self._share)
        return rows

    def _visit(self, row: dict[str, Any], change: Any) -> None:
        answers = [answer for answer in row["runs"] if answer]
        for prompt in (row["prompt"], *(answer.get("prompt") for answer in answers)):
            for message in prompt or ():
                message[1] = change(message[1])
                for image in message[2]:
                    image[0] = change(image[0])
        for answer in answers:
            for key in self._KEYS:
                if key in answer:
                    answer[key] = change(answer[key])
            if "choices" in answer:
                answer["choices"] = [change(each) for each in answer["choices"]]

    def _count(self, text: Any) -> Any:
        if isinstance(text, str) and len(text) >= _SHARED:
            self._counts[text] += 1
        return text

    def _share(self, text: Any) -> Any:
        if not isinstance(text, str) or self._counts[text] < 2:
            return text
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]
