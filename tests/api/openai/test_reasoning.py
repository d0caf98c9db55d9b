"""The reasoning fields of chat bodies, for templates with an effort, a switch, both or neither."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mlxrun.api.openai.fields import EFFORTS
from mlxrun.api.openai.reasoning import resolve_reasoning_fields
from mlxrun.api.parsers.registry import detect_formats
from mlxrun.config.settings import Config, ModelSettings, ParserSettings
from mlxrun.core.errors import RequestError
from tests.helpers.anthropic_api import context
from tests.helpers.openai_api import chat
from tests.helpers.tokenizers import CHATML, THINKING, FakeModelInfo

EFFORT = FakeModelInfo(chat_template=CHATML + "<{{ reasoning_effort }}>")
SWITCH = FakeModelInfo(chat_template=THINKING)
BOTH = FakeModelInfo(chat_template=THINKING + "<{{ reasoning_effort }}>")
NEITHER = FakeModelInfo()
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}


def resolve(model: FakeModelInfo, **given: Any) -> dict[str, Any]:
    return resolve_reasoning_fields(given, context(model)).get("chat_template_kwargs", {})


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    [
        (EFFORT, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        (EFFORT, {"reasoning_effort": "none"}, {"reasoning_effort": "none"}),
        (SWITCH, {"reasoning_effort": "none"}, OFF),
        (SWITCH, {"reasoning_effort": "low"}, ON),
        (BOTH, {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        (BOTH, {"reasoning_effort": "none"}, OFF),
        (NEITHER, {"reasoning_effort": "high"}, {}),
        (NEITHER, {"reasoning_effort": "none"}, {}),
        (EFFORT, {"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (SWITCH, {"reasoning": {"enabled": False}}, OFF),
        (SWITCH, {"enable_thinking": False}, OFF),
        (SWITCH, {"thinking": {"type": "disabled"}}, OFF),
        (SWITCH, {"thinking": {"type": "enabled"}}, ON),
        (SWITCH, {"thinking": {"type": "auto"}}, {}),
        (SWITCH, {"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, ON),
        (SWITCH, {"reasoning_effort": "none", "chat_template_kwargs": ON}, ON),
        (NEITHER, {"enable_thinking": False, "thinking": {"type": "enabled", "clear_thinking": True}}, {}),
    ],
)
def test_what_the_template_knows_is_set(
    model: FakeModelInfo, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert resolve(model, **given) == expected


@pytest.mark.parametrize("given", [lambda e: {"reasoning_effort": e}, lambda e: {"reasoning": {"effort": e}}])
@pytest.mark.parametrize("effort", ["off", "zz", "NONE", "", " "])
def test_an_unknown_effort_is_refused_where_it_would_only_count_as_on(given: Any, effort: str) -> None:
    """And where nothing would read it; a template's own variable takes any text but none."""
    path = "reasoning_effort" if "reasoning_effort" in given(effort) else "reasoning.effort"
    for model in (SWITCH, NEITHER):
        with pytest.raises(RequestError, match="is not one of none, minimal, low, .*, max") as caught:
            resolve(model, **given(effort))
        assert caught.value.param == path
    for model in (EFFORT, BOTH):
        if effort.strip():
            assert resolve(model, **given(effort)) == {"reasoning_effort": effort}
        else:
            with pytest.raises(RequestError, match="is empty") as caught:
                resolve(model, **given(effort))
            assert caught.value.param == path


@pytest.mark.parametrize("effort", EFFORTS)
def test_every_known_effort_is_accepted(effort: str) -> None:
    assert resolve(SWITCH, reasoning_effort=effort) == (OFF if effort == "none" else ON)
    assert resolve(EFFORT, reasoning_effort=effort) == {"reasoning_effort": effort}
    assert resolve(NEITHER, reasoning_effort=effort) == {}


def test_the_prompt_shows_it() -> None:
    """`none` is a request without reasoning where the template can do that, over the config's own choice."""
    on = Config(model=ModelSettings(chat_template_args={"enable_thinking": True}))
    silent = chat(SWITCH, on, reasoning_effort="none").prompts[0]
    assert silent == chat(SWITCH, chat_template_kwargs=OFF).prompts[0] != chat(SWITCH).prompts[0]
    assert chat(NEITHER, reasoning_effort="none").prompts == chat(NEITHER).prompts
    assert chat(EFFORT, reasoning_effort="low").prompts[0].endswith("<low>")


def test_cleared_reasoning() -> None:
    model = FakeModelInfo(chat_template=CHATML + "{{ clear_thinking }}")
    assert resolve(model, thinking={"type": "auto", "clear_thinking": False}) == {"clear_thinking": False}


@pytest.mark.parametrize(
    "given", [{"thinking": {"type": "enabled", "budget_tokens": 9}}, {"reasoning": {"max_tokens": 9}}]
)
def test_a_budget_needs_reasoning_that_can_be_parsed(given: dict[str, Any]) -> None:
    formats = detect_formats(THINKING + "<think>", SWITCH.tokenizer, ParserSettings())
    assert formats.reasoning is not None
    known = dataclasses.replace(context(SWITCH), formats=formats)
    assert resolve_reasoning_fields(given, known)["thinking_budget"] == 9
    assert resolve_reasoning_fields({**given, "thinking_budget": 5}, known)["thinking_budget"] == 5
    assert "thinking_budget" not in resolve_reasoning_fields(given, context(SWITCH))


def test_fields_are_checked() -> None:
    for given in (
        {"enable_thinking": "no"},
        {"thinking": {"type": "enabled", "budget": 1}},
        {"reasoning": "low"},
    ):
        with pytest.raises(RequestError):
            chat(SWITCH, **given)
