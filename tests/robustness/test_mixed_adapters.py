"""A server with several LoRA adapters: many requests in different ones at once, each answered as alone, and
names that are not served, which leave nothing behind.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from random import Random
from typing import Any

import aiohttp
import pytest

from mlxrun.config.settings import Config, EngineSettings, ModelSettings
from mlxrun.core.errors import MAX_MESSAGE
from mlxrun.model.hooks.adapted_layers import RowAdapters
from mlxrun.model.load.model_files import EMBEDDED
from tests.helpers.lora_adapters import make_adapter
from tests.helpers.served_model import ModelServer, run_model_server
from tests.helpers.storm_counts import count, make_rng

NAMES = (None, "one", "two", "..", "ünï", "K", "\N{KELVIN SIGN}")
HOSTILE: tuple[Any, ...] = (
    *("../one", "/etc/passwd", "embedded:../one", "embedded:", ":one", "one\0", "one\n", " one", "One"),
    *("\N{CYRILLIC SMALL LETTER O}ne", "o\N{ZERO WIDTH SPACE}ne", "k", "\N{RIGHT-TO-LEFT OVERRIDE}one"),
    *("embedded:one:one", "embedded:embedded:one", "\x1b[31mone", "%2e%2e", "x" * 1_000_000),
    *(5, True, [], {}, ["one"], {"name": "one"}),
)
QUESTIONS = ("What is 12 + 30?", "Repeat: " + " ".join(f"word{i}" for i in range(12)))
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def make_body(path: str, model: Any, text: str = "hello") -> dict[str, Any]:
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 6}
    own = {"/v1/completions": {"prompt": text, "max_tokens": 6}}
    own["/v1/responses"] = {"input": text, "max_output_tokens": 6}
    return {"model": model, "temperature": 0, **own.get(path, chat)}


def read_answer(body: Mapping[str, Any]) -> Any:
    """What was generated, in the shape of its surface, without ids and times."""
    if "choices" in body:
        return [(choice.get("message"), choice.get("text")) for choice in body["choices"]]
    if "output" in body:
        return [item.get("content") for item in body["output"]]
    return body["content"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    root = tmp_path_factory.mktemp("adapters")
    paths = {
        name: str(make_adapter(EMBEDDED, root / str(at), at, scale=30.0, rank=at))
        for at, name in enumerate(NAMES)
        if name is not None
    }
    with run_model_server(
        Config(model=ModelSettings(adapters=paths), engine=EngineSettings(load_check=False))
    ) as server:
        yield server


@pytest.fixture
async def http(served: ModelServer) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"anthropic-version": "2023-06-01", "x-api-key": "-"}
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(served.url, headers=headers, timeout=timeout) as session:
        yield session


async def send(http: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, Any]:
    async with http.post(path, json=body) as response:
        return response.status, await response.json()


def name_fully(name: str | None, rng: Random) -> str:
    return "embedded" if name is None else rng.choice([name, f"embedded:{name}"])


async def storm(http: aiohttp.ClientSession, rng: Random, requests: int) -> None:
    """Requests of all surfaces in all adapters at once; each gets what it gets alone."""
    received = [(rng.choice(PATHS), rng.choice(NAMES), rng.choice(QUESTIONS)) for _ in range(requests)]
    alone = {}
    for path, name, text in dict.fromkeys(received):
        status, body = await send(http, path, make_body(path, name_fully(name, rng), text))
        assert status == 200, body
        alone[path, name, text] = read_answer(body)
    together = await asyncio.gather(
        *(send(http, path, make_body(path, name_fully(name, rng), text)) for path, name, text in received)
    )
    for key, (status, body) in zip(received, together, strict=True):
        assert status == 200, body
        assert read_answer(body) == alone[key], key
        count("requests in mixed adapters")


async def test_mixed_adapters_answer_as_alone(http: aiohttp.ClientSession) -> None:
    await storm(http, make_rng(1, 0), 24)
    answers = [await send(http, PATHS[0], make_body(PATHS[0], name or "embedded")) for name in NAMES]
    assert len({json.dumps(read_answer(body)) for _, body in answers}) == len(NAMES)


async def test_numbers_of_other_rows_are_noticed(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation twin: the rows of a forward have each other's adapters."""
    real = RowAdapters.use
    monkeypatch.setattr(RowAdapters, "use", lambda rows, numbers: real(rows, tuple(numbers)[::-1]))
    with pytest.raises(AssertionError):
        await storm(http, make_rng(2, 0), 12)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(10))
async def test_many_mixed_adapters_answer_as_alone(
    http: aiohttp.ClientSession, seed: int, night: int
) -> None:
    await storm(http, make_rng(seed, night), 300)


async def test_names_that_are_not_served_are_refused(
    http: aiohttp.ClientSession, served: ModelServer
) -> None:
    """Whatever they look like, in every surface and as a stream."""
    for name in HOSTILE:
        for path in (*PATHS, "/v1/messages/count_tokens", "/tokenize"):
            received = make_body(path, name) | {"stream": True}
            if path not in PATHS:
                received = {key: received[key] for key in ("model", "messages")}
            status, body = await send(http, path, received)
            text = body["error"]["message"]
            assert status in (400, 404) and "model" in text, (path, name, body)
            assert text.isprintable() and len(text.encode()) <= MAX_MESSAGE, text
            count("hostile names of models")
    assert not len(served.live) and not served.active


async def test_thousands_of_names_leave_nothing(http: aiohttp.ClientSession) -> None:
    """No series of metrics, and no model in the list."""

    async def observe() -> tuple[list[str], Any]:
        async with http.get("/metrics") as response:
            text = await response.text()
        names = [line.partition("{")[0].partition(" ")[0] for line in text.splitlines()]
        async with http.get("/v1/models") as response:
            return names, await response.json()

    async def ask(at: int) -> None:
        path = PATHS[at % len(PATHS)]
        status, _ = await send(http, path, make_body(path, f"embedded:{at}-" + "y" * 100))
        assert status == 404
        count("hostile names of models")

    for start in (-100, 0):  # the first ones make the series of their statuses
        before = await observe()
        for first in range(start, start + (100 if start else 1000), 50):
            await asyncio.gather(*(ask(at) for at in range(first, first + 50)))
    assert await observe() == before
