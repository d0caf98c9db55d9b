"""PDFs and videos by OpenAI's and Anthropic's own clients: the embedded model sees pages and frames."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.clients.test_anthropic_batches import run_with_engine
from tests.helpers.pdf_files import RGB, make_pdf, pdf_url
from tests.helpers.video_files import make_video, video_url

ASK = "What colour is the circle?"
COLOURS = ("red", "blue", "green")


def circle(*colours: str) -> bytes:
    return make_pdf(*colours, size=(48, 48), circles=True)


def ask_chat(client: OpenAI, data: bytes) -> tuple[str, int]:
    file: Any = {"type": "file", "file": {"file_data": pdf_url(data), "filename": "circle.pdf"}}
    content: Any = [file, {"type": "text", "text": ASK}]
    found = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": content}], temperature=0, max_tokens=16
    )
    assert found.usage is not None
    return found.choices[0].message.content or "", found.usage.prompt_tokens


def ask_responses(client: OpenAI, data: bytes) -> tuple[str, int]:
    file: Any = {"type": "input_file", "file_data": pdf_url(data), "filename": "circle.pdf"}
    content: Any = [file, {"type": "input_text", "text": ASK}]
    found = client.responses.create(
        model="m", input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=64
    )
    assert found.usage is not None
    items = client.responses.input_items.list(found.id).data
    assert items[0].content[0].model_dump()["filename"] == "circle.pdf"  # type: ignore[union-attr]
    return found.output_text, found.usage.input_tokens


def ask_messages(client: Anthropic, data: bytes) -> tuple[str, int]:
    source = {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(data).decode()}
    content: Any = [{"type": "document", "source": source}, {"type": "text", "text": ASK}]
    messages: Any = [{"role": "user", "content": content}]
    found = client.messages.create(model="m", max_tokens=64, messages=messages, extra_body={"temperature": 0})
    counted = client.messages.count_tokens(model="m", messages=messages).input_tokens
    assert counted == found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0)
    return "".join(block.text for block in found.content if block.type == "text"), counted


def test_pages_are_seen(openai_client: OpenAI, anthropic_client: Anthropic) -> None:
    """On every API; a page more is as many tokens more as an image has."""
    for colour in COLOURS:
        assert colour in ask_chat(openai_client, circle(colour))[0]
        assert colour in ask_responses(openai_client, circle(colour))[0]
        assert colour in ask_messages(anthropic_client, circle(colour))[0]
    counts = [ask_chat(openai_client, circle(*COLOURS[:pages]))[1] for pages in (1, 2, 3)]
    assert counts[0] < counts[1] < counts[2] and counts[2] - counts[1] == counts[1] - counts[0]


def ask_videos(openai_client: OpenAI, anthropic_client: Anthropic, data: bytes) -> tuple[list[str], set[int]]:
    """Answers and numbers of prompt tokens of both clients."""
    ask: Any = {"type": "text", "text": ASK}
    content: Any = [{"type": "video_url", "video_url": {"url": video_url(data)}}, ask]
    chat = openai_client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": content}], temperature=0, max_tokens=8
    )
    source = {"type": "base64", "media_type": "video/mp4", "data": base64.b64encode(data).decode()}
    messages: Any = [{"role": "user", "content": [{"type": "video", "source": source}, ask]}]
    found = anthropic_client.messages.create(
        model="m", max_tokens=8, messages=messages, extra_body={"temperature": 0}
    )
    counted = anthropic_client.messages.count_tokens(model="m", messages=messages).input_tokens
    assert chat.usage is not None
    text = "".join(block.text for block in found.content if block.type == "text")
    return [chat.choices[0].message.content or "", text], {chat.usage.prompt_tokens, counted}


def test_videos_are_seen(openai_client: OpenAI, anthropic_client: Anthropic) -> None:
    """The same prompt by both, and longer for more frames. A broken one is a 400 that names its field."""
    tokens = []
    for frames in (4, 16):
        answers, counts = ask_videos(openai_client, anthropic_client, make_video(range(0, 8 * frames, 8)))
        assert answers[0] == answers[1] and len(counts) == 1
        tokens += counts
    assert tokens[0] < tokens[1]
    with pytest.raises(openai.BadRequestError, match="video") as caught:
        ask_videos(openai_client, anthropic_client, b"junk")
    assert caught.value.param == "messages[0].content[0].video_url.url"
    source = {"type": "base64", "media_type": "video/mp4", "data": "anVuaw=="}
    broken: Any = [{"role": "user", "content": [{"type": "video", "source": source}]}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0\.source\.data: .*video"):
        anthropic_client.messages.create(model="m", max_tokens=8, messages=broken)


def test_bad_files_are_named(openai_client: OpenAI, anthropic_client: Anthropic) -> None:
    with pytest.raises(openai.BadRequestError, match="not a readable PDF") as caught:
        ask_chat(openai_client, b"%PDF-1.7 junk")
    assert caught.value.param == "messages[0].content[0].file.file_data"
    with pytest.raises(openai.BadRequestError, match="21 pages, and media.max_pages allows 20") as caught:
        ask_responses(openai_client, circle(*["red"] * 21))
    assert caught.value.param == "input[0].content[0].file_data"
    with pytest.raises(Exception, match=r"messages\.0\.content\.0\.source\.data: .*not a readable PDF"):
        ask_messages(anthropic_client, b"junk")
    assert "red" in ask_chat(openai_client, circle("red"))[0]


async def test_uploaded_files(tmp_path: Path) -> None:
    """A file by its id is the same as sent inline, in chats and in responses; a text is refused."""
    data = make_pdf("blue", "green")
    async with (
        run_with_engine(tmp_path, "seen", vision=True) as (server, _),
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        pdf = await client.files.create(file=("a.pdf", data), purpose="user_data")
        text = await client.files.create(file=("a.txt", b"abc"), purpose="user_data")

        async def send(file: Any) -> Any:
            content: Any = [{"type": "file", "file": file}]
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
            content = [{"type": "input_file", **file}]
            await client.responses.create(model="m", input=[{"role": "user", "content": content}])

        await send({"file_id": pdf.id})
        await send({"file_data": pdf_url(data)})
        requests = server.engine.requests
        assert [request.media for request in requests] == [(RGB["blue"], RGB["green"])] * 4
        assert requests[0].prompt == requests[2].prompt and requests[1].prompt == requests[3].prompt
        with pytest.raises(openai.BadRequestError, match="'text/plain'; read are PDFs, images") as caught:
            await send({"file_id": text.id})
        assert caught.value.param == "messages[0].content[0].file.file_id"
        with pytest.raises(openai.NotFoundError, match="there is no file 'file-x'"):
            await send({"file_id": "file-x"})
