"""The source of drafts by a checkpoint's own head, and its interface for the runner.

The head needs the hidden states of every forward of the target. hidden_hook.py takes them while the model
computes its logits as usual. An error of the head never fails a forward: the source remembers it, and raises
it when the scheduler asks for drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlxrun.core.draft_source import KnownRow
from mlxrun.core.request import Request
from mlxrun.core.step_plan import PrefillChunk
from mlxrun.model.run.hidden_hook import HiddenStateHook
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.prompt_inputs import TEXT_ONLY
from mlxrun.model.run.prompt_logprobs import PrefillForward
from mlxrun.model.run.sampler import RowSampling, Sampler
from mlxrun.model.speculation.mtp_head import MTPHead
from mlxrun.model.speculation.mtp_rows import KEPT, MTPRows

log = logging.getLogger(__name__)
# Of a row's settings: what depends on the tokens before. The noise of its temperature is that of each
# position, which is the same when the token is verified.
_NOT_FOLLOWED: dict[str, Any] = {
    "logprobs": None,
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class MTPSource:
    """A DraftSource (core/draft_source.py) that gets hidden states from the runner. `embed`: makes the
    target's embeddings; `vocab`: width of its logits."""

    name = "mtp"

    def __init__(
        self,
        caller: ModelCaller,
        hook: HiddenStateHook,
        head: MTPHead,
        embed: Callable[[mx.array], mx.array],
        vocab: int,
        *,
        max_tokens: int,
        launch_first: bool = False,
        compiled: bool = False,
    ) -> None:
        self._hook = hook
        self._vocab = vocab
        self.max_tokens = max_tokens
        self.cost = 1.0  # until it is measured
        self._decodes: tuple[Callable[..., mx.array], Callable[..., mx.array]] | None = None
        self._error: Exception | None = None
        unused = caller.make_cache()

        def predict(hidden: mx.array) -> mx.array:
            ids = mx.zeros(hidden.shape[:2], mx.int32)
            return hook.compute_logits(hidden, lambda own: own.prefill(ids, unused, 0, TEXT_ONLY))

        self.rows = MTPRows(head, embed, predict, launch_first=launch_first, compiled=compiled)

    # -- what the planner asks ----------------------------------------------------------------------------

    def takes(self, request: Request) -> bool:
        return True

    def advance(self, rows: Sequence[KnownRow]) -> None:
        """Do nothing, since the runner reports the rows' tokens."""

    def is_ready(self, row: KnownRow) -> bool:
        return self._error is not None or self.rows.is_ready(row.id)

    def propose(self, rows: Sequence[KnownRow], limits: Sequence[int]) -> Sequence[tuple[int, ...]]:
        if self._error is not None:
            raise self._error
        params = [replace(row.request.params, **_NOT_FOLLOWED) for row in rows]
        sampler = Sampler([RowSampling(each) for each in params], self._vocab)

        def sample(logits: mx.array, place: int) -> mx.array:
            return sampler(logits, [row.num_tokens + place for row in rows]).tokens

        by_row = {row.id: limit for row, limit in zip(rows, limits, strict=True)}
        drafted = self.rows.draft(by_row, sample)
        return [drafted[row.id] for row in rows]

    def forget(self, request_id: str) -> None:
        """Do nothing, since the runner reports the rows."""

    def close(self) -> None:
        self.rows.reset()
        self._error = self._error or RuntimeError("it is closed")  # the runner may still tell

    # -- what the runner tells ----------------------------------------------------------------------------

    def call_prefill(self, forward: PrefillForward) -> tuple[mx.array, mx.array]:
        """Logits [rows, n, V] and hidden states [rows, n, D] of a forward of prompts."""
        return self._hook.record(forward.call)

    def make_decode(self, numbers: Iterable[int]) -> Callable[..., mx.array]:
        """As `ModelCaller.make_decode`, with the hidden states after the logits, [B, 1, V + D], so that a
        compiled forward returns both."""
        plain = self._hook.caller.make_decode(numbers)
        if self._decodes is None or self._decodes[0] != plain:  # a compiled forward knows it by its identity

            def decode(*args: Any) -> mx.array:
                logits, hidden = self._hook.record(lambda _: plain(*args))
                return mx.concatenate([logits, hidden.astype(logits.dtype)], axis=-1)

            self._decodes = plain, decode
        return self._decodes[1]

    def split(self, output: mx.array) -> tuple[mx.array, mx.array]:
        """Logits [rows, V] and hidden states [rows, D] of a decode step."""
        return output[:, : self._vocab], output[:, self._vocab :].astype(self.rows.cache.keys.dtype)

    def read_chunk(self, chunk: PrefillChunk, hidden: mx.array, tokens: Sequence[int]) -> None:
        """Take in the hidden states [n, D] of a chunk of a row's `tokens`, as far as the head will see
        them."""
        start = max(chunk.start, len(tokens) - KEPT)
        behind, skipped = tokens[start + 1 : chunk.stop + 1], start - chunk.start
        self.read_prompt(chunk.request_id, hidden[skipped : skipped + len(behind)], behind)

    def read_prompt(self, request_id: str, hidden: mx.array, tokens: Sequence[int] | mx.array) -> None:
        """See MTPRows."""
        self._guard(lambda: self.rows.read_prompt(request_id, hidden, tokens))

    def read_step(
        self,
        request_ids: Sequence[str],
        hidden: mx.array,
        tokens: mx.array,
        counts: Sequence[int] | None = None,
        kept: Sequence[int] | None = None,
    ) -> None:
        """See MTPRows."""
        self._guard(lambda: self.rows.read_step(request_ids, hidden, tokens, counts, kept))

    def _guard(self, call: Callable[[], None]) -> None:
        if self._error is not None:
            return
        try:
            call()
        except Exception as error:  # a library's layer may raise anything, and no answer needs it
            log.error("the head that drafts failed: %s", error, exc_info=error)
            self._error = error
            self.rows.reset()
