"""Slices of logits: which tokens they are of, how large they are, and what is made of them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.core.request import Request, SamplingParams, TokenLogprob
from mlxrun.core.step_plan import PrefillChunk, PromptLogprobs
from mlxrun.model.hooks.adapted_layers import RowAdapters
from mlxrun.model.run import prompt_logprobs
from mlxrun.model.run.prompt_inputs import TEXT_ONLY
from mlxrun.model.run.prompt_logprobs import (
    LogprobPart,
    LogprobSlice,
    PrefillForward,
    PromptLogprobReader,
    RowLogprobs,
    compute_logprobs,
    read_prompt_logprobs,
)


def make_scoring(size: int = 20, first: int = 1, spans: tuple[tuple[int, int], ...] = ()) -> RowLogprobs:
    return RowLogprobs(tuple(range(size)), first, 1, spans)


@pytest.mark.parametrize("count", [1, 3, 8, 50])
def test_logprobs_are_those_of_a_log_softmax(count: int) -> None:
    logits = mx.random.normal((5, 8), key=mx.random.key(3)) * 4
    targets = mx.array([0, 7, 3, 3, 2])
    expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    chosen, ranks, ids, values = (np.array(a) for a in compute_logprobs(logits, targets, count))
    assert np.allclose(chosen, expected[range(5), targets.tolist()], atol=1e-6)
    assert ranks.tolist() == [
        1 + sum(row > row[at]) for row, at in zip(expected, targets.tolist(), strict=True)
    ]
    wanted = np.sort(expected, axis=-1)[:, ::-1][:, :count]
    assert np.allclose(values, wanted, atol=1e-6)
    assert np.array_equal(np.take_along_axis(expected, ids, axis=-1).argsort(axis=-1)[:, -1], np.zeros(5))


def test_half_precision_is_reduced_in_float32() -> None:
    logits = (mx.random.normal((2, 300), key=mx.random.key(1)) * 8).astype(mx.bfloat16)
    chosen, *_ = compute_logprobs(logits, mx.array([1, 2]), 1)
    exact = logits.astype(mx.float32)
    exact = exact - mx.logsumexp(exact, axis=-1, keepdims=True)
    wanted = [exact[0, 1].item(), exact[1, 2].item()]
    assert chosen.dtype == mx.float32 and chosen.tolist() == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("scoring", "start", "stop", "positions"),
    [
        (make_scoring(), 0, 4, [1, 2, 3, 4]),
        (make_scoring(), 4, 8, [5, 6, 7, 8]),
        (make_scoring(), 16, 20, [17, 18, 19]),
        (make_scoring(), 16, 24, [17, 18, 19]),
        (make_scoring(first=6), 4, 8, [6, 7, 8]),
        (make_scoring(first=9), 4, 8, []),
        (make_scoring(spans=((5, 7), (8, 10))), 4, 8, [7]),
        (make_scoring(spans=((2, 4),)), 0, 8, [1, 4, 5, 6, 7, 8]),
    ],
)
def test_a_chunk_scores_the_tokens_after_its_own(
    scoring: RowLogprobs, start: int, stop: int, positions: list[int]
) -> None:
    assert scoring.list_positions(start, stop) == positions


def test_only_requests_that_want_logprobs_are_scored() -> None:
    assert RowLogprobs.start(Request("a", (1, 2), SamplingParams())) is None
    scoring = RowLogprobs.start(Request("a", (1, 2), SamplingParams(prompt_logprobs=0), logprobs_from=0))
    assert scoring == RowLogprobs((1, 2), 1, 1, ())


@pytest.mark.parametrize("first", [1, 9, 10, 19])
def test_aligned_slices_do_not_depend_on_what_is_wanted(first: int) -> None:
    scorer = PromptLogprobReader(None, 100, 1, aligned=True)  # type: ignore[arg-type]  # slices of 8 tokens
    part = LogprobPart(0, PrefillChunk("a", 0, 19), make_scoring(first=first))
    forward = PrefillForward([list(range(19))], [], 0, TEXT_ONLY, ())
    slices = [rows for rows, _ in scorer._cut(forward, [part])]
    every = [list(range(8)), list(range(8, 16)), [16, 17, 18]]
    assert slices == every[(first - 1) // 8 :]


@pytest.mark.parametrize(("vocab", "size"), [(256, 256), (152_000, 55), (10**9, 8)])
def test_slices_are_bounded_in_bytes(vocab: int, size: int) -> None:
    scorer = PromptLogprobReader(None, vocab, prompt_logprobs.SLICE_BYTES, aligned=False)  # type: ignore[arg-type]
    assert scorer._size == size


@pytest.mark.parametrize(("weights", "most"), [(0, 4 << 20), (80 << 20, 10 << 20), (1 << 30, 32 << 20)])
def test_slices_are_small_beside_the_weights(weights: int, most: int) -> None:
    assert prompt_logprobs.choose_slice_bytes(weights) == most


def test_scores_are_read_by_request_and_in_order() -> None:
    def make_slice(tokens: list[tuple[str, int]]) -> LogprobSlice:
        at = mx.array([float(position) for _, position in tokens])
        ids = at.astype(mx.int32)
        return LogprobSlice(tokens, -at, ids + 1, ids[:, None], -at[:, None])

    slices = [make_slice([("a", 3), ("b", 9), ("a", 4)]), make_slice([("a", 7), ("a", 5), ("gone", 1)])]

    def make(*positions: int) -> tuple[TokenLogprob, ...]:
        return tuple(TokenLogprob(-float(at), ((at, -float(at)),), at + 1) for at in positions)

    assert read_prompt_logprobs(slices, ["gone"]) == (
        PromptLogprobs("a", 3, make(3, 4, 5)),
        PromptLogprobs("a", 7, make(7)),
        PromptLogprobs("b", 9, make(9)),
    )


class SmallForwards:
    """An adapter without hidden states, which notes the widths of its forwards."""

    def __init__(self) -> None:
        self.widths: list[int] = []
        self.row_adapters = RowAdapters()

    def use_attention(self, calls_per_launch: int) -> nullcontext[None]:
        return nullcontext()

    def prefill(self, ids: mx.array, cache: Any, start: int, inputs: Any) -> mx.array:
        self.widths.append(ids.shape[1])
        return mx.eye(40)[ids] * 9.0


def test_without_hidden_states_forwards_are_as_small_as_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "find_hidden_hook", lambda adapter: None)
    adapter = SmallForwards()
    scorer = PromptLogprobReader(adapter, 40, 1, aligned=False)  # type: ignore[arg-type]
    part = LogprobPart(0, PrefillChunk("a", 10, 29), make_scoring(40))
    done = scorer.forward(PrefillForward([list(range(10, 29))], [], 10, TEXT_ONLY, ()), [part])
    assert adapter.widths == [8, 8, 3]
    (scores,) = read_prompt_logprobs(done.slices)
    assert (scores.start, [score.top[0][0] for score in scores.logprobs]) == (11, list(range(10, 29)))
    assert done.last.argmax().item() == 28


def test_logits_of_many_slices_are_not_in_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is that of a few slices; the twin, which evaluates nothing in between, needs all of them."""
    vocab, slices = 20_000, 24

    def measure_peak() -> int:
        scorer = PromptLogprobReader(None, vocab, 8 * vocab * 4, aligned=False)  # type: ignore[arg-type]
        part = LogprobPart(0, PrefillChunk("a", 0, 200), make_scoring(200))
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        base = mx.get_active_memory()
        states = mx.random.normal((8, 4))
        tokens = [("a", at) for at in range(1, 9)]
        made = [scorer.reduce_logits(states @ mx.ones((4, vocab)), tokens, [part]) for _ in range(slices)]
        mx.eval([array for scored in made for array in scored.list_arrays()])
        return mx.get_peak_memory() - base

    bounded = measure_peak()
    monkeypatch.setattr(PromptLogprobReader, "bound_memory", lambda *args: None)
    assert bounded * 2 < measure_peak()


@pytest.mark.parametrize("count", [1, 2, 5, 20])
def test_of_equally_likely_tokens_the_lowest_ids_come_first(count: int) -> None:
    """However many are asked for, so that the likeliest token does not depend on other requests."""
    logits = np.random.default_rng(7).integers(0, 8, (16, 300)).astype(np.float32)
    _, _, ids, _ = compute_logprobs(mx.array(logits), mx.zeros(16, dtype=mx.int32), count)
    assert np.array_equal(ids, np.argsort(-logits, axis=-1, kind="stable")[:, :count])
