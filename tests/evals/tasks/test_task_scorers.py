"""The scorers of the box; test_standard_tasks.py compares them with lm-evaluation-harness."""

from __future__ import annotations

import pytest

from mlxrun.evals.tasks.task_scorers import score_docvqa, score_gsm8k


@pytest.mark.parametrize(
    ("answer", "expected", "scores"),
    [
        ("So 9 + 9. The answer is 18.\n", "18", (1, 1)),
        ("The answer is $1,018. ", "1018", (0, 1)),
        ("The answer is 1,018. ", "1018", (1, 1)),
        ("The answer is 18", "18", (0, 1)),
        ("The answer is 3. Or 18", "18", (0, 1)),
        ("eighteen", "18", (0, 0)),
    ],
)
def test_gsm8k(answer: str, expected: str, scores: tuple[int, int]) -> None:
    found = score_gsm8k(answer, expected)
    assert found["score"] == scores[0]
    assert found["scores"] == dict(zip(("strict-match", "flexible-extract"), scores, strict=True))


@pytest.mark.parametrize(
    ("answer", "expected", "score"),
    [
        (" Thirty  Days", ["x", "thirty days"], 1),
        ("thirty day", ["thirty days"], 10 / 11),
        ("kitten", ["sitting"], 4 / 7),
        ("abc", ["xyz", "abxy"], 0.5),
        ("abc", ["axyz"], 0),
        ("", ["a"], 0),
    ],
)
def test_docvqa(answer: str, expected: list[str], score: float) -> None:
    assert score_docvqa(answer, expected)["score"] == pytest.approx(score)
