"""File ids in bodies of OpenAI's APIs: what is in the file takes their place; errors name the id."""

from __future__ import annotations

import asyncio
import base64
import copy
from typing import Any

import pytest

from mlxrun.api.stored_files import FileContent, find_file_parts, inline_files, read_content
from mlxrun.core.errors import BodyTooLarge, NotFound, RequestError
from tests.helpers.pdf_files import make_pdf, pdf_url

PDF = make_pdf("red")
FILES = {
    "pdf": FileContent("Application/PDF; a=b", PDF),
    "untyped": FileContent("application/octet-stream", PDF),
    "zip": FileContent("application/octet-stream", b"PK"),
    "txt": FileContent("text/plain", b"x"),
    "png": FileContent("application/octet-stream", b"\x89PNG rest"),
    "memo": FileContent("audio/mp4", b"\0\0\0\x18ftypM4A rest"),
    "odd": FileContent("Image/X-Odd", b"?"),
    "film": FileContent("application/octet-stream", b"\0\0\0\x18ftypisom..hdlr\0\0\0\0\0\0\0\0vide"),
}


def read_file(name: str, most: int) -> FileContent:
    if name not in FILES:
        raise NotFound(f"there is no file {name!r}")
    if len(FILES[name].data) > most:
        raise BodyTooLarge("too large")
    return FILES[name]


def inline(body: Any, most: int = 10**6) -> Any:
    before = copy.deepcopy(body)
    found = asyncio.run(inline_files(body, read_file, most))
    assert body == before, "the body of the client is not changed"
    return found


def chat(*files: Any, field: str = "content") -> Any:
    parts = [{"type": "text", "text": "a"}, *({"type": "file", "file": file} for file in files)]
    return {"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", field: parts}]}


def response(*parts: Any, field: str = "content") -> Any:
    """The type of a part is input_file unless it says another."""
    return {"input": [{"role": "user", field: [{"type": "input_file", **part} for part in parts]}]}


def test_as_if_sent_inline() -> None:
    """In chats and responses, in results of tools too; other fields and other parts stay."""
    sent = {"file_data": pdf_url(PDF)}
    assert inline(chat({"file_id": "untyped"}, {"file_data": "x"}, {"file_id": "pdf", "filename": "n"})) == (
        chat(sent, {"file_data": "x"}, {**sent, "filename": "n"})
    )
    for field in ("content", "output"):
        given = response({"file_id": "pdf"}, {"file_id": "pdf", "filename": "n"}, field=field)
        assert inline(given) == response(sent, {**sent, "filename": "n"}, field=field)


def url_of(name: str, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(FILES[name].data).decode()}"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("png", {"type": "image_url", "image_url": {"url": url_of("png", "image/octet-stream")}}),
        ("odd", {"type": "image_url", "image_url": {"url": url_of("odd", "image/x-odd")}}),
        ("memo", {"type": "audio_url", "audio_url": {"url": url_of("memo", "audio/mp4")}}),
        ("film", {"type": "video_url", "video_url": {"url": url_of("film", "video/octet-stream")}}),
    ],
)
def test_the_content_says_what_a_file_is(name: str, part: Any) -> None:
    """Else its media type does. The names of other fields of the part are not those of the new one."""
    found = inline(chat({"file_id": name, "filename": "a.bin"}))
    assert found["messages"][1]["content"][1] == part


def test_files_of_responses_become_the_parts_of_their_kind() -> None:
    image = {"type": "input_image", "image_url": url_of("png", "image/octet-stream")}
    given = response(
        {"file_id": "png", "filename": "n"}, {"type": "input_image", "file_id": "png", "detail": "low"}
    )
    assert inline(given) == response(image, {**image, "detail": "low"})
    data = url_of("memo", "").partition(",")[2]
    audio = {"type": "input_audio", "input_audio": {"data": data, "format": "mp4"}}
    assert inline(response({"file_id": "memo"})) == response(audio)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"file_id": "film"}, "the file is 'application/octet-stream'; read are PDFs, images, audio"),
        ({"type": "input_image", "file_id": "pdf"}, "the file is 'application/pdf'; read are images"),
        ({"type": "input_image", "file_id": "png", "image_url": "x"}, "not together with image_url"),
    ],
)
def test_what_responses_do_not_take_is_refused(part: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        inline(response(part))
    assert str(caught.value).endswith(message) and caught.value.param == "input[0].content[0].file_id"


@pytest.mark.parametrize(
    "body",
    [
        *(None, [], "x", {}, {"messages": 3, "input": "x"}, {"messages": [3, {}, {"content": 3}]}),
        {"messages": [{"content": [None, {}, {"type": "file"}, {"type": "file", "file": 3}]}]},
        {"messages": [{"content": [{"type": "file", "file": {"file_id": None}}, {"file_id": "pdf"}]}]},
        chat({"file_data": "x"}),
    ],
)
def test_bodies_without_ids(body: Any) -> None:
    assert not find_file_parts(body) and inline(body) is body


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"file_id": "none"}, "there is no file 'none'"),
        ({"file_id": "txt"}, "not supported: the file is 'text/plain'; read are PDFs, images, audio"),
        ({"file_id": "zip"}, "not supported: the file is 'application/octet-stream'; read are PDFs, images"),
        ({"file_id": 3}, "expected string, got integer"),
    ],
)
def test_refused_by_path(file: Any, message: str) -> None:
    for body, path in (
        (chat({"file_data": "x"}, file), "messages[1].content[2].file.file_id"),
        (response({"file_data": "x"}, file, field="output"), "input[0].output[1].file_id"),
    ):
        assert find_file_parts(body)
        with pytest.raises(RequestError) as caught:
            inline(body)
        assert str(caught.value).startswith(f"{path}: {message}") and caught.value.param == path


def test_all_files_together_have_the_size_of_a_body() -> None:
    body = chat({"file_id": "pdf"}, {"file_id": "pdf"})
    inline(body, 2 * len(PDF))
    with pytest.raises(BodyTooLarge, match=r"messages\[1\].content\[2\].file.file_id: too large"):
        inline(body, 2 * len(PDF) - 1)


async def test_one_file() -> None:
    found = await read_content("pdf", "p", read_file, 10**6)
    assert (found.data, found.plain_type) == (PDF, "application/pdf")


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (chat({"file_id": "pdf", "file_data": "x"}), "messages[1].content[1].file.file_id"),
        (response({"file_id": "pdf", "file_url": "http://x/a.pdf"}), "input[0].content[0].file_id"),
    ],
)
def test_two_files_in_one_part(body: Any, where: str) -> None:
    """Neither is chosen silently."""
    with pytest.raises(RequestError, match="not together with file_") as caught:
        inline(body)
    assert caught.value.param == where
