"""Huge prompts, images and bodies: refused before they cost anything, or in the background of short requests,
and gone with their clients."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxrun.api.text.media import images as images_module
from mlxrun.api.text.media.images import get_image_memory
from mlxrun.api.text.tokens import tokens
from mlxrun.api.text.tokens.tokens import PromptTokens, tokenize
from mlxrun.config.settings import Config, MediaSettings
from mlxrun.core import workers
from mlxrun.core.workers import check_abandoned
from mlxrun.server.http import json_bodies
from tests.helpers.server_fakes import Reply, Serving, server_config
from tests.helpers.tokenizers import TOOLS, FakeModelInfo
from tests.robustness.test_server_fuzz import nothing_left, site
from tests.robustness.test_server_fuzz_bodies import CHAT, COMPLETION, COUNT, HI, MESSAGES, RESPONSES
from tests.robustness.test_server_fuzz_wire import bomb, said
from tests.server.test_live_requests import until

MODEL, VISION = FakeModelInfo(chat_template=TOOLS), FakeModelInfo(vision=True)
SHORT = {"messages": HI, "max_tokens": 3}
LONG = "hello world " * 20_000  # 240,000 characters
WITHIN = 60  # seconds: a hang, on whatever machine


class Gate:
    """Stands for `tokenize`: long texts wait until it opens, or until nobody waits for them any more."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.running = 0
        self.most = 0
        self.ended = 0
        self.seen: list[int] = []
        self._lock = threading.Lock()

    def tokenize(self, model: Any, text: str, *, add_special_tokens: bool) -> PromptTokens:
        self.seen.append(len(text))
        if len(text) > workers.LONG_TEXT:
            with self._lock:
                self.running += 1
                self.most = max(self.most, self.running)
            try:
                while not self.open.wait(0.002):
                    check_abandoned()
            finally:
                with self._lock:
                    self.running -= 1
                    self.ended += 1
            text = text[:100]
        return tokenize(model, text, add_special_tokens=add_special_tokens)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate()
    for module in ("mlxrun.api.text.prompt", "mlxrun.server.endpoints.tokenize"):
        monkeypatch.setattr(f"{module}.tokenize", made.tokenize)
    return made


def bodies(text: str) -> dict[str, Any]:
    """A request of each surface with this text."""
    return {
        CHAT: {"messages": [{"role": "user", "content": text}], "max_tokens": 4},
        COMPLETION: {"prompt": text, "max_tokens": 4},
        MESSAGES: {"messages": [{"role": "user", "content": text}], "model": "claude-x", "max_tokens": 4},
        RESPONSES: {"input": text, "max_output_tokens": 16},
    }


@pytest.mark.parametrize("path", bodies(""))
async def test_an_over_long_prompt_is_refused_before_it_is_tokenized(
    tmp_path: Path, gate: Gate, path: str
) -> None:
    """Also in a list of prompts; what only counts tokens still does. The twin: one that fits is tokenized."""
    async with site(tmp_path, config=server_config(), model_info=MODEL) as s:
        reply = await s.post(path, bodies(LONG)[path])
        text = reply.json["error"]["message"]
        assert reply.status == 400 and "tokens or more" in text and "4096" in text
        assert gate.seen == [] and s.engine.requests == []
        gate.open.set()
        assert (await s.post(path, bodies("hello")[path])).status == 200
        assert len(gate.seen) == 1
        await nothing_left(s)


async def test_counting_tokens_is_not_limited_by_the_context(tmp_path: Path) -> None:
    async with site(tmp_path, config=server_config(), model_info=MODEL) as s:
        reply = await s.post(COUNT, {"messages": [{"role": "user", "content": LONG}], "model": "claude-x"})
        assert reply.status == 200 and reply.json["input_tokens"] > 100_000
        assert (await s.post("/tokenize", {"prompt": LONG})).json["count"] > 100_000
        await nothing_left(s)


async def start(s: Serving, path: str, body: Any, count: int) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(s.post(path, body)) for _ in range(count)]


