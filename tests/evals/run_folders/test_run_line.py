"""What is read of a record, whatever the API that it answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxrun.evals.prompt_messages import PromptMessage, dump_text
from mlxrun.evals.run_folders.run_line import RunLine, list_turns
from mlxrun.jobs.lines.job_file import JobLine
from mlxrun.jobs.scoring.eval_spec import parse_eval
from tests.helpers.export_fakes import finish_rich_job

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


def make_line_with_question(body: dict[str, Any], wanted: Any = None, result: Any = None) -> RunLine:
    """A line that was answered with `yes`."""
    answer = {"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}
    record = {"custom_id": "a", "response": {"body": answer}, "error": None, "eval": result}
    spec = None if wanted is None else parse_eval(wanted, None)
    return RunLine("a", 1, JobLine(1, "a", "/v1/chat/completions", body, spec), record)


async def test_lines_of_every_kind(tmp_path: Path) -> None:
    lines = {line.id: line for line in (await finish_rich_job(tmp_path)).read_lines()}
    assert lines["right"].prompt == "say 7" and lines["right"].targets == ["say 7", "seven"]
    assert lines["right"].answers[0].startswith("say 7") and lines["right"].extracted == "say 7"
    assert lines["right"].generation == {"temperature": 0.5}
    assert len(lines["many"].answers) == 2 and lines["many"].metrics["pass@2"] == 1
    assert lines["letter"].options == ["one", "two"]
    assert lines["message"].prompt == "system: Be kind.\n\nuser: ho"
    assert lines["short"].tokens == (5, 3)
    assert (lines["long"].score, lines["long"].answers, lines["long"].response) == (0, [], {})
    assert lines["long"].error is not None and "LONG" in lines["long"].error
    assert (lines["free"].score, lines["free"].match, lines["free"].group) == (None, "none", None)
    assert (lines["line 11"].prompt, lines["line 11"].body) == ("", {})


async def test_options_with_their_logprobs(tmp_path: Path) -> None:
    lines = {line.id: line for line in (await finish_rich_job(tmp_path)).read_lines()}
    found = lines["pick"].option_logprobs
    assert [(context, text) for context, text, _ in found] == [("ab", " cd"), ("ab", " xyz")]
    assert lines["pick"].options == [" cd", " xyz"] and lines["pick"].prompt == "ab"
    likeliest = max(range(2), key=lambda at: found[at][2])
    assert likeliest == lines["pick"].eval["extracted"], "the logprobs are those that were compared"
    assert lines["right"].option_logprobs == [] == lines["long"].option_logprobs


def test_images_are_named_and_not_copied() -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": "images/a.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "text", "text": "What is it?"},
    ]
    line = make_line_with_question({"messages": [{"role": "user", "content": parts}]})
    assert line.prompt == "What is it?\n[image images/a.png]\n[image]"


@pytest.mark.parametrize(
    ("result", "targets"),
    [
        ({"expected": 42, "match": "number"}, ["42"]),
        ({"expected": [1, "2"], "match": "number"}, ["1", "2"]),
        ({"expected": [1, 2], "match": "json"}, ["[1, 2]"]),
        ({"expected": None, "match": "judge"}, []),
    ],
)
def test_targets_are_texts(result: dict[str, Any], targets: list[str]) -> None:
    """A list holds alternatives, unless it is the JSON value that is expected."""
    assert make_line_with_question({"messages": []}, result=result).targets == targets


def test_values_as_text() -> None:
    assert [dump_text(each) for each in ("a", 1, {"b": "ü"}, True)] == ["a", "1", '{"b": "ü"}', "true"]


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TRANSCRIPT = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "reasoning_content": "I add.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]


def test_calls_reasoning_and_results() -> None:
    user, called, result, last = list_turns(TRANSCRIPT)
    assert user.message == PromptMessage("user", "1 + 2?") and user.calls == [] and user.tool == ""
    assert (called.message.text, called.reasoning) == ("", "I add.")
    assert called.calls == [("add", '{"a": 1}')]
    assert (result.message.text, result.tool) == ("3", "add")
    assert last.message.text == "It is 3."


@pytest.mark.parametrize(
    ("found", "texts"),
    [
        (None, []),
        ("text", []),
        (["text", 1, None], ["text", "1", ""]),
        ([{"role": "assistant", "tool_calls": "no list"}], [""]),
        ([{"role": ["x"], "content": {"a": 1}}], ['{"a": 1}']),
        ([{"role": "user", "content": "a", "left": 3}], ["a\nleft: 3"]),
    ],
)
def test_what_is_no_transcript(found: Any, texts: list[str]) -> None:
    assert [turn.message.text for turn in list_turns(found)] == texts


@pytest.mark.parametrize("call", ["text", {"function": "text"}, {"function": {}}, None])
def test_a_call_of_another_form_is_shown_as_it_is(call: Any) -> None:
    (turn,) = list_turns([{"role": "assistant", "tool_calls": [call]}])
    assert turn.calls[0][0] == "" and len(turn.calls[0][1]) > 0
