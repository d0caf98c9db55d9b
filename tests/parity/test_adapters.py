"""Rows with different LoRA adapters in one engine give what the library gives with each adapter alone.

All requests have one prompt, so that a hit of the prefix cache in another adapter's entries would show.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxrun.core.request import FinishReason, HitKind, Request, TokenEvent
from mlxrun.engine.engine import Engine
from mlxrun.engine.prefix_cache.entry import AdapterSalt
from mlxrun.model.hooks.adapted_layers import RowAdapters
from mlxrun.model.load_check import lora_checks
from mlxrun.model.run.compute_methods import ComputeMethods
from tests.helpers import engine_driver, text_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.lora_adapters import compute_answer, make_adapter
from tests.helpers.model_fixtures import Zoo
from tests.helpers.oracle import Answer

PROMPT = tuple(text_models.prompts(71, [40])[0])
COUNT = 8
# Layers that the adapters change: experts, embeddings that serve as output layer, or what is usual.
KEYS: dict[str, list[str]] = {
    "gpt_oss": ["self_attn.q_proj", "mlp.experts.gate_proj", "mlp.experts.down_proj"],
    "gemma3_text": ["self_attn.o_proj", "mlp.up_proj", "model.embed_tokens"],
    "llama": ["self_attn.q_proj", "mlp.down_proj", "lm_head"],
}
ORDER = (None, "one", "two", "one", None)  # of the rows


class Adapted:
    """A tiny model with two adapters of unequal ranks, and the answers of the library."""

    def __init__(self, folder: Path, root: Path, keys: Sequence[str], kind: str) -> None:
        self.folder = folder
        self.paths = {
            "one": str(make_adapter(folder, root / "one", 1, keys=list(keys))),
            "two": str(make_adapter(folder, root / "two", 2, kind=kind, rank=2, keys=[keys[0]])),
        }
        self.answers: Mapping[str | None, Answer] = {
            name: compute_answer(folder, self.paths.get(name or ""), PROMPT, COUNT)
            for name in (None, *self.paths)
        }

    def make_engine(self, **options: Any) -> Engine:
        return engine_driver.make_real_engine(
            self.folder, **{"adapters": self.paths, "load_check": False} | options
        )

    def check(self, events: Mapping[str, TokenEvent]) -> bool:
        """Whether each event has the answer of its adapter."""
        pairs = [(self.answers[ORDER[int(name)]], event) for name, event in events.items()]
        return not any(engine_driver.has_other_answer(event, answer) for answer, event in pairs)


@pytest.fixture(scope="module")
def models(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Adapted]:
    made: dict[str, Adapted] = {}

    def make(family: str) -> Adapted:
        if family not in made:
            root, kind = tmp_path_factory.mktemp(family), "lora" if family == "gpt_oss" else "dora"
            name, _, is_quantized = family.partition("-")
            folder = zoo.text(name)
            if is_quantized:
                folder = quantize(folder, root / "model")
            made[family] = Adapted(folder, root, KEYS[name], kind)
        return made[family]

    return make


def quantize(folder: Path, target: Path) -> Path:
    from mlx_lm.utils import load, quantize_model, save

    model, tokenizer, config = load(str(folder), return_config=True)
    model, config = quantize_model(model, config, 32, 4)
    save(target, folder, model, tokenizer, config)
    return target


def make_requests(engine: Engine) -> list[TimedRequest]:
    """A request for each row; the last two join while the others decode."""
    known = {adapter.name: adapter for adapter in engine.model_info.adapters}
    params = engine_driver.make_text_request("", PROMPT, max_tokens=COUNT).params
    rows = [Request(str(i), PROMPT, params, adapter=known.get(name or "")) for i, name in enumerate(ORDER)]
    return [TimedRequest(row, add_step=0 if i < 3 else 5) for i, row in enumerate(rows)]


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"backend": "none", "chunk": 7}),
    ("llama", {"reproducible": True}),
    ("llama-4bit", {"dequantize": "never"}),
    ("gemma3_text", {}),
    ("gpt_oss", {}),
]


@pytest.mark.parametrize(("family", "options"), WAYS)
def test_each_row_has_the_answer_of_its_adapter(
    models: Callable[[str], Adapted], family: str, options: dict[str, Any]
) -> None:
    """Together, joining late, and again with what the prefix cache has by then."""
    made = models(family)
    engine = made.make_engine(**options)
    assert engine.load_check is not None
    assert engine.load_check.methods.decode == ("row_by_row" if "reproducible" in options else "ragged")
    assert made.check(engine_driver.run_requests(engine, make_requests(engine)))
    again = engine_driver.run_requests(engine, make_requests(engine))
    assert made.check(again)
    is_cached = options.get("backend") != "none"
    assert all((event.hit_kind is not HitKind.MISS) == is_cached for event in again.values())


def test_preempted_rows_keep_their_adapters(models: Callable[[str], Adapted]) -> None:
    made = models("llama")
    engine = made.make_engine(backend="none")

    def preempt(step: int) -> None:
        for state in engine.scheduler.requests:
            if step % 4 == 3 and state.running:
                engine.scheduler.preempt(state)

    assert made.check(engine_driver.run_requests(engine, make_requests(engine), preempt))


def test_rows_of_several_padded_forwards_keep_their_adapters(models: Callable[[str], Adapted]) -> None:
    """A row leaves a forward of a fixed width, so that a dummy is before the rows of the next one."""
    made = models("llama")
    methods = ComputeMethods("ragged", fixed_width=2)
    engine = made.make_engine(methods=methods, reproducible=True, backend="none", max_running=8)
    first, *others = make_requests(engine)
    events = engine_driver.run_requests(engine, [replace(first, abort_step=7), *others])
    assert events.pop("0").finish is FinishReason.ABORT
    assert made.check(events)


def test_rows_without_an_adapter_have_the_bits_of_the_plain_model(models: Callable[[str], Adapted]) -> None:
    made = models("llama")
    mixed, plain = made.make_engine(backend="none"), made.make_engine(backend="none", adapters={})
    row = engine_driver.run_requests(mixed, make_requests(mixed)[:3])["0"]
    alone = engine_driver.run_requests(plain, make_requests(plain)[:3])["0"]
    assert (row.tokens, row.logprobs) == (alone.tokens, alone.logprobs)


def test_reproducible_rows_do_not_depend_on_the_adapters_of_others(models: Callable[[str], Adapted]) -> None:
    """Forwards of a fixed width, as on a GPU: with rows of other adapters, and of the same one only."""
    made = models("llama")
    methods = ComputeMethods("ragged", fixed_width=4)
    rows = []
    for others in ((), (0,), (2, 3), (3,)):
        engine = made.make_engine(methods=methods, reproducible=True, backend="none", max_running=4)
        received = make_requests(engine)
        chosen = [TimedRequest(received[i].request) for i in (1, *others)]
        rows.append(engine_driver.run_requests(engine, chosen)["1"])
    assert all((row.tokens, row.logprobs) == (rows[0].tokens, rows[0].logprobs) for row in rows)


def test_logprobs_of_prompts_are_those_of_the_adapter(models: Callable[[str], Adapted]) -> None:
    """In shared forwards whose head is adapted too."""
    from mlx_lm import load

    made = models("llama")
    engine = made.make_engine()
    requests = [timed.request for timed in make_requests(engine)][:3]
    params = engine_driver.make_text_request("", PROMPT, max_tokens=0, prompt_logprobs=1).params
    received = [Request(each.id, PROMPT, params, adapter=each.adapter) for each in requests]
    events = engine_driver.run_requests(engine, received)
    for name, event in events.items():
        model, _ = load(str(made.folder), adapter_path=made.paths.get(ORDER[int(name)] or ""))
        logits = model(mx.array([PROMPT]))[0].astype(mx.float32)
        wanted = np.array(nn.log_softmax(logits, axis=-1))[np.arange(39), PROMPT[1:]]
        found = np.array([score.logprob for score in event.prompt_logprobs if score is not None])
        assert np.abs(found - wanted).max() < 1e-4


def test_a_model_whose_rows_cannot_be_mixed_computes_them_apart(
    models: Callable[[str], Adapted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_checks, "is_mixing_exact", lambda adapter, numbers: False)
    made = models("llama")
    engine = made.make_engine()
    assert engine.load_check is not None
    methods = engine.load_check.methods
    assert (methods.decode, methods.sharing.max_rows) == ("row_by_row", 1)
    assert made.check(engine_driver.run_requests(engine, make_requests(engine)))


# -- mutation twins: the tests above can fail ----------------------------------------------------------------


def number_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RowAdapters.find
    monkeypatch.setattr(RowAdapters, "find", lambda rows, name: real(rows, name) % 2 + 1)


def key_without_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdapterSalt, "mix", lambda salt, ids, start: array("q", ids))


def reversed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of a forward in another order than its rows."""
    real = RowAdapters.use
    monkeypatch.setattr(RowAdapters, "use", lambda rows, numbers: real(rows, tuple(reversed(list(numbers)))))


@pytest.mark.parametrize("plant", [number_off_by_one, key_without_adapter, reversed_rows])
def test_planted_bugs_are_found(
    models: Callable[[str], Adapted],
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    made = models("llama")
    engine = made.make_engine()
    plant(monkeypatch)
    first = made.check(engine_driver.run_requests(engine, make_requests(engine)))
    again = made.check(engine_driver.run_requests(engine, make_requests(engine)))
    assert not (first and again)


def test_mixing_in_another_order_is_found_at_load(
    models: Callable[[str], Adapted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a model that calls its layers with rows in another place."""
    reversed_rows(monkeypatch)
    engine = models("llama").make_engine()
    assert engine.load_check is not None and engine.load_check.methods.decode == "row_by_row"