@pytest.mark.parametrize("path", [*bodies(""), "/tokenize"])
async def test_short_requests_do_not_wait_behind_long_texts(tmp_path: Path, gate: Gate, path: str) -> None:
    """A few are tokenized at once, however many come; the others wait."""
    model = FakeModelInfo(chat_template=TOOLS, context_length=1_000_000)
    body = bodies(LONG).get(path, {"prompt": LONG})
    async with site(tmp_path, config=server_config(), model_info=model) as s:
        tasks = await start(s, path, body, 40)
        await until(lambda: gate.running == workers.LONG_TEXTS.threads)
        async with asyncio.timeout(WITHIN):
            for short, given in bodies("hello").items():
                assert (await s.post(short, given)).status == 200
            assert (await s.get("/health")).status == 200
        assert not any(task.done() for task in tasks)
        gate.open.set()
        assert {(await task).status for task in tasks} == {200}
        assert gate.most == workers.LONG_TEXTS.threads and gate.ended == 40
        await nothing_left(s)


async def test_a_long_text_ends_with_its_client(tmp_path: Path, gate: Gate) -> None:
    """What runs stops, what waits never begins."""
    model = FakeModelInfo(chat_template=TOOLS, context_length=1_000_000)
    async with site(tmp_path, config=server_config(), model_info=model) as s:
        threads = workers.LONG_TEXTS.threads
        running = await start(s, CHAT, bodies(LONG)[CHAT], threads)
        await until(lambda: gate.running == threads)
        waiting = await start(s, CHAT, bodies(LONG)[CHAT], 10)
        await until(lambda: len(s.active) == threads + 10)
        for task in waiting:
            task.cancel()
        await until(lambda: len(s.active) == threads)
        for task in running:
            task.cancel()
        await until(lambda: gate.running == 0)
        await nothing_left(s)
        assert gate.ended == workers.LONG_TEXTS.threads and s.engine.requests[:-1] == []


async def test_a_huge_text_is_tokenized_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same result; and nothing of it is left when its client leaves."""
    monkeypatch.setattr(tokens, "HUGE_TEXT", 200_000)
    monkeypatch.setattr(workers, "HUGE_TEXT", 200_000)
    model = FakeModelInfo(chat_template=TOOLS, context_length=1_000_000)
    async with site(tmp_path, config=server_config(), model_info=model) as s:
        body = bodies(LONG)[CHAT]
        assert (await s.post(CHAT, body)).status == 200
        huge = s.engine.requests[-1].prompt
        monkeypatch.setattr(tokens, "HUGE_TEXT", 10**9)
        assert (await s.post(CHAT, body)).status == 200
        assert s.engine.requests[-1].prompt == huge
        await nothing_left(s)


# -- images -----------------------------------------------------------------------------------------------


def picture(side: int = 40) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": bomb(side)}}


class Decoder:
    """Stands for `decode_image`, which waits until it opens."""

    def __init__(self, decode: Callable[..., Any]) -> None:
        self.open = threading.Event()
        self.running = 0
        self._decode = decode

    def __call__(self, data: bytes, factor: int) -> Any:
        self.running += 1
        self.open.wait(2 * WITHIN)
        self.running -= 1
        return self._decode(data, factor)


async def test_short_requests_do_not_wait_behind_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many requests, as many images are held as the budget allows, until the processor is done."""
    decoder = Decoder(images_module.decode_image)
    monkeypatch.setattr(images_module, "decode_image", decoder)
    one = 20 * 40 * 40
    config = Config(server=server_config().server, media=MediaSettings())
    body = said([picture(), {"type": "text", "text": "?"}]) | {"max_tokens": 2}
    monkeypatch.setattr(images_module, "DEFAULT_IMAGE_BYTES", 3 * one)
    monkeypatch.setattr(
        images_module.MediaLoader.__init__,
        "__kwdefaults__",
        {**images_module.MediaLoader.__init__.__kwdefaults__, "memory_bytes": 3 * one},
    )
    async with site(tmp_path, config=config, model_info=VISION) as s:
        memory = get_image_memory(3 * one)
        tasks = await start(s, CHAT, body, 12)
        await until(lambda: decoder.running > 0 and memory.used == 3 * one)
        async with asyncio.timeout(WITHIN):
            assert (await s.post(CHAT, SHORT)).status == 200
            assert (await s.get("/health")).status == 200
        for task in tasks[:6]:
            task.cancel()
        decoder.open.set()
        assert {(await task).status for task in tasks[6:]} == {200}
        await nothing_left(s)
        assert memory.used == 0
        refused = await s.post(CHAT, said([picture()] * 4))
        assert (
            refused.status == 400 and refused.json["error"]["param"] == "messages[0].content[3].image_url.url"
        )


