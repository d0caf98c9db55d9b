"""The prefix of a body: what a prompt with another question shares, for each API."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from mlxrun.api.prepared import ApiContext
from mlxrun.api.prompt_prefix import PromptPrefix, guess_url, prepare_prefix
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.config.settings import Config
from mlxrun.core.errors import RequestError
from tests.helpers.served_model import WEATHER, make_image_part
from tests.helpers.tokenizers import FakeModelInfo

RULES = "\n".join(f"{n}. Read a file before you change it." for n in range(1, 9))
FUNCTION = WEATHER["function"]
QUESTION = "Why does the test fail?"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": RULES}, {"role": "user", "content": QUESTION}],
        "tools": [WEATHER],
        "n": 2,
        "stream": True,
        "logprobs": True,
    },
    "/v1/responses": {
        "instructions": RULES,
        "input": QUESTION,
        "tools": [{"type": "function", **FUNCTION}],
        "stream": True,
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 32_000,
        "system": [{"type": "text", "text": RULES}],
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}],
    },
}


async def find_prefix(body: dict[str, Any], url: str = "", vision: bool = False) -> PromptPrefix:
    config = Config()
    context = ApiContext(FakeModelInfo(vision=vision), config, MediaLoader(config.media, None))
    return await prepare_prefix(url or guess_url(body), body, context, "0" * 24)


def ask_again(body: dict[str, Any], question: str) -> dict[str, Any]:
    """The same body with another question of the user."""
    made = copy.deepcopy(body)
    if "input" in made:
        made["input"] = question
    else:
        made["messages"][-1]["content"] = question
    return made


@pytest.mark.parametrize("url", BODIES)
async def test_the_prefix_is_what_two_questions_share(url: str) -> None:
    """It has all rules and tools, nothing of the question, and one token of it to compute the last state."""
    assert guess_url(BODIES[url]) == url
    prefix = await find_prefix(BODIES[url])
    text = FakeModelInfo().tokenizer.decode(list(prefix.request.prompt[: prefix.tokens]))
    assert RULES in text and FUNCTION["name"] in text and "Why" not in text and text[-1] != "W"
    for question in ("Is there a plot?", "Why not?", "0", "Zq"):
        other = await find_prefix(ask_again(BODIES[url], question))
        assert other.request.prompt[: other.tokens] == prefix.request.prompt[: prefix.tokens]
    assert len(prefix.request.prompt) == prefix.tokens + 1


async def test_another_system_prompt_has_another_prefix() -> None:
    """The counterpart: prefixes are compared, and not only their lengths."""
    body = BODIES["/v1/messages"]
    first, other = (
        await find_prefix(body),
        await find_prefix({**body, "system": RULES.replace("Read", "Load")}),
    )
    assert first.tokens == other.tokens and first.request.prompt != other.request.prompt


async def test_a_prefix_asks_for_no_answer() -> None:
    """Whatever the body asks for: one request without tokens, grammar and logprobs."""
    body = {**BODIES["/v1/chat/completions"], "response_format": {"type": "json_object"}, "tools": []}
    prefix = await find_prefix(body)
    (request,) = prefix.prepared.requests
    assert (request.params.max_tokens, request.params.logprobs, request.grammar) == (0, None, None)
    assert not prefix.prepared.stream and prefix.prepared.n == 1 and not request.sparse


async def test_an_image_of_the_question_is_left_out() -> None:
    body = BODIES["/v1/chat/completions"]
    shown = copy.deepcopy(body)
    shown["messages"][-1]["content"] = [make_image_part(), {"type": "text", "text": QUESTION}]
    prefix = await find_prefix(shown, vision=True)
    assert prefix.request.media is None and prefix.request.image_spans == ()
    assert prefix.tokens == (await find_prefix(body)).tokens


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "x"}, "url: '/v1/completions' is not one of /v1/chat/completions,"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "no system prompt"),
    ("/v1/messages", {"max_tokens": 5, "messages": []}, "messages"),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
]


@pytest.mark.parametrize(("url", "body", "text"), BAD, ids=[row[0] for row in BAD])
async def test_what_cannot_be_prefilled_is_refused(url: str, body: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        await find_prefix(body, url)
