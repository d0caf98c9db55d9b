"""Fused layers compute prompts only where the load check has found them right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.config.settings import Config
from mlxrun.model.fused.operations import ArrayOperations, HeadRule
from mlxrun.model.load_check import choose
from mlxrun.model.load_check.layer_checks import LIBRARY_LAYERS
from mlxrun.model.load_check.reference import Reference
from mlxrun.model.load_check.text_ladder import TextLadder
from mlxrun.model.run import model_caller
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.model.run.model_caller import ModelCaller
from tests.helpers.fused_models import make_caller

FUSED = ComputeMethods("fused", fused_prompts=True)


class WrongPositions(ArrayOperations):
    """Chunks begin one position too late."""

    def make_heads(self, product: mx.array, rule: HeadRule, offsets: mx.array) -> tuple[mx.array, mx.array]:
        return super().make_heads(product, rule, offsets + (product.shape[1] > 1))


class Crash(ArrayOperations):
    def gate(self, product: mx.array) -> mx.array:
        raise RuntimeError("no such kernel")


def compare(caller: ModelCaller, candidate: ComputeMethods, monkeypatch: pytest.MonkeyPatch) -> TextLadder:
    """A CPU has no kernel for rows: they are taken as compared."""
    monkeypatch.setattr(TextLadder, "choose_decode", lambda self, methods: candidate.decode)
    ladder = TextLadder(Reference(caller, 96), None, candidate, None)
    methods = ladder.compare()
    assert methods.fused_prompts == caller.fused_prompts
    return ladder


def test_prompts_that_pass_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = make_caller("qwen3")
    ladder = compare(caller, FUSED, monkeypatch)
    names = [check.name for check in ladder.checks]
    assert caller.fused_prompts and all(check.passed for check in ladder.checks)
    assert names.index("prefill chunks") < names.index("prefill fused") < names.index("snapshot")


@pytest.mark.parametrize("operations", [WrongPositions(), Crash()])
def test_prompts_that_differ_are_the_librarys(operations: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_caller, "choose_operations", lambda: operations)
    caller = make_caller("qwen3")
    ladder = compare(caller, FUSED, monkeypatch)
    (failed,) = [check for check in ladder.checks if not check.passed]
    assert not caller.fused_prompts and failed.name == "prefill fused" and failed.instead == LIBRARY_LAYERS


@pytest.mark.parametrize(
    "candidate",
    [ComputeMethods("fused"), ComputeMethods("compiled", fused_prompts=True), FUSED.split_as_library()],
    ids=["not wanted", "rows are not fused", "split as the library splits them"],
)
def test_where_nothing_is_tried(candidate: ComputeMethods, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = make_caller("qwen3")
    assert "prefill fused" not in [check.name for check in compare(caller, candidate, monkeypatch).checks]
    assert not caller.fused_prompts


@pytest.mark.parametrize("reproducible", [False, True])
def test_the_candidate_on_cuda(reproducible: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether rows round alike in forwards of any width has to be compared first."""
    for name in ("uses_gpu", "uses_cuda"):
        monkeypatch.setattr(choose, name, lambda: True)
    config = Config()
    config = replace(config, engine=replace(config.engine, reproducible=reproducible))
    config = replace(config, cache=replace(config.cache, backend="none"))
    caller = make_caller("qwen3")
    found = choose._choose_candidate(caller.make_cache(), config, True, True)
    assert found.decode == "fused" and found.launch_first
    assert found.fused_prompts != reproducible
    assert not found.any_width and not found.snapshots
    assert found.fixed_width == (config.scheduler.max_running if reproducible else 0)


def test_the_candidate_on_a_cpu() -> None:
    config = Config()
    config = replace(config, engine=replace(config.engine, reproducible=True))
    found = choose._choose_candidate(make_caller("qwen3").make_cache(), config, True, True)
    assert not (found.launch_first or found.any_width or found.fused_prompts) and found.snapshots
