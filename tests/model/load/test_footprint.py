"""The memory of a row as it is read off the library's caches, for each kind of layer."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from mlxrun.config.settings import CacheSettings, Config, MediaSettings, ModelSettings, SchedulerSettings
from mlxrun.core.memory_budget import MemoryBudget
from mlxrun.model.kv.ragged.quantized_buffer import KVQuantization
from mlxrun.model.load.footprint import (
    ACTIVATION_FACTOR,
    PADDING_FACTOR,
    make_encoder_budget,
    make_memory_budget,
    measure_footprint,
)
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.run.model_caller import ModelCaller, run_trial_forward
from tests.helpers.model_fixtures import Zoo
from tests.helpers.runner_driver import load_tiny_caller

TOKEN_BYTES = 2 * 2 * 16 * 4  # keys and values, two heads of 16 float32 numbers


def load(zoo: Zoo, family: str) -> ModelCaller:
    return load_tiny_caller(zoo.text(family))


def test_attention_costs_memory_by_the_token(zoo: Zoo) -> None:
    footprint = measure_footprint(run_trial_forward(load(zoo, "llama"))[0])
    assert footprint.per_token == int(3 * TOKEN_BYTES * PADDING_FACTOR)
    assert (footprint.fixed, footprint.windows) == (0, ())


def test_quantized_rows_cost_less_once_they_decode(zoo: Zoo) -> None:
    """4 bits in groups of 32 values with a scale and a bias: 6 bits a value in place of 32."""
    cache = run_trial_forward(load(zoo, "gemma3_text"))[0]
    quantization = KVQuantization(4, 32, start=300)
    for layer in cache:  # heads that divide into groups of 32
        layer.keys, layer.values = (mx.tile(a, (1, 1, 1, 2)) for a in (layer.keys, layer.values))
    plain, footprint = measure_footprint(cache), measure_footprint(cache, quantization)
    assert footprint.packed_per_token == pytest.approx(plain.per_token * 6 / 32, abs=2)
    assert (footprint.per_token, footprint.windows) == (plain.per_token, plain.windows)
    sizes = [footprint.sum_row_bytes([n], True) for n in (301, 302)]
    assert sizes[0] == plain.compute_row_bytes(301) > 2 * sizes[1] > 0
    assert footprint.compute_row_bytes(301) == plain.compute_row_bytes(301)


def test_windows_are_bounded(zoo: Zoo) -> None:
    footprint = measure_footprint(run_trial_forward(load(zoo, "gemma3_text"))[0])
    assert footprint.windows and {window for window, _ in footprint.windows} == {8}
    assert footprint.per_token > 0, "every second layer keeps all tokens"


def test_recurrent_states_are_fixed(zoo: Zoo) -> None:
    footprint = measure_footprint(run_trial_forward(load(zoo, "mamba2"))[0])
    assert footprint.fixed > 0 and footprint.per_token == 0 and footprint.windows == ()


@pytest.mark.parametrize("rows", [1, 64])
def test_the_budget_has_room_for_weights_and_the_logits_of_all_rows(zoo: Zoo, rows: int) -> None:
    caller = load(zoo, "llama")
    cache, vocab = run_trial_forward(caller)
    info = load_model_info(ModelSettings(path=str(zoo.text("llama"))))

    def make(settings: SchedulerSettings, vision: bool = False, beside: int = 0) -> MemoryBudget:
        media, cached = MediaSettings(memory_bytes=500), CacheSettings(image_bytes=70)
        config = Config(scheduler=settings, media=media, cache=cached)
        made = replace(info, vision=vision)
        return make_memory_budget(config, made, caller.model, cache, vocab, beside)

    settings = SchedulerSettings(max_running=rows, memory_limit=10**9, memory_headroom=0.25)
    budget = make(settings)
    assert budget.limit == 750_000_000 and budget.images == budget.features == 0
    assert budget.transient == 64 * 4 * ACTIVATION_FACTOR
    assert budget.weights - make(SchedulerSettings(max_running=1)).weights == (rows - 1) * vocab * 16
    more = make(settings, vision=True, beside=1000)
    assert more.weights - budget.weights == 1570 and (more.images, more.features) == (500, 70)
    least = replace(settings, memory_limit=1)
    assert make(least).limit == 1, "0 would be unlimited"
    assert make_encoder_budget(least, 64, 1000).limit == 1
