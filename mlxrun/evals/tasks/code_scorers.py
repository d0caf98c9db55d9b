"""Scores programs by running their tests, in a sandbox that this module checks when it is imported."""

from __future__ import annotations

from typing import Any

from mlxrun.evals.tasks.code_sandbox import check_sandbox, run_program

Json = dict[str, Any]

check_sandbox()


def score_humaneval(answer: str, expected: Json) -> Json:
    """Score the end of a function. `expected`: `prompt`, its beginning; `test`, which defines `check`; and
    `entry_point`, its name."""
    test = f"{expected['test']}\ncheck({expected['entry_point']})"
    return _score(f"{expected['prompt']}{answer}\n{test}")


def score_mbpp(answer: str, expected: list[str]) -> Json:
    """Score a program. `expected`: the assertions that it must fulfil."""
    return _score("\n".join([answer, *expected]))


def _score(program: str) -> Json:
    problem = run_program(program)
    return {"score": problem is None, "comment": problem}
