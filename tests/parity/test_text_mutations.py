"""The twins of test_parity_text.py: each plants one silent bug, and parity must fail.

`none` is the control: the same requests without a bug pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.engine.engine import Engine
from mlxrun.model.hooks import attention
from mlxrun.model.kv.ragged import decode_batch, layer_caches, recurrent_states, row_group
from mlxrun.model.run import decode, prefill
from mlxrun.model.run.chunk_grouping import PrefillSharing
from mlxrun.model.run.compute_methods import ComputeMethods, find_padding_limit
from mlxrun.model.run.decode import DecodeRunner
from mlxrun.model.run.sampler import Sampler
from tests.helpers import engine_driver, text_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.model_fixtures import Zoo, mark_sweep

Patch = pytest.MonkeyPatch
# Two rows of the shortest group, two of longer ones; three have moved up a group by the end.
PROMPTS = text_models.prompts(0, (2, 5, 14, 40))
JOINS = (0, 9, 0, 4)
RAGGED, GROUPED = ComputeMethods("ragged"), ComputeMethods("grouped")


@pytest.fixture(autouse=True)
def small(monkeypatch: Patch) -> None:
    engine_driver.use_small_groups(monkeypatch)


def wraps(monkeypatch: Patch, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))


# -- what is planted ----------------------------------------------------------------------------------------


def none(monkeypatch: Patch) -> None:
    """Nothing."""


def mask_of_a_group_dropped(monkeypatch: Patch) -> None:
    """Rows see the left padding of their group."""
    monkeypatch.setattr(row_group.RowGroup, "make_mask", lambda self, width, window: None)


def mask_of_the_first_group_for_all(monkeypatch: Patch) -> None:
    """One row's length stands for all of its group."""
    wraps(
        monkeypatch,
        row_group.RowGroup,
        "make_mask",
        lambda original: (
            lambda self, width, window: (
                None
                if (mask := original(self, width, window)) is None
                else mx.broadcast_to(mask[:1], mask.shape)
            )
        ),
    )


def window_ignored(monkeypatch: Patch) -> None:
    """A row attends to twice what its layer should keep. (In one group, where all of that is still there.)"""
    monkeypatch.setattr(decode_batch, "SHORTEST_BUCKET", 256)
    for name in ("get_width", "make_mask"):
        wraps(
            monkeypatch,
            row_group.RowGroup,
            name,
            lambda original: lambda self, *given: original(self, *given[:-1], given[-1] and 2 * given[-1]),
        )


def offsets_off_by_one(monkeypatch: Patch) -> None:
    """Keys are rotated as if one token more lay before them."""
    for stand_in in (attention.RaggedCache, attention.GroupCache):
        wraps(
            monkeypatch,
            stand_in,
            "begin_step",
            lambda original: (
                lambda self, groups, offsets, longest: original(self, groups, offsets + 1, longest)
            ),
        )


def offsets_of_the_longest_row(monkeypatch: Patch) -> None:
    """What a batch with one offset for all rows would do."""
    for stand_in in (attention.RaggedCache, attention.GroupCache):
        wraps(
            monkeypatch,
            stand_in,
            "begin_step",
            lambda original: (
                lambda self, groups, offsets, longest: original(
                    self, groups, mx.full(offsets.shape, longest, dtype=mx.int32), longest
                )
            ),
        )


def state_not_reordered(monkeypatch: Patch) -> None:
    """Recurrent state stays where it was when rows join, leave and move between groups."""

    def keep_order(parts: Sequence[mx.array | None], order: mx.array) -> mx.array | None:
        filled = [p for p in parts if p is not None]
        return mx.concatenate(filled, axis=0)[: order.size] if filled else None

    monkeypatch.setattr(recurrent_states, "reorder_state", keep_order)


def state_of_a_step_ago(monkeypatch: Patch) -> None:
    """What the model leaves in its cache is not taken over."""
    monkeypatch.setattr(
        recurrent_states,
        "concatenate_filled",
        lambda slot: mx.zeros_like(slot[0]) if slot[0] is not None else None,
    )


