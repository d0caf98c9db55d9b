"""Ids of content: images count by what they show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxrun.core.request import (
    Request,
    SamplingParams,
    build_content_ids,
    find_chunk_stop,
    has_known_content,
    round_down,
)

A, B = b"a" * 32, b"b" * 32


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


def test_images_are_known_by_their_tokens_and_digests() -> None:
    text = Request("a", (1, 9, 9, 2), SamplingParams(max_tokens=1))
    unknown = replace(text, media={"pixel_values": 0})
    unnamed = replace(unknown, image_spans=((1, 3),))
    known = replace(unnamed, image_digests=(A,))
    assert [has_known_content(r) for r in (text, unknown, unnamed, known)] == [True, False, False, True]


@pytest.mark.parametrize(
    ("start", "stop", "found"), [(0, 4, 4), (0, 6, 4), (4, 6, 8), (5, 6, 8), (4, 8, 8), (0, 9, 9)]
)
def test_no_chunk_ends_inside_an_image(start: int, stop: int, found: int) -> None:
    assert find_chunk_stop(start, stop, ((4, 8),)) == found


@pytest.mark.parametrize(("length", "grid", "found"), [(6, 1, 4), (4, 1, 4), (9, 4, 8), (7, 4, 4), (7, 3, 3)])
def test_no_length_ends_inside_an_image(length: int, grid: int, found: int) -> None:
    assert round_down(length, ((4, 8),), grid) == found
