"""The files of the box, and suites that use them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mlxrun.config.yaml_source import render_yaml
from mlxrun.evals.suites.suite_checks import check_suite
from mlxrun.evals.suites.suite_file import SuiteFile, read_suite
from mlxrun.evals.suites.suite_settings import HubSource, SuiteTask
from mlxrun.evals.tasks.task_box import build_suite, list_task_names, read_task
from tests.helpers.suite_files import write_suite

NAMES = list_task_names()
PAGE = Path(__file__).parents[3] / "docs/tasks.md"


def read(folder: Path, suite: Any) -> SuiteFile:
    file = read_suite(folder / "suite.yaml", render_yaml(suite).encode())
    check_suite(file)
    return file


def read_used(folder: Path, **keys: Any) -> SuiteTask:
    """A task of a suite that uses one of the box."""
    file = read(folder, {"models": {"m": {}}, "tasks": {"t": keys}})
    file.raise_problems()
    return file.suite.tasks["t"]


@pytest.mark.parametrize("name", NAMES)
def test_each_task_is_valid_and_says_where_it_comes_from(name: str, tmp_path: Path) -> None:
    """Rows of a fixed revision, a licence, metrics, and scores with the page that has them."""
    task = read_used(tmp_path, use=name)
    assert task.use == name
    for hub in (task.hub, task.few_shot.hub if task.few_shot else None):
        assert hub is None or (hub.revision is not None and len(hub.revision) == 40)
    about = read_task(name).about
    assert set(about) <= {"title", "paper", "licence", "metrics", "lm_eval", "needs", "published"}
    assert about["title"] and about["licence"] and about["metrics"] and about["paper"].startswith("https://")
    assert len(about["published"]) == 2 or task.rows, "rows that are made here were published by nobody"
    for each in about["published"]:
        assert set(each) == {"model", "score", "how", "source"} and each["source"].startswith("https://")
        assert 0 < each["score"] < 100


def test_the_page_of_standard_tasks_lists_them() -> None:
    """With the same names and scores."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    scores = {name: read_task(name).about["published"] for name in NAMES}
    assert dict(rows) == {
        name: ", ".join(f"{each['score']} {each['model']}" for each in published) or "none"
        for name, published in scores.items()
    }


def test_keys_of_a_suite_replace_those_of_the_box(tmp_path: Path) -> None:
    own = read_used(tmp_path, use="arc", hub={"subset": "ARC-Easy"}, limit=3)
    box = read_used(tmp_path, use="arc")
    assert own.hub == HubSource("allenai/ai2_arc", "test", "ARC-Easy", box.hub and box.hub.revision)
    assert (own.limit, own.prompt, own.choices) == (3, box.prompt, box.choices)


def test_a_file_replaces_the_hub(tmp_path: Path) -> None:
    """And so do examples of one's own; those of the box stay otherwise."""
    task = read_used(tmp_path, use="mmlu", data="rows.jsonl")
    assert (task.data, task.hub) == ("rows.jsonl", None)
    assert task.few_shot is not None and task.few_shot.hub is not None
    task = read_used(tmp_path, use="mmlu", few_shot={"data": "dev.jsonl"})
    assert task.few_shot is not None and (task.few_shot.data, task.few_shot.hub) == ("dev.jsonl", None)
    assert (task.few_shot.count, task.few_shot.by) == (5, "subject") and task.hub is not None
    task = read_used(tmp_path, use="gsm8k", few_shot={"data": "train.jsonl"})
    assert task.few_shot is not None and task.few_shot.rows == ()


def test_mistakes_in_a_task_of_the_box_are_at_their_place(tmp_path: Path) -> None:
    path = write_suite(
        tmp_path, "models: {m: }\ntasks: {a: {use: arc, system: '{{ x }'}, b: {use: 3}, c: {use: mlu}}"
    )
    file = read_suite(path)
    assert [each.text.removeprefix(f"{path}:").partition(";")[0] for each in sorted(file.problems)] == [
        '2:51: tasks.b.use: 3 is not a string or null (write "3")',
        "2:64: tasks.c.use: there is no task 'mlu' (did you mean 'mmlu'?)",
    ]


def test_the_suite_of_the_command(tmp_path: Path) -> None:
    suite = build_suite("m", "org/m", ["arc", "mmlu"], {"mmlu": "/rows.csv"}, {"mmlu": "/dev.csv"})
    file = read(tmp_path, suite)
    file.raise_problems()
    assert file.suite.models["m"].set == {"model.path": "org/m"}
    mmlu = file.suite.tasks["mmlu"]
    assert mmlu.few_shot is not None
    assert (mmlu.data, mmlu.few_shot.data, mmlu.few_shot.hub) == ("/rows.csv", "/dev.csv", None)
    assert build_suite("m", None, ["arc"], {}, {}) == {"models": {"m": {}}, "tasks": {"arc": {"use": "arc"}}}
