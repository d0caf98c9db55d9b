"""Embeddings and scores under load: hundreds of requests at once, of which some are broken, cancelled or left
by their clients, beside chats where the model answers those too. Each answer is that of the request alone,
and nothing is left.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from mlxrun.config.settings import Config, EngineSettings, ModelSettings, SchedulerSettings, ServerSettings
from mlxrun.core.request import TokenEvent
from mlxrun.engine.client import EngineClient
from mlxrun.engine.workloads.pooling import PoolingBatch, PoolingQueue
from mlxrun.model.load.model_info import load_model_info
from tests.helpers import text_models
from tests.helpers.pooling_models import WORDS, build_pooling_model
from tests.helpers.server_fakes import Reply, Serving, run_server
from tests.helpers.storm_counts import count, make_rng
from tests.robustness.test_server_fuzz import empty, fire
from tests.robustness.test_server_fuzz_bodies import CHAT, Shot, mutate_body

EMBED, RERANK = "/v1/embeddings", "/v1/rerank"
LANES = 150
WITHIN = 120  # seconds: a hang, on whatever machine
ROUNDING = 1e-3  # of vectors and scores of texts in company
SWEPT = (
    "xlm-roberta",
    "modernbert",
    "qwen3",
    "bert-reranker",
    "qwen3-reranker",
    "chat:qwen3_5",
)

Act = Callable[[int], Coroutine[Any, Any, None]]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("probed_once")]


def make_config(name: str, folder: Path, **options: Any) -> Config:
    """`name`: of a model that gives vectors, or `chat:` and a family whose model also answers chats."""
    kind, _, family = name.rpartition(":")
    if kind == "chat":
        model = ModelSettings(path=str(text_models.build(family, folder)), pooling="mean")
    else:
        path = str(build_pooling_model(name, folder))
        model = ModelSettings(path=path, kind="reranker" if name == "qwen3-reranker" else "auto")
    return Config(
        model=model,
        engine=EngineSettings(**options),
        server=ServerSettings(port=0),
        scheduler=SchedulerSettings(
            step_ms=0, chunk=32, prefill_budget=64, prefill_budget_busy=32, max_running=6, max_queue=4096
        ),
    )


@dataclass
class Callers:
    """What a storm asks a server, the same for a seed; `wanted`: what each body gets alone, by its place."""

    serving: Serving
    rng: random.Random
    url: str
    exact: bool = False
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    wanted: list[Any] = field(default_factory=list)
    found: Counter[str] = field(default_factory=Counter)

    async def prepare(self, number: int, chats: int) -> None:
        self.bodies = [(self.url, self.make_body()) for _ in range(number)]
        self.bodies += [(CHAT, self.make_chat()) for _ in range(chats)]
        for path, body in self.bodies:
            reply = await self.serving.post(path, body)
            assert reply.status == 200, (reply.body, body)
            self.wanted.append(read_answer(reply))

    def make_text(self, most: int) -> str:
        rng = self.rng
        return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, rng.choice((3, most)))))

    def make_chat(self) -> dict[str, Any]:
        message = {"role": "user", "content": self.make_text(30)}
        return {"messages": [message], "max_tokens": 12, "temperature": 0}

    def make_body(self) -> dict[str, Any]:
        rng = self.rng
        number, is_long = rng.choice((1, 1, 3, 9, 30)), rng.random() < 0.5
        if self.url == RERANK:
            documents = [rng.choice((str, make_document))(self.make_text(15)) for _ in range(number)]
            body = {"query": self.make_text(6), "documents": documents, "top_n": rng.randrange(1, 40)}
            return body | ({"return_documents": False} if is_long else {})
        ids = [[rng.randrange(8, 28) for _ in range(rng.randrange(1, 36))] for _ in range(number)]
        texts = [self.make_text(50 if is_long else 12) for _ in range(number)]
        body = {"input": rng.choice((texts, texts, texts[0], ids)), "truncate_prompt_tokens": -1}
        return body | rng.choice(({}, {"encoding_format": "base64"}, {"dimensions": rng.randrange(1, 20)}))

    async def ask(self, at: int) -> None:
        """One that stays gets what it gets alone."""
        path, body = self.bodies[at]
        reply = await self.serving.post(path, body)
        assert reply.status == 200, reply.body
        assert is_same(read_answer(reply), self.wanted[at], self.exact), f"another answer for {body}"
        self.found["chat" if path == CHAT else "whole"] += 1

    async def break_body(self, at: int) -> None:
        body = mutate_body(self.rng, self.make_body())
        status = await fire(self.serving, Shot("mutated", "POST", self.url, body))
        self.found["refused" if status >= 400 else "right anyway"] += 1

    async def vanish(self, at: int) -> None:
        """Behind half a body, once it was sent, once it is known, or later."""
        (path, body), name, moment = self.bodies[at], f"gone-{at}", self.rng.randrange(4)
        host, port = self.serving.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nx-request-id: {name}\r\n"
        raw = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        writer.write(raw[: -len(data) // 2] if moment == 0 else raw)
        await writer.drain()
        if moment >= 2:
            await self._wait_until_live(name)
        if moment == 3:
            await asyncio.sleep(self.rng.random() * 0.2)
        self.found["vanished"] += self.serving.live.get(name) is not None
        writer.transport.abort()

    async def cancel(self, at: int) -> None:
        (path, body), name = self.bodies[at], f"cancelled-{at}"
        received = asyncio.create_task(self.serving.post(path, body, x_request_id=name))
        await self._wait_until_live(name)
        await self.serving.post(f"/v1/requests/{name}/cancel", None)
        status = (await received).status
        assert status in (200, 499), status
        self.found["cancelled"] += status == 499

    async def _wait_until_live(self, name: str) -> None:
        for _ in range(1000):
            if self.serving.live.get(name) is not None:
                return
            await asyncio.sleep(0.001)

    async def storm(self, *acts: Act) -> None:
        """Each with every body, `LANES` at a time."""
        todo = [(act, at) for act in acts for at in range(len(self.bodies))]
        self.rng.shuffle(todo)
        left = iter(todo)

        async def lane() -> None:
            for act, at in left:
                async with asyncio.timeout(WITHIN):
                    await act(at)
                count("requests for vectors and chats at once")

        async with asyncio.TaskGroup() as group:
            for _ in range(LANES):
                group.create_task(lane())


def make_document(text: str) -> dict[str, str]:
    return {"text": text}


def read_answer(reply: Reply) -> Any:
    """Vectors by the place of their texts, or the text of a chat."""
    body = reply.json
    if "choices" in body:
        return body["choices"][0]["message"]["content"]
    if "results" in body:
        return [np.array([each["index"], each["relevance_score"]]) for each in body["results"]]
    return [read_vector(each["embedding"]) for each in body["data"]]


def read_vector(given: str | list[float]) -> Any:
    return np.frombuffer(base64.b64decode(given), "<f4") if isinstance(given, str) else np.array(given)


def is_same(one: Any, other: Any, exact: bool) -> bool:
    if isinstance(one, str) or len(one) != len(other):
        return bool(one == other)
    return all(
        np.allclose(a, b, rtol=0, atol=0 if exact else ROUNDING) for a, b in zip(one, other, strict=True)
    )


@asynccontextmanager
async def start(config: Config, rng: random.Random, url: str) -> AsyncIterator[Callers]:
    client = await EngineClient.start(config, load_model_info(config.model, weights=True))
    try:
        unlimited = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=WITHIN)
        async with (
            run_server(config, engine=client) as s,
            aiohttp.ClientSession(connector=unlimited[0], timeout=unlimited[1]) as http,
        ):
            yield Callers(replace(s, http=http), rng, url, config.engine.reproducible)
    finally:
        await client.close()


async def check_nothing_left(s: Serving) -> None:
    """No text, no row, no memory of any; and the gauges say so."""
    await s.settle()
    await empty(s.engine)
    engine = s.engine._ready.result()
    queue = engine.pooling
    assert (queue._waiting, queue._batches, queue._aborted, queue._alone) == ({}, {}, set(), set())
    gauges = ("mlxrun_requests_live{", "mlxrun_pooling{", "mlxrun_engine_requests{", "mlxrun_engine_errors")
    lines = (await s.get("/metrics")).body.decode().splitlines()
    shown = [line for line in lines if line.startswith(gauges)]
    assert len(shown) == 8 and all(line.endswith(" 0.0") for line in shown), shown


async def run_storm(config: Config, rng: random.Random, number: int, chats: int) -> Counter[str]:
    url = RERANK if "reranker" in config.model.path else EMBED
    async with start(config, rng, url) as callers:
        await callers.prepare(number, chats)
        await callers.storm(callers.ask, callers.break_body, callers.vanish, callers.cancel)
        await check_nothing_left(callers.serving)
        for at in range(0, number, 5):
            await callers.ask(at)
        return callers.found


@pytest.mark.parametrize("name", ["bert", "bert-reranker", "chat:qwen3"])
async def test_vectors_under_load(name: str, tmp_path: Path, night: int) -> None:
    chats = 12 if name.startswith("chat:") else 0
    found = await run_storm(make_config(name, tmp_path / name), make_rng(1, night), 36 - chats, chats)
    assert found["whole"] > 20 and found["chat"] == chats and found["refused"] > 15, found
    assert found["vanished"] and found["cancelled"], found


@pytest.mark.sweep
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", SWEPT)
async def test_many_vectors_under_load(name: str, exact: bool, tmp_path: Path, night: int) -> None:
    """With `engine.reproducible` each number is the same."""
    chats = 25 if name.startswith("chat:") else 0
    config = make_config(name, tmp_path / name, reproducible=exact)
    await run_storm(config, make_rng(100 + SWEPT.index(name), night), 100, chats)


async def test_vectors_of_other_texts_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: the vectors of a batch in another order, once texts of several requests share it."""
    finish = PoolingQueue.finish

    def finish_turned(queue: PoolingQueue, batch: PoolingBatch, vectors: Sequence[bytes]) -> list[TokenEvent]:
        names = {request.id.partition("-")[0] for request in batch.requests}
        return finish(queue, batch, vectors[::-1] if len(names) > 1 else vectors)

    monkeypatch.setattr(PoolingQueue, "finish", finish_turned)
    async with start(make_config("bert", tmp_path / "bert"), random.Random(1), EMBED) as callers:
        await callers.prepare(40, 0)
        with pytest.raises(ExceptionGroup) as failed:
            await callers.storm(callers.ask)
        assert "another answer" in str(failed.value.exceptions[0])
