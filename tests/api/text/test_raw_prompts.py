"""Completions with a suffix: the answer fills in the text between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.api.text.raw_prompts import FORMATS, build_infill_ids, split_windows
from tests.helpers.infill_models import make_infill_model
from tests.helpers.openai_api import COMPLETION, complete, make, refused
from tests.helpers.tokenizers import FakeModelInfo, byte_tokenizer, ids_of


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


SHORT = FakeModelInfo(context_length=9)
PLAIN: dict[str, Any] = {"echo": True, "logprobs": 0, "max_tokens": 0}
Contexts = list[tuple[tuple[int, ...], int]]  # what the model sees before a token, and the token


def list_contexts(ids: Sequence[int], size: int, stride: int) -> Contexts:
    return [
        (window[:at], window[at])
        for window, start in split_windows(ids, size, stride)
        for at in range(start, len(window))
    ]


def list_rolling_contexts(ids: Sequence[int], size: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """As lm_eval.utils.get_rolling_token_windows and make_disjoint_window give them, with `context_len` 1."""
    first, tokens = ids[0], list(ids[1:])
    predicted = min(size, len(tokens))
    windows = [([first, *tokens[: predicted - 1]], tokens[:predicted])]
    while predicted < len(tokens):
        count = min(len(tokens) - predicted, size)
        end = predicted + count
        windows.append((tokens[end - size - 1 : end - 1], tokens[end - count : end]))
        predicted = end
    for context, wanted in windows:
        kept = context[: len(context) - (len(wanted) - 1)]
        for at, token in enumerate(wanted):
            yield (*kept, *wanted[:at]), token


def list_strided_contexts(
    ids: Sequence[int], size: int, stride: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """As in the page on perplexity of transformers' documentation, with windows of one token more, which is
    the one that begins the text."""
    before = 0
    for begin in range(0, len(ids), stride):
        end = min(begin + size + 1, len(ids))
        for at in range(max(before, begin + 1), end):
            yield tuple(ids[begin:at]), ids[at]
        before = end
        if end == len(ids):
            return


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 20))
def test_every_token_counts_once_with_enough_before_it(count: int, size: int, stride: int) -> None:
    stride, ids = min(stride, size), range(count + 1)
    contexts = list_contexts(ids, size, stride)
    assert [token for _, token in contexts] == list(ids[1:])
    for before, token in contexts:
        assert before == tuple(range(token - len(before), token)) and 1 <= len(before) <= size
        assert token <= size or len(before) > size - stride


@given(st.integers(1, 60), st.integers(1, 20))
def test_a_stride_of_the_size_is_that_of_the_harness(count: int, size: int) -> None:
    assert list_contexts(range(count + 1), size, size) == list(list_rolling_contexts(range(count + 1), size))


@pytest.mark.parametrize(("size", "stride", "steps"), [(8, 8, 3), (8, 4, 5), (6, 1, 9), (5, 3, 0)])
def test_a_smaller_stride_is_that_of_transformers(size: int, stride: int, steps: int) -> None:
    """For a text whose last window is full; else theirs has less before it."""
    full = range(size + stride * steps + 1)
    assert list_contexts(full, size, stride) == list(list_strided_contexts(full, size, stride))
    more = range(size + stride * steps + 2)
    if stride > 1:
        ours, theirs = (
            each[-1][0]
            for each in (
                list_contexts(more, size, stride),
                list(list_strided_contexts(more, size, stride)),
            )
        )
        assert len(ours) == size > len(theirs)


def test_requests_have_the_windows_of_a_text() -> None:
    """They begin with the token that begins texts, and with no other that the tokenizer adds."""
    tokenizer = byte_tokenizer()
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    text = "abcdefghijklm"
    prepared = complete(prompt=text, prompt_windows={"size": 6, "stride": 4}, **PLAIN)
    wanted = list(split_windows((first, *ids_of(text)), 6, 4))
    assert [(each.prompt, each.logprobs_from) for each in prepared.requests] == wanted
    assert all(each.params.max_tokens == 0 for each in prepared.requests)
    assert prepared.window_text == text and len(wanted) == 3


def test_the_usual_window_is_the_context() -> None:
    requests = make(COMPLETION, {"prompt": "a" * 20, "prompt_windows": {}, **PLAIN}, SHORT).requests
    assert [len(each.prompt) for each in requests] == [9, 9, 9]
    assert [each.logprobs_from for each in requests] == [1, 1, 5]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"prompt": ["a", "b"]}, "prompt", "must be one text"),
        ({"prompt": ""}, "prompt", "must be one text"),
        ({"prompt": [1, 2]}, "prompt", "must be one text"),
        ({"max_tokens": 1}, "prompt_windows", "needs `echo: true, logprobs: 0, max_tokens: 0`"),
        ({"echo": False}, "prompt_windows", "needs `echo: true, logprobs: 0, max_tokens: 0`"),
        ({"logprobs": 2}, "prompt_windows", "needs `echo: true, logprobs: 0, max_tokens: 0`"),
        ({"suffix": "x"}, "suffix", "not together with prompt_windows"),
        ({"n": 2}, "n", "not together with prompt_windows"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "not together with prompt_windows"),
        ({"prompt_windows": {"size": 9}}, "prompt_windows.size", "the model has a context of 9 tokens"),
        ({"prompt_windows": {"size": 4, "stride": 5}}, "prompt_windows.stride", "tokens would be left out"),
        ({"prompt_windows": {"stride": 0}}, "prompt_windows.stride", "minimum"),
        ({"prompt_windows": {"length": 4}}, "prompt_windows.length", "unknown"),
        ({"prompt": "a" * 2100, "prompt_windows": {"size": 1}}, "prompt_windows", "at most 2048 are allowed"),
    ],
)
def test_what_is_refused(body: dict[str, Any], param: str, says: str) -> None:
    error = refused(COMPLETION, {"prompt": "abc", "prompt_windows": {"size": 4}, **PLAIN, **body}, SHORT)
    assert error.param == param and says in str(error)
