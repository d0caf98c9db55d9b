"""Drives a ModelRunner with hand-written step plans, without a scheduler or an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlxrun.config.settings import Config, ModelSettings
from mlxrun.core.request import Request
from mlxrun.core.step_plan import Admission, PrefillChunk, StepPlan, StepResult
from mlxrun.model.kv.snapshot.snapshots import SnapshotCodec
from mlxrun.model.load.loader import load_caller
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.model.run.model_caller import ModelCaller, run_trial_forward
from mlxrun.model.run.runner import ModelRunner


def load_tiny_caller(folder: Path) -> ModelCaller:
    config = Config(model=ModelSettings(path=str(folder)))
    return load_caller(config, load_model_info(config.model, weights=True))


def make_runner(folder: Path, methods: ComputeMethods) -> ModelRunner:
    caller = load_tiny_caller(folder)
    cache, vocab = run_trial_forward(caller)
    return ModelRunner(caller, vocab, methods, SnapshotCodec(cache))


def plan_start(request: Request, chunk: int | None = None, output: Sequence[int] = ()) -> list[StepPlan]:
    """The plans that admit a request and prefill its prompt, by chunks; the last one samples."""
    size = len(request.prompt) + len(output)
    starts = range(0, size, chunk or size)
    chunks = [PrefillChunk(request.id, at, min(at + (chunk or size), size)) for at in starts]
    first = StepPlan(admit=(Admission(request, tuple(output)),), prefill=(chunks[0],))
    return [first, *(StepPlan(prefill=(each,)) for each in chunks[1:])]


def run_plans(runner: ModelRunner, plans: Sequence[StepPlan]) -> list[StepResult]:
    """The result of each plan, and at the end that of what was launched last."""
    return [*(runner.execute(plan) for plan in plans), runner.collect()]


def list_tokens(results: Sequence[StepResult], name: str) -> list[int]:
    """The tokens of one request in all results."""
    return [sampled.token for result in results for sampled in result.tokens.get(name, ())]
