"""Completions with a suffix: the answer fills in the text between."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.api.text.raw_prompts import FORMATS, build_infill_ids
from tests.helpers.infill_models import make_infill_model
from tests.helpers.openai_api import COMPLETION, complete, make, refused


def test_every_token_of_the_format_ends_the_answer() -> None:
    """Of a request with a suffix, and only of such a one; also with a minimum."""
    found = FORMATS["codellama"]
    model = make_infill_model(found)
    ends = {model.tokenizer.convert_tokens_to_ids(each) for each in (*found.marks, *found.ends)}
    params = complete(model, prompt="a", suffix="b", min_tokens=2).requests[0].params
    assert params.stop_ids == params.end_ids == model.eos_ids | ends
    assert complete(model, prompt="a").requests[0].params.stop_ids == model.eos_ids
    assert complete(model, prompt="a", suffix="").requests[0].params.stop_ids == model.eos_ids
    assert complete(model, suffix="b", ignore_eos=True).requests[0].params.stop_ids == frozenset()


def test_requests_with_a_suffix() -> None:
    """Several prompts share it; the echo is the prompt as it was sent; an empty one is none."""
    found = FORMATS["qwen2.5-coder, qwen3-coder, codegemma, granite 4"]
    model = make_infill_model(found)
    prepared = complete(model, prompt=["a", "b"], suffix="c", echo=True)
    assert [request.prompt for request in prepared.requests] == [
        build_infill_ids(model, found, prefix, "c") for prefix in "ab"
    ]
    assert prepared.echoed_prompts == ("a", "b")
    empty = complete(model, prompt="a", suffix="").requests[0].prompt
    assert empty == complete(model, prompt="a").requests[0].prompt != prepared.requests[0].prompt
    assert make(COMPLETION, {"prompt": "", "suffix": "c"}, model).requests[0].prompt


def test_where_scored_prompts_branch() -> None:
    """The answers to one question: before the token that predicts the first different one. Other prompts, and
    those that are not scored, have no cache_positions."""
    scored = {"echo": True, "logprobs": 1, "max_tokens": 0}
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 3, 6, 7], [9, 9], [9, 9], [8]]
    found = [request.cache_positions for request in complete(prompt=prompts, **scored).requests]
    assert found == [(2,), (2, 3), (3,), (1,), (1,), ()]
    assert [r.cache_positions for r in complete(prompt=prompts[:2], prompt_logprobs=0).requests] == [
        (2,),
        (2,),
    ]
    assert [r.cache_positions for r in complete(prompt=prompts, logprobs=1).requests] == [()] * 6
    assert complete(prompt=[prompts[0]], **scored).requests[0].cache_positions == ()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1, 2], "suffix": "c"}, "suffix"),
        ({"prompt": "a", "suffix": "\ud800"}, "suffix"),
        ({"prompt": "\ud800", "suffix": "a"}, "prompt"),
        ({"prompt": "a", "suffix": ["c"]}, "suffix"),
    ],
)
def test_bad_suffixes(body: dict[str, Any], param: str) -> None:
    assert refused(COMPLETION, body, make_infill_model(FORMATS["santacoder"])).param == param


def test_a_model_that_cannot_fill_in_says_so() -> None:
    error = refused(COMPLETION, {"prompt": "a", "suffix": "b"})
    assert (error.param, error.code, error.http_status) == ("suffix", "unsupported_parameter", 400)
    assert "vocabulary" in str(error)
