"""Pages have the same name only if all content up to their end, and the adapter, are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlxrun.core.request import Request, SamplingParams
from mlxrun.model.kernels.kernel_source import PAGE
from mlxrun.model.kv.paged.page_table import compute_page_keys

TOKENS = [n * 7 % 1000 for n in range(4 * PAGE + 3)]
SPAN = (PAGE + 10, 2 * PAGE + 20)  # of an image: a page ends inside


def make_request(
    tokens: Sequence[int], *images: bytes, spans: Sequence[tuple[int, int]] = (SPAN,)
) -> Request:
    request = Request("a", tuple(tokens), SamplingParams(max_tokens=1))
    if not images:
        return request
    return replace(request, media={"pixel_values": 0}, image_spans=tuple(spans), image_digests=images)


def name_pages(tokens: Sequence[int], *images: bytes, adapter: int = 0, grid: int = 1) -> tuple[bytes, ...]:
    return compute_page_keys(make_request(tokens, *images), adapter, grid)


def test_a_name_covers_all_tokens_before_it() -> None:
    keys = name_pages(TOKENS)
    assert len(set(keys)) == 4
    assert name_pages(TOKENS[: 2 * PAGE + 1]) == keys[:2]
    other = name_pages([*TOKENS[:PAGE], 5, *TOKENS[PAGE + 1 :]])
    assert other[0] == keys[0] and not set(other[1:]) & set(keys)
    assert not set(name_pages(TOKENS, adapter=1)) & set(keys)


def test_the_newest_token_is_in_no_named_page() -> None:
    assert len(name_pages(TOKENS[: 2 * PAGE])) == 1
    assert name_pages(TOKENS[:1]) == name_pages([]) == ()


def test_only_whole_chunks_are_named_where_the_rest_may_differ() -> None:
    assert len(name_pages(TOKENS, grid=3 * PAGE)) == 3
    assert len(name_pages(TOKENS, grid=64)) == 4
    assert len(name_pages(TOKENS[: 2 * PAGE + 70], grid=3 * PAGE)) == 0


def test_a_name_covers_what_an_image_shows() -> None:
    """From the first page that has some of it on; before, it is as in text."""
    text, one, other = name_pages(TOKENS), name_pages(TOKENS, b"one"), name_pages(TOKENS, b"other")
    assert name_pages([*TOKENS[:-1], 5], b"one") == one
    assert text[0] == one[0] == other[0]
    assert len({*text, *one, *other}) == 1 + 3 * 3


def test_the_place_of_an_image_counts() -> None:
    spans = ((2, 9), (20, 27))
    tokens = [1 if any(a <= at < b for a, b in spans) else 0 for at in range(PAGE + 1)]
    keys = {
        compute_page_keys(make_request(tokens, *images, spans=at), 0)
        for images, at in [
            ((b"1", b"2"), spans),
            ((b"2", b"1"), spans),
            ((b"1",), spans[:1]),
            ((b"1",), spans[1:]),
        ]
    }
    assert len(keys) == 4


def test_no_chunk_ends_inside_an_image() -> None:
    """So up to the chunk before it the bytes are those of any prompt."""
    assert len(name_pages(TOKENS, b"one", grid=2 * PAGE)) == 4
    assert len(name_pages(TOKENS[: 3 * PAGE], b"one", grid=2 * PAGE)) == 0


def test_a_chunk_that_ends_before_an_image_is_another_one() -> None:
    """Its tokens may have other bytes than in a longer one."""
    text, one = name_pages(TOKENS, grid=2 * PAGE), name_pages(TOKENS, b"one", grid=2 * PAGE)
    assert text[0] != one[0]
    inside = make_request(TOKENS, b"one", spans=[(PAGE + 10, 2 * PAGE)])
    assert text[0] == compute_page_keys(inside, 0, 2 * PAGE)[0]


def test_what_is_not_known_has_no_names() -> None:
    request = make_request(TOKENS, b"one")
    assert compute_page_keys(replace(request, image_spans=(), image_digests=()), 0) == ()
    assert compute_page_keys(replace(request, image_digests=()), 0) == ()
    gaps = replace(make_request(TOKENS), positions=tuple(range(0, 2 * len(TOKENS), 2)))
    assert compute_page_keys(gaps, 0) == ()
