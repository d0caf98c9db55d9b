"""The text of a response body that is scored."""

from __future__ import annotations

from mlxrun.jobs.scoring.answer_text import extract_answer, extract_answers, is_cut


def test_answer_text() -> None:
    assert extract_answer({"choices": [{"message": {"content": "a"}}, {"message": {"content": "b"}}]}) == "a"
    assert extract_answer({"choices": [{"message": {"content": None}}]}) == ""
    assert extract_answer({"choices": [{"text": "c"}]}) == "c"
    function = {"name": "f", "arguments": '{"x": 1}'}
    with_call = {"message": {"content": "so", "tool_calls": [{"function": function}]}}
    assert extract_answer({"choices": [with_call]}) == 'so\n{"name": "f", "arguments": {"x": 1}}'
    parts = [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    items = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "content": parts},
        {"type": "function_call", "name": "f", "arguments": '{"x": '},
    ]
    assert extract_answer({"output": items}) == 'ab\n{"name": "f", "arguments": "{\\"x\\": "}'
    blocks = [
        {"type": "thinking", "thinking": "r"},
        {"type": "text", "text": "a"},
        {"type": "tool_use", "name": "f", "input": {"x": 1}},
    ]
    assert extract_answer({"type": "message", "content": blocks}) == 'a\n{"name": "f", "arguments": {"x": 1}}'
    assert extract_answer({"output": []}) == ""


def test_cut_answers() -> None:
    """The reason for the end, in the words of each API."""
    for cut, whole in (
        (
            {"choices": [{"text": "a", "finish_reason": "length"}]},
            {"choices": [{"text": "a", "finish_reason": "stop"}]},
        ),
        ({"output": [], "incomplete_details": {"reason": "max_output_tokens"}}, {"output": []}),
        ({"content": [], "stop_reason": "max_tokens"}, {"content": [], "stop_reason": "end_turn"}),
    ):
        assert is_cut(cut) and not is_cut(whole)
    assert not is_cut({"output": [], "incomplete_details": None})
    scored = {"choices": [{"text": "a", "finish_reason": "length"}], "usage": {"completion_tokens": 0}}
    assert not is_cut(scored) and is_cut({**scored, "usage": {"completion_tokens": 1}})


def test_the_text_of_each_choice() -> None:
    function = {"name": "f", "arguments": "{}"}
    choices = [
        {"message": {"content": "a"}},
        {"message": {"content": None, "tool_calls": [{"function": function}]}},
    ]
    assert extract_answers({"choices": choices}) == ["a", '{"name": "f", "arguments": {}}']
    assert extract_answers({"output": []}) == [""]
