"""Prompts whose tokens up to the last image are one span, with the digest of all that is in it; and digests
that cover all images."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxrun.core.errors import RequestError
from mlxrun.core.request import Request, SamplingParams
from mlxrun.engine.engine import join_digests, join_media_spans

IDS = tuple(range(20))
REQUEST = Request(
    "a",
    IDS,
    SamplingParams(max_tokens=1),
    image_spans=((3, 5), (8, 12)),
    image_digests=(b"1" * 16, b"2" * 16),
    media={"pixel_values": 0},
)


def test_one_span_to_the_end_of_the_last_image() -> None:
    joined = join_media_spans(REQUEST)
    assert joined.image_spans == ((0, 12),) and len(joined.image_digests) == 1
    assert joined.prompt == IDS and joined.media is REQUEST.media


def test_the_digest_is_of_images_and_of_the_text_between_them() -> None:
    own = join_media_spans(REQUEST).image_digests
    other_text = replace(REQUEST, prompt=(*IDS[:6], 99, *IDS[7:]))
    other_image = replace(REQUEST, image_digests=(b"1" * 16, b"3" * 16))
    later_text = replace(REQUEST, prompt=(*IDS[:15], 99, *IDS[16:]))
    assert join_media_spans(other_text).image_digests != own
    assert join_media_spans(other_image).image_digests != own
    assert join_media_spans(later_text).image_digests == own


@pytest.mark.parametrize("known", [{"image_spans": (), "image_digests": ()}, {"image_digests": ()}])
def test_what_is_not_known_is_not_cached(known: dict[str, tuple[()]]) -> None:
    joined = join_media_spans(replace(REQUEST, **known))  # type: ignore[arg-type]
    assert len(joined.image_spans) == 1 and joined.image_digests == ()


def test_a_whole_prompt_is_one_span_with_its_last_token() -> None:
    joined = join_media_spans(replace(REQUEST, media=None), whole_prompt=True)
    assert joined.image_spans == ((0, len(IDS)),) and joined.image_digests == ()


def test_logprobs_of_such_a_prompt_are_refused() -> None:
    wanted = replace(REQUEST, params=SamplingParams(max_tokens=1, prompt_logprobs=0))
    with pytest.raises(RequestError, match="prompt_logprobs are not supported for prompts with images"):
        join_media_spans(wanted)
    with pytest.raises(RequestError, match="prompt_logprobs are not supported for prompts of this model"):
        join_media_spans(wanted, whole_prompt=True)


def test_joined_digests_tell_images_apart_and_cover_all() -> None:
    own, other = join_digests(REQUEST).image_digests
    assert own != other
    fewer = replace(REQUEST, image_spans=((3, 5),), image_digests=(b"1" * 16,))
    assert own not in join_digests(fewer).image_digests
    assert join_digests(REQUEST).image_digests == (own, other)
    assert join_digests(replace(REQUEST, image_digests=())).image_digests == ()