def newest_tokens_not_reordered(monkeypatch: Patch) -> None:
    """After rows have moved, each goes on with the token of the row that was in its place."""

    def make(original: Any) -> Any:
        def reorder(self: Any, rows: Any) -> None:
            before, order = self.newest_tokens, list(self.order)
            original(self, rows)
            if before is not None and len(order) == len(self.order) and order != self.order:
                self.newest_tokens = before

        return reorder

    wraps(monkeypatch, DecodeRunner, "_reorder", make)


def newest_tokens_of_a_step_ago(monkeypatch: Patch) -> None:
    def make(original: Any) -> Any:
        def reorder(self: Any, rows: Any) -> None:
            original(self, rows)
            self.newest_tokens = mx.roll(self.newest_tokens, 1)

        return reorder

    wraps(monkeypatch, DecodeRunner, "_reorder", make)


def sampling_states_swapped(monkeypatch: Patch) -> None:
    """Each row is sampled by its neighbour's settings."""

    def swapped(states: Sequence[Any], vocab: int) -> Sampler:
        return Sampler([*states[1:], *states[:1]], vocab)

    monkeypatch.setattr(decode, "Sampler", swapped)


def rows_joined_one_token_short(monkeypatch: Patch) -> None:
    """The newest key of the prompt is lost on the way into the batch."""

    def make(original: Any) -> Any:
        def read(layer: Any) -> Any:
            keys, values, length = original(layer)
            shifted = mx.concatenate([keys[:, :, :1], keys[:, :, : length - 1]], axis=2)
            return type(original(layer))(shifted, values[:, :, :length], length)

        return read

    wraps(monkeypatch, layer_caches, "read_keys_values", make)


def padding_taken_for_prompt(monkeypatch: Patch) -> None:
    """A row that was padded in a shared forward keeps the padding."""

    def make(original: Any) -> Any:
        def split(cache: Any, index: int, length: int, **options: Any) -> Any:
            offsets = [
                c.offset
                for c in layer_caches.flatten_caches(cache)
                if layer_caches.get_kind(c) is not layer_caches.LayerKind.STATE
            ]
            return original(cache, index, max(offsets, default=length), **options)

        return split

    wraps(monkeypatch, layer_caches, "split_row", make)


def another_row_of_a_shared_forward(monkeypatch: Patch) -> None:
    wraps(
        monkeypatch,
        layer_caches,
        "split_row",
        lambda original: lambda cache, index, length, **options: original(cache, 0, length, **options),
    )


def chunks_in_another_order(monkeypatch: Patch) -> None:
    wraps(
        monkeypatch, prefill, "group_chunks", lambda original: lambda *given: list(reversed(original(*given)))
    )


def parity(engine: Engine, zoo: Zoo, family: str, todo: Sequence[TimedRequest]) -> bool:
    """Whether all of these give what the ORACLE gives. A bug that raises is not silent, and no twin."""
    events = engine_driver.run_requests(engine, todo)
    assert [e.error for e in events.values() if e.error is not None] == []
    return not any(
        engine_driver.has_other_answer(events[ask.id], zoo.answer(family, ask.request.prompt)) for ask in todo
    )


KEYED = ("llama", "gemma3_text", "qwen3_next", "gpt_oss")
TEXT = [
    *((family, RAGGED, none) for family in text_models.CORE),
    *((family, GROUPED, none) for family in ("llama", "gemma3_text", "qwen3_next", "gpt_oss")),
    *(
        (family, RAGGED, mask_of_a_group_dropped)
        for family in ("llama", "gemma3_text", "qwen3_next", "gpt_oss")
    ),
    *((family, GROUPED, mask_of_a_group_dropped) for family in ("llama", "gemma3_text")),
    *((family, RAGGED, mask_of_the_first_group_for_all) for family in ("llama", "gpt_oss")),
    *((family, way, window_ignored) for family in ("gemma3_text", "gpt_oss") for way in (RAGGED, GROUPED)),
    *((family, RAGGED, offsets_off_by_one) for family in KEYED),
    *((family, GROUPED, offsets_of_the_longest_row) for family in ("llama", "gpt_oss")),
    *((family, RAGGED, state_not_reordered) for family in ("qwen3_next", "mamba2")),
    *((family, GROUPED, state_not_reordered) for family in ("qwen3_next",)),
    *((family, RAGGED, state_of_a_step_ago) for family in ("qwen3_next", "mamba2")),
    *((family, RAGGED, newest_tokens_not_reordered) for family in ("llama", "mamba2")),
    *((family, RAGGED, newest_tokens_of_a_step_ago) for family in ("llama",)),
    *((family, RAGGED, rows_joined_one_token_short) for family in ("llama", "gemma3_text")),
]


