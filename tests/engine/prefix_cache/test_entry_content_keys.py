"""Keys of content: a key names all before it."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.core.step_plan import SnapshotKind
from mlxrun.engine.prefix_cache import entry as cache_entry
from mlxrun.engine.prefix_cache.entry import KeyChain, compute_entry_key

ROOT = b"0" * 16


def chain(tokens: list[int], chunk: int = 4, root: bytes = ROOT) -> KeyChain:
    return KeyChain(root, chunk, array("q", tokens))


def test_keys_name_everything_before() -> None:
    one, other = chain([1, 2, 3, 4, 5, 6, 7, 8]), chain([9, 2, 3, 4, 5, 6, 7, 8])
    assert one.get_grid_key(0) == ROOT == other.get_grid_key(0)
    assert one.get_grid_key(1) != other.get_grid_key(1) and one.get_grid_key(2) != other.get_grid_key(2)
    assert one.get_key(3) != other.get_key(3)
    assert chain([1, 2, 3, 4], root=b"1" * 16).get_grid_key(1) != one.get_grid_key(1)


def test_each_kind_has_its_own_key() -> None:
    ids = chain([1, 2, 3, 4, 5])
    found = {ids.get_entry_key(part, stop) for part in SnapshotKind for stop in range(1, 6)}
    assert len(found) == 10


def test_a_chain_grows_with_the_answer() -> None:
    grown = chain([1, 2, 3])
    partial = grown.get_key(3)
    grown.extend([4, 5])
    assert grown.get_key(5) == chain([1, 2, 3, 4, 5]).get_key(5)
    assert grown.get_key(3) == partial == chain([1, 2, 3]).get_key(3)


def test_keys_beyond_the_end_are_refused() -> None:
    with pytest.raises(IndexError):
        chain([1, 2, 3]).get_grid_key(1)


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("part", list(SnapshotKind))
def test_drafts_say_where_they_hang(part: SnapshotKind, stop: int) -> None:
    ids = chain(list(range(10)))
    draft = ids.plan_entry(part, stop)
    assert draft.start % 4 == 0 and 0 < draft.stop - draft.start <= 4 and draft.stop == stop
    assert draft.parent == ids.get_grid_key(draft.start // 4)
    assert list(draft.ids) == list(range(draft.start, stop))
    assert compute_entry_key(draft) == draft.key == ids.get_entry_key(part, stop)


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_equal_keys_mean_equal_content(one: list[int], other: list[int]) -> None:
    for stop in range(min(len(one), len(other)) + 1):
        assert (chain(one).get_key(stop) == chain(other).get_key(stop)) == (one[:stop] == other[:stop])


def test_each_key_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = cache_entry.compute_digest
    monkeypatch.setattr(cache_entry, "compute_digest", lambda *parts: made.append(parts) or real(*parts))
    ids = chain(list(range(100)))
    for _ in range(3):
        ids.get_grid_key(25), ids.get_key(98), ids.get_key(99)
    assert len(made) == 27
