"""Counted and not timed: the event loop is never held, however large a request is. No slow library call
runs on its thread, and no turn of the loop makes many more calls for a large body than for a small one.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from asyncio.events import Handle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.server_fakes import Serving, server_config
from tests.helpers.tokenizers import TOOLS, FakeModelInfo
from tests.robustness.test_server_fuzz import site
from tests.robustness.test_server_fuzz_bodies import CHAT, COMPLETION, COUNT, MESSAGES, RESPONSES

HOST = FakeModelInfo(chat_template=TOOLS, context_length=1_000_000)
CONFIG = server_config()
SAID = ("user", "assistant")
LARGE, SMALL = 3000, 2


def bodies(size: int) -> dict[str, tuple[str, Any]]:
    """A request of each kind, with so many words, turns, or whatever it may have many of."""
    text = "some word " * size * 4
    turns = [{"role": SAID[i % 2], "content": f"turn {i}"} for i in range(size | 1)]
    ids = [65 + i % 20 for i in range(size * 4)]
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": {}}} for i in range(size // 10)]
    claude = {"model": "claude-x", "max_tokens": 4}
    return {
        "chat text": (CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 4}),
        "chat turns": (CHAT, {"messages": turns, "max_tokens": 4, "stream": True}),
        "chat tools": (CHAT, {"messages": turns[:1], "max_tokens": 4, "tools": tools or None}),
        "completion text": (COMPLETION, {"prompt": text, "max_tokens": 4}),
        "completion ids": (COMPLETION, {"prompt": ids, "max_tokens": 4}),
        "messages text": (MESSAGES, {"messages": [{"role": "user", "content": text}], **claude}),
        "messages turns": (MESSAGES, {"messages": turns, **claude}),
        "count": (COUNT, {"messages": turns, "model": "claude-x"}),
        "responses text": (RESPONSES, {"input": text, "max_output_tokens": 16}),
        "responses turns": (RESPONSES, {"input": turns, "max_output_tokens": 16}),
        "input tokens": ("/v1/responses/input_tokens", {"input": turns}),
        "tokenize text": ("/tokenize", {"prompt": text}),
        "tokenize turns": ("/tokenize", {"messages": turns}),
        "detokenize": ("/detokenize", {"tokens": ids}),
    }


class Turns:
    """Counts the calls, of Python and of C, that each turn of the loop makes. `most`, and where that was."""

    def __init__(self) -> None:
        self.most = 0
        self.where = ""
        self._calls = 0
        self._names: dict[str, int] = {}

    @contextmanager
    def counted(self) -> Iterator[None]:
        run = Handle._run
        Handle._run = lambda handle: self._turn(run, handle)  # type: ignore[method-assign]
        try:
            yield
        finally:
            Handle._run = run  # type: ignore[method-assign]

    def _turn(self, run: Callable[[Handle], None], handle: Handle) -> None:
        self._calls, self._names = 0, {}
        sys.setprofile(self._count)
        try:
            run(handle)
        finally:
            sys.setprofile(None)
            if self._calls > self.most:
                self.most = self._calls
                self.where = str(sorted(self._names.items(), key=lambda item: -item[1])[:4])

    def _count(self, frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            self._calls += 1
            name = f"{frame.f_code.co_filename[-30:]}:{frame.f_code.co_qualname}"
            self._names[name] = self._names.get(name, 0) + 1


async def most(s: Serving, path: str, body: Any) -> Turns:
    """The largest turn of the loop while this is asked."""
    found = Turns()
    for _ in range(2):  # the first time fills caches of templates and schemas
        found = Turns()
        with found.counted():
            reply = await s.post(path, body)
        assert reply.status == 200, reply.body[:500]
        await s.settle()
    return found


@pytest.mark.parametrize("name", bodies(SMALL))
async def test_a_large_body_does_not_hold_the_loop(tmp_path: Path, name: str) -> None:
    """As many calls in a turn as for a small one, but for a few for each message: some milliseconds."""
    async with site(tmp_path, config=CONFIG, model_info=HOST) as s:
        small = await most(s, *bodies(SMALL)[name])
        large = await most(s, *bodies(LARGE)[name])
        assert large.most < small.most + 10 * LARGE, (small.most, large.most, large.where)


@pytest.mark.parametrize("name", bodies(SMALL))
async def test_templates_and_tokenizers_run_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Rendering, tokenising and detokenising of a prompt are single calls, and long ones."""
    on: dict[str, set[int]] = {}

    def watched(of: type, method: str) -> None:
        original = getattr(of, method)

        def call(self: Any, *args: Any, **more: Any) -> Any:
            if len(str(args[0])) > LARGE:
                on.setdefault(method, set()).add(threading.get_ident())
            return original(self, *args, **more)

        monkeypatch.setattr(of, method, call)

    for method in ("__call__", "apply_chat_template", "decode", "encode"):
        watched(type(HOST.tokenizer), method)
    async with site(tmp_path, config=CONFIG, model_info=HOST) as s:
        path, body = bodies(LARGE)[name]
        assert (await s.post(path, body)).status == 200
        await s.settle()
    if name != "completion ids":
        assert on
    assert all(threading.get_ident() not in threads for threads in on.values()), (on, threading.get_ident())


async def test_the_tests_see_a_turn_that_takes_long() -> None:
    """Mutation: what is counted is one turn, not the whole."""

    async def work(size: int) -> None:
        for _ in range(10):
            sum(len(str(i)) for i in range(size))
            await asyncio.sleep(0)

    small, large = Turns(), Turns()
    with small.counted():
        await asyncio.create_task(work(10))
    with large.counted():
        await asyncio.create_task(work(5000))
    assert small.most < 100 and large.most > 10_000
