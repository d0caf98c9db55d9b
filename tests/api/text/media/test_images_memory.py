"""The budget of decoded images: never exceeded, in turn, and free again whatever happens."""

from __future__ import annotations

import asyncio
import random

import pytest

from mlxrun.api.text.media.images import ImageMemory, get_image_memory


async def test_it_is_never_exceeded_and_everybody_has_a_turn() -> None:
    memory, rng, order = ImageMemory(100), random.Random(1), []

    async def use(number: int, size: int) -> None:
        async with memory.hold(size):
            order.append(number)
            assert memory.used <= 100
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)

    await asyncio.gather(*(use(i, rng.choice((1, 30, 70, 100))) for i in range(200)))
    assert order == list(range(200))
    assert memory.used == 0


@pytest.mark.parametrize("seed", range(5))
async def test_requests_that_leave_return_their_share(seed: int) -> None:
    memory, rng, done = ImageMemory(10), random.Random(seed), 0

    async def use(size: int) -> None:
        nonlocal done
        async with memory.hold(size):
            await asyncio.sleep(0)
            assert memory.used <= 10
            done += 1

    tasks = []
    for _ in range(300):
        tasks.append(asyncio.create_task(use(rng.randint(1, 10))))
        if rng.random() < 0.3:
            await asyncio.sleep(0)
        if rng.random() < 0.5:
            rng.choice(tasks).cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
    assert memory.used == 0 and 0 < done < 300
    async with memory.hold(10):
        assert memory.used == 10


async def test_a_failure_returns_the_share() -> None:
    memory = ImageMemory(10)
    with pytest.raises(ValueError, match="x"):
        async with memory.hold(10):
            raise ValueError("x")
    assert memory.used == 0


async def test_a_process_has_one_budget() -> None:
    assert get_image_memory(5) is get_image_memory(5) is not get_image_memory(6)
    other = await asyncio.to_thread(lambda: asyncio.run(_get(5)))
    assert other is not get_image_memory(5)


async def _get(most: int) -> ImageMemory:
    return get_image_memory(most)
