"""Files in place of their ids: images as base64, texts as texts, errors by the path of the id."""

from __future__ import annotations

import asyncio
import base64
import copy
from typing import Any

import pytest

from mlxrun.api.stored_files import FileContent, find_file_parts, inline_files
from mlxrun.core.errors import BodyTooLarge, NotFound, RequestError
from tests.helpers.anthropic_api import IMAGE, RED, USER, body, make, user

FILES = {
    "png": FileContent("image/png", base64.b64decode(RED)),
    "txt": FileContent("text/plain; charset=utf-8", b"\xef\xbb\xbfna\xc3\xafve"),
    "md": FileContent("text/markdown", b"# title"),
    "latin": FileContent("text/plain", b"na\xefve"),
    "pdf": FileContent("application/pdf", b"%PDF"),
    "bmp": FileContent("image/bmp", b"BM"),
}


def read_file(name: str, most: int) -> FileContent:
    if name not in FILES:
        raise NotFound(f"there is no file {name!r}")
    if len(FILES[name].data) > most:
        raise BodyTooLarge("too large")
    return FILES[name]


def source(kind: str, name: Any, **more: Any) -> dict[str, Any]:
    return {"type": kind, "source": {"type": "file", "file_id": name}, **more}


def inline(given: Any, most: int = 10**6) -> Any:
    before = copy.deepcopy(given)
    found = asyncio.run(inline_files(given, read_file, most))
    assert given == before, "the body of the client is not changed"
    return found


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "media_type": "text/plain", "data": value}


def test_the_same_as_sent_inline() -> None:
    """In messages and in the results of tools; the other fields of a block stay."""
    result = {"type": "tool_result", "tool_use_id": "t", "content": [source("image", "png")]}
    found = inline(
        body(
            user(
                result,
                source("document", "txt", title="T"),
                source("document", "md"),
                source("document", "pdf"),
            )
        )
    )
    blocks = found["messages"][0]["content"]
    assert blocks[0]["content"] == [IMAGE]
    assert blocks[1] == {"type": "document", "source": text("na\u00efve"), "title": "T"}
    assert blocks[2]["source"] == text("# title")
    assert blocks[3]["source"] == {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}
    assert find_file_parts(found) == []


def test_the_prompt_is_that_of_the_text() -> None:
    by_id = inline(body(user(source("document", "txt"))))
    sent = body(user({"type": "document", "source": text("na\u00efve")}))
    assert make(by_id).prepared.prompts == make(sent).prepared.prompts


@pytest.mark.parametrize(
    "given",
    [
        body(),
        None,
        [],
        {"messages": 3},
        {"messages": [3, {"content": [None, {"type": "image"}, {"type": "image", "source": "x"}]}]},
        body([USER, {"role": "user", "content": [IMAGE]}]),
    ],
)
def test_bodies_without_files(given: Any) -> None:
    """They are returned as they are, whatever they are."""
    assert find_file_parts(given) == []
    assert inline(given) is given


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (source("image", "none"), "file_id: there is no file 'none'"),
        (source("image", "txt"), "file_id: the file is 'text/plain', which is none of image/jpeg"),
        (source("image", "bmp"), "file_id: the file is 'image/bmp'"),
        (
            source("document", "png"),
            "file_id: not supported: the file is 'image/png', neither a PDF nor a text",
        ),
        (source("document", "latin"), "file_id: the file is not UTF-8 at byte 2"),
        (source("image", 3), "file_id: expected string, got integer"),
        (source("image", None), "file_id: expected string, got null"),
        ({"type": "image", "source": {"type": "file", "file_id": "png", "url": "x"}}, "url: Extra inputs"),
    ],
)
def test_refused_by_path(block: Any, message: str) -> None:
    for given, path in (
        (body(user(block)), "messages.0.content.0.source."),
        (
            body([USER, {"role": "user", "content": [{"type": "tool_result", "content": [IMAGE, block]}]}]),
            "messages.1.content.0.content.1.source.",
        ),
    ):
        with pytest.raises(RequestError) as caught:
            inline(given)
        assert str(caught.value).startswith(path + message)
        assert caught.value.param == path + message.split(":")[0]


def test_all_files_together_have_the_size_of_a_body() -> None:
    given, size = body(user(source("image", "png"), source("document", "md"))), len(FILES["png"].data)
    inline(given, size + 7)
    with pytest.raises(BodyTooLarge, match="messages.0.content.1.source.file_id: too large"):
        inline(given, size + 6)
