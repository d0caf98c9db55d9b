"""Rows of a forward with drafts, and which tokens are accepted."""

from __future__ import annotations

import mlx.core as mx

from mlxrun.core.request import SamplingParams
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.model.run.sampler import RowSampling
from mlxrun.model.speculation.build import find_draft_problem
from mlxrun.model.speculation.drafted_rows import DraftedRows

VOCAB = 16


def make_rows(*drafts: tuple[int, ...], **params: object) -> DraftedRows:
    settings = SamplingParams(**params)  # type: ignore[arg-type]
    return DraftedRows.start(drafts, [RowSampling.start(settings, (1,), (2,), VOCAB) for _ in drafts])


def test_each_drafted_token_is_a_row() -> None:
    rows = make_rows((5, 6), (), (7,))
    assert rows.counts == [3, 1, 2]
    assert rows.expand_tokens(mx.array([1, 2, 3])).tolist() == [1, 5, 6, 2, 3, 7]
    assert rows.expand_positions([10, 20, 30]) == [10, 11, 12, 20, 30, 31]


def test_what_equals_the_draft_is_accepted_and_one_more() -> None:
    rows = make_rows((5, 6), (), (7,), (8, 9))
    assert rows.count_accepted([5, 6, 4, 3, 7, 2, 1, 9, 4]) == [3, 1, 2, 1]


def test_nothing_is_accepted_behind_a_stop_token() -> None:
    rows = make_rows((5, 6, 7), stop_ids=frozenset({6}))
    assert rows.count_accepted([5, 6, 7, 8]) == [2]


def test_forks_count_the_tokens_before_them() -> None:
    (forks,) = make_rows((5, 5), frequency_penalty=0.5).forks
    assert [fork.counts[5].item() for fork in forks if fork.counts is not None] == [0, 1, 2]
    assert [fork.seen[5].item() for fork in forks if fork.seen is not None] == [False, True, True]


def test_only_pages_verify_drafts() -> None:
    assert find_draft_problem(ComputeMethods("paged")) is None
    assert "decodes grouped" in str(find_draft_problem(ComputeMethods("grouped")))
