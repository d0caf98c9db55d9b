"""Rows of the box that a template cannot make; test_standard_tasks.py compares the prompts."""

from __future__ import annotations

from mlxrun.evals.tasks.row_preparers import prepare_hellaswag


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