# -- bodies -----------------------------------------------------------------------------------------------


MANY = json_bodies.MAX_NODES + 10
LARGE: dict[str, tuple[bytes, int]] = {
    "keys": (json.dumps({f"k{i}": 1 for i in range(MANY)}).encode(), 400),
    "nested keys": (
        json.dumps({"messages": HI, "metadata": {f"k{i}": 1 for i in range(MANY)}}).encode(),
        400,
    ),
    "objects": (json.dumps({"messages": [{}] * MANY}).encode(), 400),
    "arrays": (b'{"messages":' + b"[" * MANY, 400),
    "values": (json.dumps({"prompt": [1] * (json_bodies.MAX_VALUES + 1)}).encode(), 400),
    "separators in a text": (
        json.dumps(said('{"a": [1, 2]}, \\" ' * 2000) | {"user": ":" * MANY}).encode(),
        400,
    ),
    "few keys": (
        json.dumps(
            SHORT | {"metadata": {f"k{i}": "v" * 500 for i in range(16)}, "user": "u" * 70_000}
        ).encode(),
        200,
    ),
}


async def send(s: Serving, path: str, raw: bytes) -> Reply:
    """As `s.post`; aiohttp warns of large bytes."""
    headers = {"Content-Type": "application/json"}
    async with s.http.post(s.url + path, data=io.BytesIO(raw), headers=headers) as response:
        return Reply(response.status, response.headers, await response.read())


@pytest.mark.parametrize("name", LARGE)
async def test_a_body_of_many_values(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before a value of it is made. Separators in strings do not count."""
    raw, status = LARGE[name]
    parsed: list[int] = []
    parse = json_bodies.parse_json
    monkeypatch.setattr(json_bodies, "parse_json", lambda raw: parsed.append(len(raw)) or parse(raw))
    async with site(tmp_path, config=server_config(), model_info=MODEL) as s:
        reply = await send(s, COMPLETION if name == "values" else CHAT, raw)
        assert reply.status == status, reply.body[:300]
        is_counted = name not in ("separators in a text", "few keys")
        assert (parsed == []) is is_counted
        if is_counted:
            assert (
                "at most" in reply.json["error"]["message"] and reply.json["error"]["code"] == "invalid_json"
            )
        await nothing_left(s)


@pytest.mark.parametrize(
    ("context", "vision", "most"),
    [(4096, False, 16_000_000), (1_000_000, False, 32_000_000), (4096, True, 80_000_000)],
)
async def test_the_default_limit_of_bodies_fits_the_model(
    tmp_path: Path, context: int, vision: bool, most: int
) -> None:
    model = FakeModelInfo(context_length=context, vision=vision)
    async with site(tmp_path, config=server_config(), model_info=model) as s:
        assert json_bodies.get_max_body_bytes(s.app) == most
        headers = {"Content-Length": str(most + 1), "Content-Type": "application/json"}
        async with s.http.post(s.url + CHAT, headers=headers, data=_one_byte()) as response:
            assert response.status == 413 and str(most) in await response.text()
    async with site(tmp_path, config=server_config(max_body_bytes=1000), model_info=model) as s:
        assert json_bodies.get_max_body_bytes(s.app) == 1000


async def _one_byte() -> Any:
    yield b"{"
    await asyncio.sleep(WITHIN)
