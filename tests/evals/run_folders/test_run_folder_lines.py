"""What is read of a record, whatever the API that it answers."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.evals.run_folders.run_folder_lines import RunLine

CHAT = {"choices": [{"message": {"content": "42", "reasoning_content": "So"}, "finish_reason": "length"}]}
RESPONSE = {
    "output": [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "So"}]},
        {"type": "message", "content": [{"type": "output_text", "text": "42"}]},
    ],
    "status": "completed",
    "incomplete_details": None,
}
MESSAGE = {
    "content": [{"type": "thinking", "thinking": "So"}, {"type": "text", "text": "42"}],
    "stop_reason": "end_turn",
}


def make_line(body: dict[str, Any], **more: Any) -> RunLine:
    return RunLine("a", 1, None, {"response": {"body": body}, "error": None, **more})


@pytest.mark.parametrize(
    ("body", "finish"), [(CHAT, "length"), (RESPONSE, "completed"), (MESSAGE, "end_turn")]
)
def test_answer_and_reasoning_are_read_apart(body: dict[str, Any], finish: str) -> None:
    line = make_line(body)
    assert (line.answer, line.reasoning, line.finish) == ("42", "So", finish)
    assert (line.score, line.group, line.error) == (None, None, None)


def test_a_plain_completion_has_no_reasoning() -> None:
    line = make_line({"choices": [{"text": "42", "finish_reason": "stop"}]})
    assert (line.answer, line.reasoning, line.finish) == ("42", None, "stop")


@pytest.mark.parametrize("name", ["data", "results"])
def test_embeddings_and_scores_have_neither_reasoning_nor_a_reason_to_end(name: str) -> None:
    line = make_line({name: [{"index": 0}], "usage": {"prompt_tokens": 2}})
    assert (line.answer, line.reasoning, line.finish) == ('[{"index": 0}]', None, None)


def test_scores_may_be_fractions() -> None:
    line = make_line(CHAT, eval={"score": 0.25, "group": "sums"})
    assert (line.score, line.group) == (0.25, "sums")
    assert make_line(CHAT, eval={"score": None}).score is None
