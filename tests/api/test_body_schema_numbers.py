"""Numbers in bodies of every surface: 2.0 is 2 where an integer belongs; others are honoured or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from mlxrun.api.anthropic import fields as anthropic
from mlxrun.api.anthropic.fields import build_schema
from mlxrun.api.anthropic.typed_tools import TYPED_SCHEMA
from mlxrun.api.body_schema import Schema, convert_integers
from mlxrun.api.openai.fields import BODIES, TOKENIZE
from mlxrun.api.openai.request import prepare_request
from mlxrun.api.responses.fields import BODY as RESPONSES
from mlxrun.api.responses.request import ResponseLookup, read_response_request
from mlxrun.config.settings import Config, SchedulerSettings
from mlxrun.core.errors import RequestError
from tests.api.test_body_schema_ignored import CHAT_BODY, COMPLETION_BODY, describe
from tests.helpers import anthropic_api
from tests.helpers.openai_api import CHAT, COMPLETION, make
from tests.helpers.tokenizers import TOOLS, FakeModelInfo

pytestmark = pytest.mark.thorough

MODEL_INFO = FakeModelInfo(chat_template=TOOLS)
CONFIG = Config(scheduler=SchedulerSettings(policy="priority"))
WRONG: tuple[Any, ...] = (
    *(0, 0.0, -0.0, 1, 1.0, 2.0, 1.5, -1, -1.0, -1.5, 1e300, -1e300, 1e-300, 2**31, 2**63, -(2**63), 2.0**64),
    *(
        10**40,
        -(10**40),
        float("nan"),
        float("inf"),
        float("-inf"),
        True,
        False,
        "2",
        "2.0",
        "",
        [],
        [2.0],
        {},
    ),
)
Path = tuple[str | int, ...]


def find_numbers(schema: Schema, path: Path = ()) -> Iterator[Path]:
    """The paths of numbers that a schema of a body describes; 0 stands for an entry of an array."""
    kinds = schema.get("type", ())
    if "integer" in kinds or "number" in kinds:
        yield path
    for name, inner in schema.get("properties", {}).items():
        yield from find_numbers(inner, (*path, name))
    for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from find_numbers(inner, path)
    if isinstance(schema.get("items"), dict):
        yield from find_numbers(schema["items"], (*path, 0))
    if isinstance(schema.get("additionalProperties"), dict):
        yield from find_numbers(schema["additionalProperties"], (*path, "65"))


# What fields need beside them.
BESIDE: dict[str, Any] = {
    "top_logprobs": {"logprobs": True},
    "thinking": {"type": "enabled"},
    "tools": {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
}
# Numbers deeper in a body than its schema goes.
MORE: dict[str, list[Path]] = {
    CHAT: [
        *(
            ("response_format", "json_schema", "schema", "properties", "a", key)
            for key in ("minLength", "maxLength")
        ),
        *(
            ("response_format", "json_schema", "schema", "properties", "b", key)
            for key in ("minimum", "maximum")
        ),
        *(
            ("response_format", "json_schema", "schema", "properties", "c", key)
            for key in ("minItems", "maxItems")
        ),
        ("chat_template_kwargs", "thinking_budget"),
    ],
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "x",
        "schema": {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "array"}},
        },
    },
}


def build(base: Any, path: Path, value: Any) -> Any:
    """A copy of the body with a value at the path."""
    if not path:
        return value
    key, *rest = path
    if key == 0:
        return [build(base[0] if isinstance(base, list) and base else {}, tuple(rest), value)]
    inner = base.get(key, {}) if isinstance(base, dict) else {}
    return {**(base if isinstance(base, dict) else {}), key: build(inner, tuple(rest), value)}


def prepare(url: str, path: Path, value: Any) -> str:
    """The prepared request in words, with the types of its numbers."""
    head = str(path[0])
    if url == RESPONSES_URL:
        base: dict[str, Any] = {"input": "hi", "seed": 1}
    else:
        base = {CHAT: CHAT_BODY, COMPLETION: COMPLETION_BODY}.get(url, anthropic_api.body())
    if head == "response_format":
        base = {**base, "response_format": FORMAT}
    if head == "top_logprobs" and url == CHAT:
        base = {**base, **BESIDE[head]}
    if head in ("thinking", "tools") and url in (CHAT, anthropic.MESSAGES):
        base = {**base, head: BESIDE[head] if head == "thinking" else [BESIDE[head]], "max_tokens": 3000}
    body = build(base, path, value)
    if url == anthropic.MESSAGES:
        return repr(describe(anthropic_api.make(body, MODEL_INFO, CONFIG).prepared))
    if url == RESPONSES_URL:
        chat = read_response_request(body, MODEL_INFO, ResponseLookup(), "t").chat
        return repr(describe(make(CHAT, chat, MODEL_INFO, CONFIG, stream=True)))
    return repr(describe(make(url, body, MODEL_INFO, CONFIG, stream=True)))


RESPONSES_URL = "/v1/responses"
SCHEMAS = {
    CHAT: BODIES["chat"].schema,
    COMPLETION: BODIES["completion"].schema,
    RESPONSES_URL: RESPONSES.schema,
    anthropic.MESSAGES: build_schema(anthropic.BODY, TYPED_SCHEMA),
}
NUMBERS = [
    (url, path) for url, schema in SCHEMAS.items() for path in [*find_numbers(schema), *MORE.get(url, ())]
]


def test_the_numbers_of_every_surface_are_found() -> None:
    """Also those within objects and arrays."""
    found = {(url, ".".join(map(str, path))) for url, path in NUMBERS}
    assert len(found) > 60
    assert found >= {
        (CHAT, "stop_token_ids.0"),
        (CHAT, "logit_bias.65"),
        (CHAT, "thinking.budget_tokens"),
        (COMPLETION, "logprobs"),
        (anthropic.MESSAGES, "max_tokens"),
        (anthropic.MESSAGES, "thinking.budget_tokens"),
        (anthropic.MESSAGES, "tools.0.max_characters"),
        (RESPONSES_URL, "max_output_tokens"),
    }


@pytest.mark.parametrize(("url", "path"), NUMBERS, ids=lambda part: str(part))
def test_any_number_is_honoured_or_refused(url: str, path: Path) -> None:
    """Never another error; the float twin of an integer is the same request."""
    for value in WRONG:
        try:
            prepare(url, path, value)
        except RequestError as error:
            assert error.http_status == 400 and error.param is not None, (value, error)
    for number in (1, 2, 1500):
        try:
            expected = prepare(url, path, number)
        except RequestError as error:
            with pytest.raises(RequestError) as caught:
                prepare(url, path, float(number))
            assert caught.value.param == error.param
        else:
            assert prepare(url, path, float(number)) == expected


@pytest.mark.parametrize(
    "prompt", [[2.0], [[2.0]], [1, 2.0], [True], [1e300], [float("nan")], [10**40], [-1]]
)
def test_token_ids_are_integers(prompt: Any) -> None:
    assert prepare(COMPLETION, ("prompt",), [1, 2])
    with pytest.raises(RequestError) as caught:
        prepare(COMPLETION, ("prompt",), prompt)
    assert str(caught.value.param).startswith("prompt[")


def test_a_float_that_stays_is_seen() -> None:
    """The twin: requests that differ in the type of a number only are told apart."""
    one, other = prepare(CHAT, ("max_tokens",), 2), prepare(CHAT, ("temperature",), 2)
    assert one != other
    assert repr({"max_tokens": 2}) != repr({"max_tokens": 2.0})


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "integer"}, 2.0, 2),
        ({"type": "number"}, 2.0, 2.0),
        ({"type": ["integer", "null"]}, 1e300, int(1e300)),
        ({"type": ["integer", "number"]}, 2.0, 2.0),
        ({"type": "array", "items": {"type": "integer"}}, [1.0, 2], [1, 2]),
        ({"properties": {"a": {"type": "integer"}}}, {"a": 1.0, "b": 1.0}, {"a": 1, "b": 1.0}),
        ({"additionalProperties": {"type": "integer"}}, {"a": 1.0}, {"a": 1}),
        ({"properties": {"a": {}}, "additionalProperties": False}, {"a": 1.0}, {"a": 1.0}),
        ({}, {"a": [1.0]}, {"a": [1.0]}),
    ],
)
def test_integers_of_a_schema(schema: Schema, value: Any, expected: Any) -> None:
    assert repr(convert_integers(value, schema)) == repr(expected)


def test_lines_of_jobs_and_token_counts() -> None:
    """They go the same way: /tokenize, count_tokens, and the lines of jobs, which do not stream."""

    async def run(body: dict[str, Any]) -> Any:
        context = anthropic_api.context(MODEL_INFO, CONFIG)
        return await prepare_request(CHAT, body, context, default_max_tokens=9)

    line = {"messages": CHAT_BODY["messages"], "seed": 3}
    one, other = (asyncio.run(run({**line, "n": n, "max_tokens": 2 * n})) for n in (2, 2.0))
    assert repr(describe(one)) == repr(describe(other))
    assert TOKENIZE.check({"prompt": "x", "add_special_tokens": True})
    count = {"model": "m", "messages": [anthropic_api.USER]}
    thinking = {"type": "enabled", "budget_tokens": 2000.0}
    assert anthropic_api.count({**count, "thinking": thinking}, MODEL_INFO) > 3
