"""How programs and their tests are put together; test_standard_tasks.py compares it with the harness."""

from __future__ import annotations

import pytest

from tests.helpers.bubblewrap import find_problem

if problem := find_problem():  # an import of the scorers tries the sandbox
    pytest.skip(problem, allow_module_level=True)

from mlxrun.evals.tasks.code_scorers import score_humaneval, score_mbpp

HEAD = "def double(n):\n"
TEST = "def check(candidate):\n    assert candidate(2) == 4, 'two'\n"
ROW = {"prompt": HEAD, "test": TEST, "entry_point": "double"}


def test_humaneval() -> None:
    assert score_humaneval("    return n * 2", ROW) == {"score": True, "comment": None}
    assert score_humaneval("    return n", ROW) == {"score": False, "comment": "AssertionError: two"}


def test_mbpp() -> None:
    tests = ["assert double(2) == 4", "assert double(0) == 0"]
    assert score_mbpp(f"{HEAD}    return n * 2", tests) == {"score": True, "comment": None}
    assert score_mbpp(f"{HEAD}    return 4", tests)["score"] is False
