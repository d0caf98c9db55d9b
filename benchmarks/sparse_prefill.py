"""`python -m benchmarks sparse-prefill`: time to the first token of a long prompt, sparse and whole.

One engine answers both in turns, since a request can switch sparse prefill off. Each prompt is used once: the
tokens that were chosen for a prompt are remembered.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.measure_plan import MeasurePlan
from mlxrun.cli.bench.models import BenchModel, open_model
from mlxrun.cli.bench.report import make_console, make_table
from mlxrun.config.settings import PrefillSettings
from mlxrun.core.errors import ConfigError
from mlxrun.core.request import Request, SamplingParams

if TYPE_CHECKING:
    from mlxrun.engine.engine import Engine

TOKENS = 16384  # of a prompt
LEAST = 256  # tokens: the smallest prompt that is computed sparsely
OUTPUT = 4  # tokens


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Seconds from the request to its first token, and of these until the draft model has chosen; and how
    many tokens the model computed."""

    seconds: float
    choosing: float
    computed: int


def build_sparse_engine(plan: MeasurePlan, model: Path, draft: Path, keep: float) -> Engine:
    """An engine without a prefix cache, whose requests are computed sparsely unless they forbid it."""
    from mlxrun.engine.build import build_engine

    config = plan.config
    settings = replace(config.model, path=str(model), draft=str(draft))
    prefill = PrefillSettings("draft", keep, LEAST)
    cache = replace(config.cache, backend="none")
    return build_engine(replace(config, model=settings, prefill=prefill, cache=cache))


def run_sparse_prefill_bench(
    plan: MeasurePlan, draft: str, keep: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure both sides in turn, after a run of each that is not counted."""
    size = max(round(TOKENS * plan.scale), 2 * LEAST)
    with open_model(plan.model, plan.seed) as model, open_model(draft, plan.seed + 1) as small:
        if model.vocab != small.vocab:
            raise ConfigError(f"--draft {draft}: has {small.vocab} tokens, and {model.name} {model.vocab}")
        engine = build_sparse_engine(plan, model.folder, small.folder, keep)
        say(f"{model.name} and {small.name} are loaded")
        prompts = _draw_prompts(size, model.vocab, plan.seed)
        runs: dict[str, list[FirstToken]] = {"whole": [], "sparse": []}
        for turn in range(plan.repeat + 1):
            for name in list(runs)[:: 1 if turn % 2 else -1]:
                found = measure_first_token(engine, prompts(), sparse=name == "sparse")
                say(f"{name} {turn}/{plan.repeat}: {found.seconds:.3f} s ({found.choosing:.3f} s choosing)")
                runs[name] += [found] if turn else []
    return plan.build_report(model, {"sparse-prefill": _summarise(runs, small, size, keep)})


def _draw_prompts(size: int, vocab: int, seed: int) -> Callable[[], tuple[int, ...]]:
    rng = random.Random(f"sparse prefill {seed}")
    return lambda: tuple(rng.choices(range(2, vocab), k=size))


def measure_first_token(engine: Engine, prompt: Sequence[int], *, sparse: bool) -> FirstToken:
    """Answer one prompt on an idle engine. RuntimeError if it was not computed as it was to be."""
    assert engine.selection is not None
    params = SamplingParams(max_tokens=OUTPUT)
    started, chosen, first = time.perf_counter(), 0.0, 0.0
    engine.add(Request(f"{started}", tuple(prompt), params, sparse=sparse))
    left_out = 0
    while engine.busy:
        events = engine.step()
        now = time.perf_counter() - started
        if sparse and not chosen and not engine.selection.is_busy:
            chosen = now
        for event in events:
            if event.error is not None:
                raise event.error
            left_out = event.num_left_out
            first = first or (now if event.tokens else 0.0)
    if sparse != (left_out > 0):
        raise RuntimeError(f"{left_out} tokens were left out of a prompt that was to be sparse: {sparse}")
    return FirstToken(first, chosen, len(prompt) - left_out)


def _summarise(
    runs: Mapping[str, Sequence[FirstToken]], draft: BenchModel, size: int, keep: float
) -> dict[str, Any]:
    middle = {name: median(run.seconds for run in found) for name, found in runs.items()}
    return {
        "draft": draft.name,
        "prompt_tokens": size,
        "keep": keep,
        "runs": {name: [asdict(run) for run in found] for name, found in runs.items()},
        "first_token_seconds": middle,
        "choosing_seconds": median(run.choosing for run in runs["sparse"]),
        "computed_tokens": runs["sparse"][0].computed,
        "ratio": middle["sparse"] / middle["whole"],
    }


def print_sparse_prefill_report(report: Mapping[str, Any]) -> None:
    """Print a table of both sides."""
    console = make_console(None)
    found = report["workloads"]["sparse-prefill"]
    seconds = found["first_token_seconds"]
    cells = [
        ("whole prompt", f"{found['prompt_tokens']}", "", f"{seconds['whole']:.3f} s", ""),
        (
            *(f"sparse, {found['draft']}", f"{found['computed_tokens']}"),
            *(f"{found['choosing_seconds']:.3f} s", f"{seconds['sparse']:.3f} s", f"{found['ratio']:.2f} x"),
        ),
    ]
    titles = ("prefill", "tokens", "choosing them", "first token", "ratio")
    console.print(make_table(titles, 1, cells, console.is_terminal))
