"""`truncation: auto` drops as few items as necessary, and nothing else of a conversation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrun.api.responses.chat_messages import list_cuts, list_kept
from mlxrun.api.responses.stream import build_response
from mlxrun.config.settings import Config, ServerSettings
from mlxrun.core.errors import PromptTooLong
from tests.helpers.responses_api import TOOL_MODEL_INFO, refused, run
from tests.helpers.tokenizers import FakeModelInfo


def user(value: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": value}


def says(value: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": value}


def system(value: str) -> dict[str, Any]:
    return {"type": "message", "role": "system", "content": value}


def call(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"}


def result(name: str, value: str = "") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": value}


def list_prompts(items: list[dict[str, Any]]) -> list[list[int]]:
    """What stays, cut by cut."""
    return [list_kept(items, cut) for cut in list_cuts(items)]


def test_whole_turns_go_first_and_the_last_question_stays() -> None:
    items = [user("a"), says("b"), user("c"), says("d"), user("e")]
    assert list_prompts(items) == [[2, 3, 4], [4]]


def test_system_messages_stay() -> None:
    items = [system("s"), user("a"), says("b"), system("t"), user("c")]
    assert list_prompts(items)[-1] == [0, 3, 4]


def test_the_steps_of_the_last_turn_go_with_their_outputs() -> None:
    items = [user("a"), says("b"), user("c"), user("d"), call("1"), result("1"), call("2"), call("3")]
    items += [result("2"), result("3"), says("e")]
    assert list_prompts(items) == [
        list(range(2, 11)),
        [2, 3, 6, 7, 8, 9, 10],
        [2, 3, 10],
    ]


def test_an_output_goes_with_its_call_wherever_it_is() -> None:
    items = [user("a"), call("1"), user("b"), result("1"), says("c"), user("d")]
    assert list_prompts(items)[0] == [2, 4, 5]


def test_a_conversation_of_one_message_cannot_be_cut() -> None:
    assert list_cuts([user("a")]) == list_cuts([user("a"), says("b")]) == []


KINDS = st.sampled_from(["user", "assistant", "system", "call", "output"])


@given(st.lists(KINDS, max_size=14))
def test_every_cut_drops_more_and_leaves_what_a_template_can_render(kinds: list[str]) -> None:
    items: list[dict[str, Any]] = []
    for kind in kinds:
        open_calls = [item["call_id"] for item in items if item["type"] == "function_call"]
        done = [item["call_id"] for item in items if item["type"] == "function_call_output"]
        left = [name for name in open_calls if name not in done]
        if kind == "call":
            items.append(call(str(len(items))))
        elif kind == "output" and left:
            items.append(result(left[0]))
        elif kind != "output":
            items.append({"type": "message", "role": kind, "content": "x"})
    previous = list(range(len(items)))
    for kept in list_prompts(items):
        assert set(kept) < set(previous)
        previous = kept
        calls = {items[i]["call_id"] for i in kept if items[i]["type"] == "function_call"}
        outputs = {items[i]["call_id"] for i in kept if items[i]["type"] == "function_call_output"}
        assert outputs <= calls
        users = [i for i, item in enumerate(items) if item.get("role") == "user"]
        assert not users or users[-1] in kept
        assert all(i in kept for i, item in enumerate(items) if item.get("role") == "system")


LONG = [user("first " * 100), says("answer " * 100), user("second " * 300), says("fine"), user("last")]


@pytest.mark.parametrize(("most", "dropped"), [(4096, 0), (3000, 2), (200, 4)])
def test_a_prompt_is_that_of_the_rest(most: int, dropped: int) -> None:
    """As many items stay as fit, and the response says how many do not."""
    model_info = replace(FakeModelInfo(), context_length=most)
    body = {"instructions": "Be brief.", "truncation": "auto", "max_output_tokens": 5}
    what, prepared = run({"input": LONG, **body}, model_info)
    _, rest = run({"input": LONG[dropped:], **body}, model_info)
    assert prepared.requests[0].prompt == rest.requests[0].prompt
    assert len(what.context) == len(LONG)
    response = build_response("resp_1", 0, what, prepared)
    assert response["truncation"] == "auto" and response["mlxrun"]["dropped_items"] == dropped


def test_without_it_nothing_is_dropped() -> None:
    """The twin: the same body is refused, whether it says so or not."""
    model_info = replace(FakeModelInfo(), context_length=200)
    for body in ({}, {"truncation": "disabled"}):
        assert isinstance(refused(model_info, input=LONG, **body), PromptTooLong)


def test_what_never_fits_is_refused() -> None:
    error = refused(input=[user("a"), says("b"), user("x" * 5000)], truncation="auto")
    assert isinstance(error, PromptTooLong) and error.http_status == 400


def test_the_servers_limit_of_prompts_counts() -> None:
    config = Config(server=ServerSettings(max_prompt_tokens=200))
    what, prepared = run({"input": LONG, "truncation": "auto"}, FakeModelInfo(), config)
    assert what.num_dropped == 4 and prepared.prompt_tokens <= 200


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=2, max_size=8), st.integers(300, 1500))
def test_as_few_items_as_necessary(sizes: list[int], most: int) -> None:
    """One cut less would not fit."""
    items = [user("u" * size) if i % 2 == 0 else says("a" * size) for i, size in enumerate(sizes)]
    if len(items) % 2 == 0:
        items.append(user("end"))
    model_info = replace(TOOL_MODEL_INFO, context_length=most)
    try:
        what, _ = run({"input": items, "truncation": "auto"}, model_info)
    except PromptTooLong:
        assert isinstance(refused(model_info, input=items[-1:]), PromptTooLong)
        return
    if what.num_dropped:
        cuts = [0, *list_cuts(what.context)]
        before = items[cuts[cuts.index(what.num_dropped) - 1] :]
        assert isinstance(refused(model_info, input=before), PromptTooLong)


def test_a_prompt_that_fits_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxrun.api.responses import request

    bodies: list[Any] = []
    original = request.prepare_request

    async def prepare(url: str, body: Any, context: Any, **fields: Any) -> Any:
        bodies.append(body)
        return await original(url, body, context, **fields)

    monkeypatch.setattr(request, "prepare_request", prepare)
    run({"input": LONG, "truncation": "auto"}, FakeModelInfo())
    assert len(bodies) == 1
    many = [each for _ in range(64) for each in (user("q" * 100), says("a"))] + [user("end")]
    run({"input": many, "truncation": "auto"}, FakeModelInfo())
    assert len(bodies) <= 2 + 7, "a bisection"
