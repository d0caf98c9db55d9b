"""Which chunks share a forward, and which never do."""

from __future__ import annotations

from mlxrun.core.step_plan import PrefillChunk
from mlxrun.model.run.chunk_grouping import PrefillSharing, group_chunks


def chunk(name: str, stop: int, start: int = 0) -> PrefillChunk:
    return PrefillChunk(name, start, stop)


def test_without_sharing_every_chunk_has_its_own_forward() -> None:
    chunks = [chunk("a", 8), chunk("b", 8)]
    assert group_chunks(chunks, {"a", "b"}, PrefillSharing()) == [[chunks[0]], [chunks[1]]]


def test_equal_first_chunks_share_up_to_the_most_rows() -> None:
    chunks = [chunk(name, 8) for name in "abcde"]
    groups = group_chunks(chunks, set("abcde"), PrefillSharing(2))
    assert [[c.request_id for c in group] for group in groups] == [["a", "b"], ["c", "d"], ["e"]]


def test_nearly_equal_chunks_share_only_where_padding_is_exact() -> None:
    chunks = [chunk("a", 8), chunk("b", 7)]
    assert len(group_chunks(chunks, {"a", "b"}, PrefillSharing(8, max_padded=0))) == 2
    assert len(group_chunks(chunks, {"a", "b"}, PrefillSharing(8, max_padded=7))) == 2, "longer than allowed"
    assert group_chunks(chunks, {"a", "b"}, PrefillSharing(8, max_padded=8)) == [chunks]
    assert len(group_chunks(chunks, {"a", "b"}, PrefillSharing(8, max_padded=8, max_shared=7))) == 2


def test_a_forward_that_is_mostly_padding_is_not_shared() -> None:
    chunks = [chunk("a", 16), chunk("b", 4)]
    assert len(group_chunks(chunks, {"a", "b"}, PrefillSharing(8, max_padded=16))) == 2


def test_later_chunks_and_chunks_with_images_stay_apart_and_in_order() -> None:
    chunks = [chunk("a", 16, 8), chunk("a", 24, 16), chunk("b", 8), chunk("image", 8)]
    groups = group_chunks(chunks, {"a", "b"}, PrefillSharing(8, max_padded=16))
    assert groups == [[chunks[2]], [chunks[0]], [chunks[1]], [chunks[3]]]


def test_consecutive_chunks_merge_unless_a_snapshot_is_due_between_them() -> None:
    sharing = PrefillSharing(8, merge_chunks=True)
    chunks = [chunk("a", 8), chunk("a", 16, 8), chunk("a", 24, 16)]
    assert group_chunks(chunks, {"a"}, sharing) == [[chunk("a", 24)]]
    assert group_chunks(chunks, {"a"}, sharing, {("a", 16)}) == [[chunk("a", 16)], [chunk("a", 24, 16)]]


TAILS = PrefillSharing(3, max_padded=64, tails=True)


def test_tails_of_equally_long_rows_share_a_forward() -> None:
    """Whatever their lengths, if they are short; and after all other chunks."""
    tails = [chunk("a", 104, 100), chunk("b", 101, 100), chunk("c", 103, 100), chunk("d", 102, 100)]
    other = chunk("e", 120, 100)
    groups = group_chunks([*tails, other], set("abcde"), TAILS, ends={c.request_id: c.stop for c in tails})
    assert groups == [[other], [tails[0], tails[2], tails[3]], [tails[1]]]


def test_tails_after_other_lengths_stay_apart() -> None:
    tails = [chunk("a", 104, 100), chunk("b", 105, 101), chunk("c", 190, 100)]
    assert group_chunks(tails, set("abc"), TAILS, ends={c.request_id: c.stop for c in tails}) == [
        [tails[2]],
        [tails[0]],
        [tails[1]],
    ]


def test_tails_of_models_that_cannot_be_padded_share_if_they_are_equally_long() -> None:
    tails = [chunk("a", 104, 100), chunk("b", 103, 100), chunk("c", 104, 100)]
    groups = group_chunks(
        tails, set("abc"), PrefillSharing(8, tails=True), ends={"a": 104, "b": 103, "c": 104}
    )
    assert groups == [[tails[0], tails[2]], [tails[1]]]


def test_rows_that_decode_have_no_tails() -> None:
    tails = [chunk("a", 104, 100), chunk("b", 104, 100)]
    assert group_chunks(tails, set("ab"), TAILS, ends={}) == [[tails[0]], [tails[1]]]
    assert group_chunks(tails, set("ab"), PrefillSharing(8, 64), ends={"a": 104, "b": 104}) == [
        [c] for c in tails
    ]


def test_a_tail_crosses_the_grid_unless_a_snapshot_is_due_there() -> None:
    chunks = [chunk("a", 128, 100), chunk("a", 140, 128), chunk("b", 128, 100), chunk("b", 140, 128)]
    ends = {"a": 140, "b": 140}
    assert group_chunks(chunks, set("ab"), TAILS, ends=ends) == [[chunk("a", 140, 100), chunk("b", 140, 100)]]
    groups = group_chunks(chunks, set("ab"), TAILS, {("a", 128), ("b", 128)}, ends)
    assert groups == [[chunks[0]], [chunks[2]], [chunks[1], chunks[3]]]
