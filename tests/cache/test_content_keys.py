"""Keys of content (cache/content_keys.py): images count by what they show, and a key names all before it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.cache import content_keys
from mlxrun.cache.content_keys import KeyChain, build_content_ids, compute_entry_key
from mlxrun.scheduler.step_plan import SnapshotKind

ROOT = b"0" * 16
A, B = b"a" * 32, b"b" * 32


def chain(tokens: list[int], chunk: int = 4, root: bytes = ROOT) -> KeyChain:
    return KeyChain(root, chunk, build_content_ids(tokens, (), ()))


def test_text_is_its_own_content() -> None:
    assert list(build_content_ids([5, 0, 7], (), ())) == [5, 0, 7]


def test_an_image_is_what_it_shows() -> None:
    tokens, spans = [1, 9, 9, 9, 2], ((1, 4),)
    first, again, other = (build_content_ids(tokens, spans, (d,)) for d in (A, A, B))
    assert first == again
    assert first[0] == 1 and first[4] == 2
    assert all(x < 0 for x in first[1:4]) and len(set(first[1:4])) == 3
    assert not set(first[1:4]) & set(other[1:4])


def test_the_order_of_images_counts() -> None:
    tokens, spans = [9, 9, 1, 9, 9], ((0, 2), (3, 5))
    assert build_content_ids(tokens, spans, (A, B)) != build_content_ids(tokens, spans, (B, A))


def test_the_layout_of_an_image_counts() -> None:
    assert build_content_ids([9, 8], ((0, 2),), (A,)) != build_content_ids([8, 9], ((0, 2),), (A,))


def test_long_images_have_no_repeats() -> None:
    ids = build_content_ids([9] * 5000, ((0, 5000),), (A,))
    assert len(set(ids)) == 5000


def test_images_must_all_be_named() -> None:
    with pytest.raises(ValueError, match="1 image spans, but 0"):
        build_content_ids([9, 9], ((0, 2),), ())


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
    draft = ids.draft_entry(part, stop)
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
    real = content_keys.compute_digest
    monkeypatch.setattr(content_keys, "compute_digest", lambda *parts: made.append(parts) or real(*parts))
    ids = chain(list(range(100)))
    for _ in range(3):
        ids.get_grid_key(25), ids.get_key(98), ids.get_key(99)
    assert len(made) == 27
