"""Decode steps: rows join with their own caches, leave, and keep their tokens and samplers in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.core.request import SamplingParams
from mlxrun.model.kernels.kernel_source import PAGE
from mlxrun.model.kv.paged import paged_batch
from mlxrun.model.kv.paged.paged_batch import PagedDecodeBatch
from mlxrun.model.kv.ragged.layer_caches import FilledTogether
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.model.run.decode import DecodeRunner, make_joining
from mlxrun.model.run.model_caller import run_trial_forward
from mlxrun.model.run.prompt_inputs import TEXT_ONLY
from mlxrun.model.run.sampler import RowSampling
from mlxrun.model.run.step_output import LogitsBatch, RunningRow
from tests.helpers import text_models
from tests.helpers.model_fixtures import Zoo
from tests.helpers.runner_driver import load_tiny_caller

PROMPTS = dict(zip("abc", text_models.prompts(9, (4, 30, 11)), strict=True))


class Decoding:
    """A DecodeRunner and rows whose prompts are prefilled but for their last token."""

    def __init__(self, zoo: Zoo, methods: ComputeMethods) -> None:
        self.caller = load_tiny_caller(zoo.text("llama"))
        _, vocab = run_trial_forward(self.caller)
        self.runner = DecodeRunner(self.caller, vocab, methods)
        self.rows = {name: self._prefill(prompt, vocab) for name, prompt in PROMPTS.items()}
        self.tokens = {name: list(prompt) for name, prompt in PROMPTS.items()}

    def _prefill(self, prompt: Sequence[int], vocab: int) -> RunningRow:
        cache = self.caller.make_cache()
        self.caller.prefill(mx.array([list(prompt[:-1])]), cache, 0, TEXT_ONLY)
        sampling = RowSampling.start(SamplingParams(), prompt, (), vocab)
        return RunningRow(list(prompt), TEXT_ONLY, sampling, cache, mx.array(prompt[-1:]), len(prompt) - 1)

    def step(self, *names: str) -> LogitsBatch | None:
        """One step; each row's next token is the likeliest one, and every row is checked."""
        batches = self.runner.forward(names, self.rows, {})
        if not names:
            assert batches == []
            return None
        (batch,) = batches
        assert set(batch.ids) == set(names)
        newest = mx.argmax(batch.logits, axis=-1)
        self.runner.newest_tokens = newest
        for index, name in enumerate(batch.ids):
            self.check_row(name, np.array(batch.logits[index]))
            assert batch.positions[index] == len(self.tokens[name])
            self.tokens[name].append(int(newest[index].item()))
        return batch

    def check_row(self, name: str, logits: np.ndarray) -> None:
        """Compare with the library's model over all of the row's tokens."""
        expected = np.array(self.caller.model(mx.array([self.tokens[name]]))[0, -1])
        assert np.abs(logits - expected).max() < 1e-4, name


METHODS = {
    "ragged": ComputeMethods(),
    "grouped": ComputeMethods("grouped"),
    "row by row": ComputeMethods("row_by_row"),
    "fixed width": ComputeMethods(fixed_width=4),
}


@pytest.mark.parametrize("methods", METHODS.values(), ids=METHODS)
def test_rows_join_and_leave_without_changing_the_others(zoo: Zoo, methods: ComputeMethods) -> None:
    decoding = Decoding(zoo, methods)
    for names in (("b",), ("a", "b"), ("a", "b", "c"), ("a", "c"), ("a", "c"), ("c",)):
        decoding.step(*names)


def test_without_rows_nothing_is_computed(zoo: Zoo) -> None:
    decoding = Decoding(zoo, ComputeMethods())
    decoding.step("a")
    decoding.step()
    assert decoding.runner.order == [] and decoding.runner.newest_tokens is None
    decoding.step("b")


@pytest.mark.parametrize("left", [(), ("a",)])
def test_pages_for_a_row_that_never_comes_are_given_back(
    zoo: Zoo, left: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt was computed beside other rows, and its request ended before it joined them."""
    monkeypatch.setattr(paged_batch, "FEW_PAGES", 4)
    decoding = Decoding(zoo, ComputeMethods("paged"))
    decoding.rows["long"] = replace(decoding.rows["c"], tokens=[1] * (20 * PAGE))
    batch = decoding.runner.batch
    assert isinstance(batch, PagedDecodeBatch)
    capacities = []
    for names in (("a", "b"), left, left):
        decoding.step(*names)
        capacities.append(batch._tables[None].capacity)
    del decoding.rows["long"]
    decoding.step(*left)
    assert min(capacities) > 20 and batch._tables[None].capacity <= 4


def test_no_pages_are_kept_for_rows_that_never_decode(zoo: Zoo) -> None:
    decoding = Decoding(zoo, ComputeMethods("paged"))
    sampling = replace(decoding.rows["c"].sampling, params=SamplingParams(max_tokens=0))
    decoding.rows["long"] = replace(decoding.rows["c"], tokens=[1] * (20 * PAGE), sampling=sampling)
    decoding.step("a", "b")
    batch = decoding.runner.batch
    assert isinstance(batch, PagedDecodeBatch) and batch._tables[None].capacity <= 4


def test_rows_leave_the_caches_that_they_filled_together(zoo: Zoo) -> None:
    """Once they have joined, and if they have computed more since."""
    decoding = Decoding(zoo, ComputeMethods("paged"))
    row, cache = decoding.rows["a"], list(decoding.rows["b"].cache)
    row.together = FilledTogether(cache, 0, row.cached)
    assert make_joining("a", row).together is row.together
    row.together = FilledTogether(cache, 0, row.cached - 1)
    assert make_joining("a", row).together is None
    decoding.step("a")
    assert row.together is None and row.cache == []


def test_the_sampler_follows_the_order_of_the_batch(zoo: Zoo) -> None:
    decoding = Decoding(zoo, ComputeMethods())
    batch = decoding.step("a", "b", "c")
    assert batch is not None
    assert list(batch.ids) == decoding.runner.order == decoding.runner.batch.ids


def test_the_comparison_sees_tokens_given_to_the_wrong_rows(zoo: Zoo) -> None:
    """The mutation twin: the newest tokens in reverse."""
    decoding = Decoding(zoo, ComputeMethods())
    decoding.step("a", "b", "c")
    tokens = decoding.runner.newest_tokens
    assert tokens is not None and len(set(tokens.tolist())) > 1
    decoding.runner.newest_tokens = tokens[::-1]
    with pytest.raises(AssertionError):
        decoding.step("a", "b", "c")
