"""Every tier of `cache.backend` does what CacheTier says, and holds what memory has no room for."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from mlxrun.config.settings import CacheSettings
from mlxrun.core.step_plan import SerializedPayload
from mlxrun.engine.prefix_cache.cache_tier import TIERS, CacheTier
from mlxrun.engine.prefix_cache.entry import CacheCounters, CacheEntry
from tests.helpers.cache_fakes import list_entries, make_cache, serve
from tests.helpers.cache_files import ROOT, make_entry
from tests.helpers.command_processes import wait_until

LONG = list(range(100, 130))


def open_tier(name: str, folder: Path) -> CacheTier:
    settings = CacheSettings(backend=name, disk_path=str(folder))  # type: ignore[arg-type]
    return TIERS[name](settings, ROOT, CacheCounters())


def test_every_backend_of_the_config_has_a_tier() -> None:
    """Below memory; `none` and `memory` have nothing below it."""
    backends = get_args(get_type_hints(CacheSettings)["backend"])
    assert set(backends) == {"none", "memory", *TIERS}


@pytest.mark.parametrize("name", TIERS)
def test_a_tier_holds_what_it_is_given(name: str, tmp_path: Path) -> None:
    tier = open_tier(name, tmp_path)
    assert tier.max_bytes > 0 and tier.nbytes == 0 and list(tier.scan()) == []
    made = [make_entry(number) for number in range(4)]
    for entry, payload in made:
        assert tier.read(entry) is None and not tier.is_stored(entry)
        assert tier.write(entry, payload) and tier.read(entry) == payload
    assert tier.nbytes >= sum(payload.nbytes for _, payload in made)
    wait_until(lambda: all(tier.is_stored(entry) for entry, _ in made))
    entry, other = made[0][0], make_entry(1)[1]
    assert tier.write(entry, other) and tier.read(entry) == other
    for entry, _ in made[:2]:
        tier.delete(entry)
        tier.delete(entry)
        assert tier.read(entry) is None and not tier.is_stored(entry)
    tier.close()
    assert [tier.read(entry) for entry, _ in made[2:]] == [payload for _, payload in made[2:]]
    left = {entry.key for entry, _ in made[2:]} if tier.survives_restart else set()
    assert {entry.key for entry in open_tier(name, tmp_path).scan()} == left


@pytest.mark.parametrize("name", TIERS)
def test_a_cache_finds_in_its_tier_what_memory_has_no_room_for(name: str, tmp_path: Path) -> None:
    tier = open_tier(name, tmp_path)
    cache = make_cache(tier=tier, memory=20)
    serve(cache, "a", LONG)
    cache.shrink(0)
    assert cache.nbytes == 0 and list_entries(cache) and tier.nbytes > 0
    hit = serve(cache, "b", LONG)
    assert hit is not None and hit.length == 29
    cache.clear()
    assert tier.nbytes == 0 and serve(cache, "c", LONG) is None
    cache.shutdown()


@pytest.mark.parametrize("name", TIERS)
def test_a_tier_has_a_budget(name: str, tmp_path: Path) -> None:
    tier = open_tier(name, tmp_path)
    cache = make_cache(tier=tier)
    serve(cache, "first", LONG)
    wait_until(lambda: all(tier.is_stored(entry) for entry in list_entries(cache)))
    tier.max_bytes = 3 * tier.nbytes
    for n in range(20):
        serve(cache, str(n), [n, *LONG])
    cache.shutdown()
    assert cache.counters.evicted_disk > 0 and 0 < tier.nbytes <= tier.max_bytes


@pytest.mark.parametrize("name", TIERS)
def test_emptied_memory_does_not_flood_the_tier(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It exceeds its budget by one entry and what that depends on, which is four chunks here."""
    tier = open_tier(name, tmp_path)
    cache, write = make_cache(tier=tier), tier.write
    monkeypatch.setattr(tier, "write", lambda entry, payload: False)
    for n in range(10):
        serve(cache, str(n), [n, *LONG])
    written, most = [], 0

    def write_and_note_size(entry: CacheEntry, payload: SerializedPayload) -> bool:
        nonlocal most
        before, accepted = tier.nbytes, write(entry, payload)
        wait_until(lambda: tier.is_stored(entry))  # a file is larger than what waits to be written
        written.append(tier.nbytes - before)
        most = max(most, tier.nbytes)
        return accepted

    monkeypatch.setattr(tier, "write", write_and_note_size)
    tier.max_bytes = 2000
    cache.shrink(0)
    assert len(written) >= 20 and sum(written) > 3 * tier.max_bytes
    assert most <= tier.max_bytes + 4 * max(written) and 0 < tier.nbytes <= tier.max_bytes
    cache.shutdown()
