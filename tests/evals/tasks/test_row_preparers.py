"""Rows of the box that a template cannot make; test_standard_tasks.py compares the prompts."""

from __future__ import annotations

import pytest

from mlxrun.evals.tasks.row_preparers import prepare_hellaswag, prepare_mmmu, prepare_needle
from mlxrun.evals.tasks.task_box import read_task


def test_hellaswag() -> None:
    row = {
        "activity_label": "How to dig",
        "ctx_a": "[header] How to dig [title] Begin. [step] Take a spade.",
        "ctx_b": "then",
        "endings": ["[substeps] Rest.", "dig [title] On."],
    }
    found = prepare_hellaswag(row)
    assert found["query"] == "How to dig: How to dig. Begin. Take a spade. Then"
    assert found["choices"] == [" Rest.", "dig. On."]
    assert found["endings"] == row["endings"]


@pytest.mark.parametrize(("depth", "at"), [(0, 0), (0.5, 20), (1, 40)])
def test_needle(depth: float, at: int) -> None:
    found = prepare_needle({"lines": 40, "depth": depth})
    lines = found["context"].split("\n")
    assert len(lines) == 41 and len(set(lines)) == 2
    assert lines[at] == f"One of the special magic numbers for {found['key']} is: {found['number']}."
    assert len(found["number"]) == 7 and found == prepare_needle({"lines": 40, "depth": depth})


def test_each_needle_has_a_number_of_its_own() -> None:
    rows = read_task("needle").node.strip_origins()["rows"]
    assert len({prepare_needle(row)["number"] for row in rows}) == len(rows) == 44


def test_mmmu() -> None:
    """Images are those that the text names, in its order."""
    row = {
        "id": "validation_Art_Theory_12",
        "question": "Which is older, <image 2> or <image 1>?",
        "options": "['the first', '<image 2>']",
        "question_type": "multiple-choice",
        "image_1": "a.png",
        "image_2": "b.png",
    }
    found = prepare_mmmu(row)
    assert found["images"] == ["b.png", "a.png", "b.png"] and found["subject"] == "Art_Theory"
    assert found["text"].splitlines()[2:4] == ["(A) the first", "(B) <image 2>"]
    found = prepare_mmmu({**row, "question_type": "open", "options": "[]"})
    assert found["text"].endswith("\n\nAnswer the question using a single word or phrase.")
    assert found["images"] == ["b.png", "a.png"]
