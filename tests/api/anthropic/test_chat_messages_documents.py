"""Documents and search results in /v1/messages are text in the prompt, in the form of docs/clients.md. What
cannot be read is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from mlxrun.api.anthropic.fields import BODY, build_schema
from mlxrun.api.anthropic.typed_tools import TYPED_SCHEMA
from mlxrun.config.settings import Config, ServerSettings
from tests.helpers.anthropic_api import (
    CALLED,
    EYES,
    IMAGE,
    MODEL_INFO,
    RESULT,
    TOOL_MODEL_INFO,
    Json,
    body,
    count,
    make,
    prompt,
    refused,
    text,
    user,
)
from tests.helpers.pdf_files import RGB, make_pdf, pdf_url
from tests.helpers.tokenizers import FakeModelInfo


def encode(*colours: str) -> str:
    return pdf_url(make_pdf(*colours)).partition(",")[2]


PDF = {"type": "base64", "media_type": "application/pdf", "data": encode("red", "blue")}
PLAIN = {"type": "text", "media_type": "text/plain", "data": "One.\nTwo."}
BLOCKS = {"type": "content", "content": [text("One."), text("Two.", cache_control={"type": "ephemeral"})]}
SHOWN = (
    "<document>\n<title>Numbers</title>\n<context>a list</context>\n"
    "<content>\nOne.\nTwo.\n</content>\n</document>"
)


def doc(source: Any, **more: Any) -> Json:
    return {"type": "document", "source": source, **more}


def found(**more: Any) -> Json:
    result = {"type": "search_result", "source": "https://x.org", "title": "X", "content": [text("One.")]}
    return {**result, **more}


def turn(*blocks: Any, model_info: FakeModelInfo = MODEL_INFO) -> str:
    """What stands in the user's message."""
    return prompt(body(user(*blocks)), model_info).split("<|im_start|>user\n")[1].split("<|im_end|>")[0]


@pytest.mark.parametrize("source", [PLAIN, BLOCKS, {"type": "content", "content": "One.\nTwo."}])
def test_a_document_is_text(source: Json) -> None:
    """Title and context before it, each if it is there; neighbours in their order."""
    whole = doc(source, title="Numbers", context="a list", citations={"enabled": False})
    assert turn(whole, text("Count.")) == SHOWN + "\nCount."
    assert turn(text("Count."), whole) == "Count.\n" + SHOWN
    bare = "<document>\n<content>\nOne.\nTwo.\n</content>\n</document>"
    assert turn(doc(source), text("?")) == bare + "\n?"
    assert turn(doc(source, title=None, context="", cache_control={"type": "ephemeral"}), text("?")) == (
        bare + "\n?"
    )


def test_a_search_result_is_text() -> None:
    shown = (
        "<search_result>\n<title>X</title>\n<source>https://x.org</source>\n"
        "<content>\nOne.\n</content>\n</search_result>"
    )
    assert turn(found(), text("?")) == shown + "\n?"


def test_in_results_and_beside_images() -> None:
    """A tool may give them; count_tokens counts what is computed."""
    turns = [*CALLED, *user({**RESULT, "content": [doc(PLAIN), found()]})]
    made = prompt(body(turns), TOOL_MODEL_INFO)
    assert "<|im_start|>tool\n<document>\n<content>" in made and "</search_result><|im_end|>" in made
    whole = user(doc(PLAIN, title="Numbers", context="a list"), IMAGE, text("?"))
    assert SHOWN in prompt(body(whole), EYES)
    more = count({"model": "m", "messages": user(doc(PLAIN, title="T"), text("?"))})
    assert more == count({"model": "m", "messages": user(doc(PLAIN), text("?"))}) + len("<title>T</title>\n")


