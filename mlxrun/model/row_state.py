"""A running request as the runner keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxrun.model.grammar_masks import RowGrammar
from mlxrun.model.prompt_inputs import PromptInputs
from mlxrun.model.ragged.row_group import BUFFER_STEP
from mlxrun.model.sampler import RowSampling
from mlxrun.scheduler.request import SamplingParams


@dataclass(slots=True, eq=False)
class RowState:
    """`cache` belongs to the row until the row joins the decode batch, and is empty from then on."""

    tokens: list[int]  # the prompt, and the answer so far if the request was preempted
    inputs: PromptInputs
    sampling: RowSampling
    cache: list[Any]
    newest_token: mx.array  # [1]: input of the first decode step
    cached: int = 0  # tokens in `cache`
    has_sampled: bool = False  # a token of this row was launched
    grammar: RowGrammar | None = None  # knows all tokens that were read

    @property
    def params(self) -> SamplingParams:
        return self.sampling.params


def compute_capacity(tokens: Sequence[int], params: SamplingParams) -> int:
    """Tokens that a row's cache should hold before it has to grow."""
    return len(tokens) + min(params.max_tokens, BUFFER_STEP)
