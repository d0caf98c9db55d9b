"""Tools in the system prompt, for templates that know none."""

from __future__ import annotations

from mlxrun.api.text.tools import describe_tools_in_prompt


def test_tools_are_described_if_the_template_knows_none() -> None:
    """A documented fallback. The system prompt has the functions; calls and results are written out."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "user", "content": "Sure?"},
    ]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    system, first, made, rest = describe_tools_in_prompt(turns, [tool])
    assert system["content"].startswith("Be brief.\n\nYou can call functions.")
    assert system["content"].endswith('{"name": "add", "parameters": {"type": "object"}}')
    assert first == turns[1] and made == {
        "role": "assistant",
        "content": '{"name": "add", "arguments": {"a": 1}}',
    }
    assert rest == {"role": "user", "content": "Result of add: 2\n\nSure?"}
    assert describe_tools_in_prompt(turns[:2], []) == turns[:2]
    both = {**turns[2], "content": "Well.", "tool_calls": [call, call]}
    assert describe_tools_in_prompt([both], [])[0]["content"].startswith('Well.\n[{"name": "add"')
    assert describe_tools_in_prompt(turns[1:2], [tool])[0]["role"] == "system"
    assert describe_tools_in_prompt(
        turns, [tool], ('{"name": "NAME", "arguments": ', "}")
    ) == describe_tools_in_prompt(turns, [tool])
    tagged, *same = describe_tools_in_prompt(turns, [tool], ("<call>NAME:", "</call>"), native=True)
    assert "<call>NAME:{...}</call>" in tagged["content"] and same == turns[1:]


def test_results_join_the_message_with_their_images() -> None:
    """Templates that insist on taking turns get one message of the user."""
    image = {"type": "image"}
    turns = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        {"role": "tool", "content": "2", "tool_call_id": "b"},
        {"role": "user", "content": [image, {"type": "text", "text": "so?"}]},
    ]
    first, call, last = describe_tools_in_prompt(turns, [])
    assert (first["content"], call["content"]) == ("look", '{"name": "f", "arguments": "{"}')
    results = {"type": "text", "text": "Result of the function: 1\n\nResult of the function: 2"}
    assert last == {"role": "user", "content": [results, image, {"type": "text", "text": "so?"}]}
    plain = [turns[0], turns[-1]]
    assert describe_tools_in_prompt(plain, []) == plain
