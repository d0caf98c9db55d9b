"""What is accepted without effect changes nothing: the requests are those of the body without it."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from mlxrun.api.anthropic import fields as anthropic
from mlxrun.api.body_schema import BodySchema
from mlxrun.api.openai.fields import BODIES
from mlxrun.api.prepared import PreparedRequest
from mlxrun.api.responses.fields import BODY as RESPONSES
from mlxrun.api.text import ignored_fields
from tests.helpers import anthropic_api
from tests.helpers.field_examples import list_examples, set_field
from tests.helpers.openai_api import CHAT, COMPLETION, TOOL, make
from tests.helpers.tokenizers import TOOLS, FakeModelInfo

pytestmark = pytest.mark.thorough

MODEL_INFO = FakeModelInfo(chat_template=TOOLS)
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT_BODY = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ],
    "tools": [TOOL],
    "seed": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
}
COMPLETION_BODY = {"prompt": "hi", "seed": 1, "stream": True, "stream_options": {"include_usage": True}}
MESSAGES_BODY = anthropic_api.body(thinking={"type": "adaptive"}, stream=True)


def describe(prepared: PreparedRequest) -> dict[str, Any]:
    """Everything of a prepared request but its random ids."""
    fields = {field.name: getattr(prepared, field.name) for field in dataclasses.fields(prepared)}
    seed = fields["seed"] == 1
    fields["requests"] = [
        dataclasses.replace(r, id="", params=r.params if seed else dataclasses.replace(r.params, seed=0))
        for r in prepared.requests
    ]
    return fields if seed else fields | {"seed": 0}


def prepare(url: str, body: dict[str, Any]) -> dict[str, Any]:
    if url == anthropic.MESSAGES:
        return describe(anthropic_api.make(body, MODEL_INFO).prepared)
    return describe(make(url, body, MODEL_INFO, stream=True))


def list_cases(url: str, body: BodySchema) -> list[tuple[str, str, Any]]:
    fields = [*body.harmless.items(), *body.ignored.items()]
    return [(url, name, value) for name, (schema, _) in fields for value in list_examples(schema)]


BASES = {CHAT: CHAT_BODY, COMPLETION: COMPLETION_BODY, anthropic.MESSAGES: MESSAGES_BODY}
CASES = [
    *list_cases(CHAT, BODIES["chat"]),
    *list_cases(COMPLETION, BODIES["completion"]),
    *list_cases(anthropic.MESSAGES, anthropic.BODY),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_request_is_the_same(case: int) -> None:
    url, name, value = CASES[case]
    base = BASES[url]
    assert prepare(url, set_field(base, name, value)) == prepare(url, base)


@pytest.mark.parametrize(
    ("url", "field"),
    [
        *((CHAT, {name: 2}) for name in ("temperature", "top_k", "seed", "n", "max_tokens")),
        (CHAT, {"tool_choice": "none"}),
        (CHAT, {"stop": "x"}),
        (CHAT, {"stream_options": {}}),
        (COMPLETION, {"echo": True}),
        (anthropic.MESSAGES, {"temperature": 0.5}),
        (anthropic.MESSAGES, {"system": "x"}),
    ],
)
def test_another_field_shows(url: str, field: dict[str, Any]) -> None:
    """The twin of the test above: it sees what an honoured field changes."""
    base = BASES[url]
    assert prepare(url, {**base, **field}) != prepare(url, base)


@pytest.mark.parametrize("name", [*RESPONSES.harmless, *RESPONSES.ignored])
def test_fields_of_responses_are_dropped(name: str) -> None:
    """What is translated to a chat body does not have them."""
    schema, _ = {**RESPONSES.harmless, **RESPONSES.ignored}[name]
    for value in list_examples(schema):
        given = RESPONSES.check(set_field({"input": "hi"}, name, value))
        inner = name.partition(".")[2]
        assert inner not in given.get(name.partition(".")[0], {}) if inner else name not in RESPONSES.honoured


def test_it_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ignored_fields, "logged_fields", set())
    caplog.set_level(logging.INFO, logger="mlxrun.api.text.ignored_fields")
    for value in ("low", "high"):
        prepare(CHAT, {**CHAT_BODY, "verbosity": value, "metadata": {"a": value}})
    assert [record.getMessage() for record in caplog.records] == [
        "the field 'verbosity' is accepted and has no effect: a hint that no chat template has; ask for the "
        "length in the prompt",
        "the field 'metadata' is accepted and has no effect: a label of the request",
    ]
