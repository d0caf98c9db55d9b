"""The order in which lines are started: like lines together, each once, nobody far from its place."""

from __future__ import annotations

import random
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from mlxrun.jobs.lines.job_file import JobLine
from mlxrun.jobs.lines.lookahead import WINDOW, hash_prefix, look_ahead
from tests.helpers.batch_fakes import Bench, chat, make_config, write_job


def order(marks: list[int], size: int = WINDOW) -> list[int]:
    """The positions of these likenesses as they are handed out."""
    return list(look_ahead(iter(range(len(marks))), marks.__getitem__, size))


def test_each_once_and_near_its_place() -> None:
    """Property: a permutation, in which fewer than `size` later lines go before any line."""
    rng = random.Random(1)
    for _ in range(200):
        size, kinds = rng.randrange(1, 20), rng.randrange(1, 9)
        marks = [rng.randrange(kinds) << 32 | rng.randrange(3) for _ in range(rng.randrange(120))]
        found = order(marks, size)
        assert sorted(found) == list(range(len(marks)))
        for at, position in enumerate(found):
            assert sum(other > position for other in found[:at]) < size
        assert found == order(marks, size)


def test_alike_together_else_first_come() -> None:
    a, b, c = 1 << 32, 2 << 32, 3 << 32
    assert order([a, b, a, c, b, a]) == [0, 2, 5, 1, 4, 3]
    assert order([a | 1, a | 2, b, a | 1, a | 2]) == [0, 3, 1, 4, 2]
    assert order([a, b, a, a, a], size=1) == [0, 1, 2, 3, 4]
    assert order([]) == []


def test_the_look_ahead_is_bounded() -> None:
    """A million lines are not read to start the first."""
    called: list[int] = []

    def like(position: int) -> int:
        called.append(position)
        return 0

    ahead = look_ahead(iter(range(10**9)), like)
    for _ in range(50):
        next(ahead)
    assert len(called) < WINDOW + 50


def line(body: Any, url: str = "/v1/chat/completions") -> int:
    return hash_prefix(JobLine(1, "a", url, body))


def turns(system: str | None, user: Any) -> dict[str, Any]:
    lead = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*lead, {"role": "user", "content": user}], "temperature": random.random()}


def test_likeness() -> None:
    long = "x" * 1500
    assert line(turns("s", "one")) >> 32 == line(turns("s", "two")) >> 32
    assert line(turns("s", "one")) != line(turns("s", "two"))
    assert line(turns("s", long + "1")) == line(turns("s", long + "2"))
    assert line(turns("s", "one")) >> 32 != line(turns("t", "one")) >> 32
    assert line({**turns("s", "one"), "tools": [{"a": 1}]}) >> 32 != line(turns("s", "one")) >> 32
    assert line(turns(None, long + "1")) == line(turns(None, long + "2"))
    assert line(turns(None, "one")) >> 32 != line(turns(None, "two")) >> 32
    assert line({"prompt": long + "1"}) == line({"prompt": long + "2"})
    assert line({"prompt": [1, 2, 3]}) != line({"prompt": [1, 2, 4]})
    images = ["data:image/png;base64," + "A" * 2000 + end for end in "BC"]
    first, second = ([{"type": "image_url", "image_url": {"url": url}}] for url in images)
    assert line(turns("s", first)) != line(turns("s", second))
    assert line(turns("s", first)) >> 32 == line(turns("s", second)) >> 32


@pytest.mark.parametrize("body", [{}, {"messages": 3}, {"messages": [1, None, "x"]}, {"prompt": {"a": []}}])
def test_bodies_that_are_none(body: Any) -> None:
    assert 0 <= line(body) < 1 << 64


def test_a_deep_body() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    assert line({"prompt": deep}) == line({"prompt": [deep]})


async def test_a_job_starts_alike_lines_together(tmp_path: Path) -> None:
    """Five system prompts that take turns in the file: each is begun once."""

    def lines() -> list[dict[str, Any]]:
        found = [chat(f"l{i}", f"say {i}") for i in range(40)]
        for i, each in enumerate(found):
            each["body"]["messages"].insert(0, {"role": "system", "content": f"system {i % 5}"})
        return found

    bench = Bench(write_job(tmp_path, lines()), make_config(order="input", concurrency=1))
    await bench.run()
    called = [int(text.split(" ")[1]) % 5 for text in bench.client.tries]
    assert [kind for kind, _ in groupby(called)] == [0, 1, 2, 3, 4]
    assert bench.paths.out.read_bytes().index(b"say 1") < bench.paths.out.read_bytes().index(b"say 5")