def mark_third_families(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """A bug is planted in two families by default, and in the others in the sweep."""
    seen: Counter[tuple[Any, ...]] = Counter()
    made = []
    for family, *methods, plant in cases:
        key = (*(m.decode for m in methods), plant.__name__)
        seen[key] += 1
        marks = pytest.mark.sweep if seen[key] > 2 and plant is not none else ()
        made.append(
            pytest.param(
                family, *methods, plant, marks=marks, id="-".join((plant.__name__, family, *key[:-1]))
            )
        )
    return made


@pytest.mark.parametrize(("family", "methods", "plant"), mark_third_families(TEXT))
def test_decode(
    zoo: Zoo, family: str, methods: ComputeMethods, plant: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    engine = engine_driver.make_real_engine(zoo.text(family), methods)
    plant(monkeypatch)
    used = PROMPTS[: 2 if plant is window_ignored else 4]
    todo = [TimedRequest(engine_driver.make_text_request(str(i), p), JOINS[i]) for i, p in enumerate(used)]
    assert parity(engine, zoo, family, todo) is (plant is none)


PREFILL = [
    *((family, none) for family in text_models.CORE),
    ("llama", padding_taken_for_prompt),
    ("gpt_oss", padding_taken_for_prompt),
    *((family, another_row_of_a_shared_forward) for family in text_models.CORE),
    ("llama", chunks_in_another_order),
    ("mamba2", chunks_in_another_order),
]


@pytest.mark.parametrize(("family", "plant"), mark_third_families(PREFILL))
def test_prefill(zoo: Zoo, family: str, plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """Chunks that share forwards: of equal length, and padded where the family allows it."""
    padded = {"llama": 16, "gemma3_text": 8, "gpt_oss": 8}.get(family, 0)
    engine = engine_driver.make_real_engine(
        zoo.text(family), ComputeMethods("ragged", PrefillSharing(4, padded))
    )
    plant(monkeypatch)
    prompts = text_models.prompts(4, (9, 8, 9, 40))
    todo = [TimedRequest(engine_driver.make_text_request(str(i), p)) for i, p in enumerate(prompts)]
    assert parity(engine, zoo, family, todo) is (plant is none)


@pytest.mark.parametrize("family", mark_sweep(["qwen3_next", "mamba2", "nemotron_h"], ["mamba2"]))
def test_padded_prefill_of_recurrent_state(zoo: Zoo, family: str) -> None:
    """Why `paddable` says no to these families, whatever the load check's short prompts say."""
    prompts = text_models.prompts(4, (9, 8, 9, 8))
    todo = [TimedRequest(engine_driver.make_text_request(str(i), p)) for i, p in enumerate(prompts)]
    for padded in (0, 16):
        engine = engine_driver.make_real_engine(
            zoo.text(family), ComputeMethods("ragged", PrefillSharing(4, padded))
        )
        assert find_padding_limit(engine_driver.get_runner(engine)._caller.make_cache(), 16) == 0
        assert parity(engine, zoo, family, todo) is (padded == 0)


@pytest.mark.parametrize("plant", [none, sampling_states_swapped, newest_tokens_not_reordered])
def test_sampling(zoo: Zoo, plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """Rows with different settings; each must give what it gives alone."""
    settings = [
        {"temperature": 0.0, "presence_penalty": 1.0},
        {"temperature": 0.0, "logit_bias": {65: 4.0}},
        {"temperature": 0.9, "seed": 1},
        {"temperature": 0.9, "seed": 2},
    ]
    todo = [
        TimedRequest(engine_driver.make_text_request(str(i), p, **more), JOINS[i])
        for i, (p, more) in enumerate(zip(PROMPTS, settings, strict=True))
    ]
    alone = engine_driver.run_requests(engine_driver.make_real_engine(zoo.text("llama"), max_running=1), todo)
    engine = engine_driver.make_real_engine(zoo.text("llama"))
    plant(monkeypatch)
    together = engine_driver.run_requests(engine, todo)
    right = all(together[ask.id].tokens == alone[ask.id].tokens for ask in todo)
    assert right is (plant is none)
