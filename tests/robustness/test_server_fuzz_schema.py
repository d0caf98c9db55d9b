"""schemathesis against /openapi.json: requests that the document allows, and ones that it does not, of every
operation: never a 5xx, each refusal in its surface's shape, nothing left over.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode

from tests.helpers.server_fakes import Serving
from tests.robustness.test_server_fuzz import CONFIG, TEXT, nothing_left, site
from tests.robustness.test_server_fuzz_bodies import Shot, judge

OPERATIONS = 25  # at least: a document without them tests nothing
PHASES = (Phase.generate,)


class Background:
    """A server on a thread of its own, as hypothesis and schemathesis block."""

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.serving: Serving
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self.loop.run_until_complete, args=(self._serve(folder),))
        self._thread.start()
        assert self._ready.wait(60)

    async def _serve(self, folder: Path) -> None:
        async with site(folder, config=CONFIG, model_info=TEXT) as self.serving:
            self._ready.set()
            await self._stop.wait()

    def call(self, what: Any) -> Any:
        """The result of a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(60)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        self.loop.close()


@pytest.fixture
def background(tmp_path: Path) -> Iterator[Background]:
    made = Background(tmp_path)
    yield made
    made.close()


def operations(url: str) -> list[Any]:
    """All operations of the document."""
    document = requests.get(url + "/openapi.json", timeout=60).json()
    schema = schemathesis.openapi.from_dict(document)
    return [found.ok() for found in schema.get_all_operations()]


def tried(operation: Any, url: str, session: requests.Session, examples: int) -> Counter[int]:
    """So many requests of one operation, judged: how often which status came."""
    found: Counter[int] = Counter()
    strategy = operation.as_strategy(generation_mode=GenerationMode.POSITIVE) | operation.as_strategy(
        generation_mode=GenerationMode.NEGATIVE
    )

    @seed(4)
    @settings(
        max_examples=examples,
        database=None,
        phases=PHASES,
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(case=strategy)
    def one(case: Any) -> None:
        answer = case.call(base_url=url, session=session, timeout=60)
        shot = Shot("schema", case.method.upper(), case.path, repr(case.body).encode("utf-8", "replace"))
        judge(
            shot,
            answer.status_code,
            {"Content-Type": answer.headers.get("Content-Type", [""])[0]},
            answer.content,
        )
        found[answer.status_code] += 1

    one()
    return found


@pytest.mark.parametrize("examples", [4, pytest.param(120, marks=pytest.mark.sweep)])
def test_every_operation(background: Background, examples: int) -> None:
    """Both what the document allows and what it does not."""
    url, found = background.serving.url, Counter[int]()
    with requests.Session() as session:
        for operation in operations(url):
            found += tried(operation, url, session, examples)
    assert found[200] > 10 and found[400] > 20, found
    assert found.total() > OPERATIONS * examples // 2, found  # some have few that differ
    background.call(nothing_left(background.serving))