def test_a_pdf_is_its_pages() -> None:
    """In messages and results; between its title and context, if it has them."""
    page = "<|vision_start|><|image_pad|><|vision_end|>"
    found = make(body(user(text("a"), doc(PDF), text("b"))), EYES).prepared
    assert f"a{page * 2}b" in found.prompts[0]
    assert found.requests[0].media == (RGB["red"], RGB["blue"])
    titled = turn(doc(PDF, title="T", context="C"), text("?"), model_info=EYES)
    assert titled == (
        f"<document>\n<title>T</title>\n<context>C</context>\n<content>\n{page * 2}\n</content>\n</document>?"
    )
    result = make(body([*CALLED, *user({**RESULT, "content": [doc(PDF), IMAGE]})]), EYES).prepared
    assert result.requests[0].media == (RGB["red"], RGB["blue"], RGB["red"])
    swapped = make(body(user(doc({**PDF, "data": encode("blue", "red")}), text("?"))), EYES).prepared
    assert swapped.requests[0].media == (RGB["blue"], RGB["red"])


AT = "messages.0.content.0"
REFUSED: list[tuple[Json, str, str]] = [
    (doc({**PDF, "data": "JVBERg=="}), f"{AT}.source.data", "not a readable PDF"),
    (doc({**PDF, "media_type": "text/plain"}), f"{AT}.source.media_type", "application/pdf"),
    (doc({"type": "base64", "media_type": "application/pdf"}), f"{AT}.source.data", "Field required"),
    (doc({"type": "url", "url": "https://x.org/a.pdf"}), f"{AT}.source.url", "not fetched"),
    (doc({"type": "url", "url": "a.pdf"}), f"{AT}.source.url", "does not match"),
    (doc({"type": "file", "file_id": "f"}), f"{AT}.source.type", "not supported"),
    (doc({"type": "txt"}), f"{AT}.source.type", "'txt' is not one of base64, url, text, content"),
    (doc({}), f"{AT}.source.type", "Field required"),
    (doc({**PLAIN, "media_type": "text/html"}), f"{AT}.source.media_type", "text/plain"),
    (doc({"type": "text", "media_type": "text/plain"}), f"{AT}.source.data", "Field required"),
    (doc({"type": "content", "content": [IMAGE]}), f"{AT}.source.content.0.type", "not in documents"),
    (doc({"type": "content", "content": [1]}), f"{AT}.source.content.0", "expected object"),
    (doc(PLAIN, citations={"enabled": True}), f"{AT}.citations.enabled", "only false"),
    (doc(PLAIN, citations={"on": True}), f"{AT}.citations.on", "Extra inputs"),
    (doc(PLAIN, title=1), f"{AT}.title", "expected string"),
    (doc(PLAIN, title="\ud800"), AT, "surrogate"),
    (found(citations={"enabled": True}), f"{AT}.citations.enabled", "only false"),
    (found(content="x"), f"{AT}.content", "expected array"),
    (found(content=[IMAGE]), f"{AT}.content.0.type", "not in search results"),
    ({"type": "search_result", "source": "x", "title": "y"}, f"{AT}.content", "Field required"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_is_not_read_is_refused(case: int) -> None:
    block, param, words = REFUSED[case]
    error = refused(body(user(block, text("?"))), EYES)
    assert error.param == param and words in str(error)


def test_unknown_fields_are_refused_if_strict() -> None:
    strict = Config(server=ServerSettings(strict_fields=True))
    assert refused(body(user(doc(PLAIN, pages=1))), EYES, strict).param == f"{AT}.pages"
    assert prompt(body(user(doc(PLAIN, pages=1))), EYES) == prompt(body(user(doc(PLAIN))), EYES)


def test_only_where_they_belong() -> None:
    assert refused(body(system=[doc(PLAIN)])).param == "system.0.type"
    answer = [*user(text("a")), {"role": "assistant", "content": [doc(PLAIN)]}, *user(text("b"))]
    assert refused(body(answer)).param == "messages.1.content.0.type"


def test_the_document_of_the_body_says_the_same() -> None:
    """/openapi.json has the blocks, and refuses what they do not hold."""
    checks = Draft202012Validator(build_schema(BODY, TYPED_SCHEMA))
    assert checks.is_valid(body(user(doc(PLAIN, title="T"), doc(BLOCKS), found())))
    for block in (
        doc({"type": "url", "url": "x"}),
        doc(PLAIN, citations={"enabled": True}),
        found(content="x"),
    ):
        assert not checks.is_valid(body(user(block)))
