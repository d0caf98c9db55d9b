"""Fixtures of the tests of snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.helpers.model_fixtures import Zoo
from tests.helpers.snapshot_bench import Bench, caller


@pytest.fixture(scope="module")
def benches(zoo: Zoo) -> Iterator[Callable[..., Bench]]:
    made: dict[tuple[str, str, int | None], Bench] = {}

    def bench(family: str, bits: int | None = None, kind: str = "text") -> Bench:
        if (family, kind, bits) not in made:
            made[family, kind, bits] = Bench(caller(zoo, family, kind), bits)
        return made[family, kind, bits]

    yield bench
