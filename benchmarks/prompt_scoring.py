"""`python -m benchmarks prompt-scoring`: four-choice items that share a context, beside mlx-lm's method.

mlx_lm.evaluate groups choices by question: it computes the question's whole prompt, and then each choice on a
copy of that cache (`MLXLM.loglikelihood`). The same calls are made here, without lm-eval around them, on the
model as the engine loads it. mlxrun gets all choices of all items at once, and begins with an empty prefix
cache.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.measure_plan import MeasurePlan
from mlxrun.bench.models import open_model
from mlxrun.bench.report import build_notes, make_console, make_table
from mlxrun.config.settings import Config
from mlxrun.scheduler.request import Request, SamplingParams, TokenEvent

if TYPE_CHECKING:
    from rich.console import Console

    from mlxrun.engine.engine import Engine

ITEMS, PEER_ITEMS, CHOICES = 1000, 50, 4
CONTEXT, QUESTION, ANSWER = 1000, (30, 70), (1, 8)  # tokens; ranges of random lengths
STEP = 2048  # tokens of a forward, as in mlx_lm.evaluate
MAX_QUEUE = 100_000


@dataclass(frozen=True, slots=True)
class ChoiceItem:
    """A question, which begins with the shared context, and its answers."""

    question: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ScoringRun:
    """One run of a side. `scores`: the sum of each answer's logprobs; `peak`: bytes of memory."""

    seconds: float
    scores: list[float]
    peak: int

    def to_json(self, items: int) -> dict[str, float]:
        return {"seconds": self.seconds, "items_per_second": items / self.seconds, "peak": self.peak}


def make_items(count: int, vocab: int, seed: int) -> list[ChoiceItem]:
    """Items of random tokens."""
    rng = random.Random(f"choices {seed}")

    def draw(length: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(vocab), k=length))

    context = draw(CONTEXT)
    return [
        ChoiceItem(
            (*context, *draw(rng.randint(*QUESTION))),
            tuple(draw(rng.randint(*ANSWER)) for _ in range(CHOICES)),
        )
        for _ in range(count)
    ]


def run_prompt_scoring_bench(plan: MeasurePlan, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure both sides in turn; return the report, as `--json` writes it."""
    from mlxrun.model.machine.device import resolve_config

    config = resolve_config(plan.config)
    config = replace(config, scheduler=replace(config.scheduler, max_queue=MAX_QUEUE))
    count, peer_count = max(4, round(ITEMS * plan.scale)), max(2, round(PEER_ITEMS * plan.scale))
    with open_model(plan.model, plan.seed) as model:
        config = replace(config, model=replace(config.model, path=str(model.folder)))
        items = make_items(count, model.vocab, plan.seed)
        sides = _measure_sides(config, items, peer_count, plan.repeat, say)
    return plan.build_report(model, {"prompt-scoring": sides})


def _measure_sides(
    config: Config,
    items: Sequence[ChoiceItem],
    peer_count: int,
    repeat: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    peers, ours, plain = [], [], []
    for turn in range(repeat):
        peers.append(_run_peer(config, items[:peer_count]))
        ours.append(_run_engine(config, items, scored=True))
        plain.append(_run_engine(config, items, scored=False))
        speeds = peer_count / peers[-1].seconds, len(items) / ours[-1].seconds
        say(f"run {turn + 1}: mlx-lm's method {speeds[0]:.2f}, mlxrun {speeds[1]:.2f} items/s")
    best = {"mlx-lm": min(peers, key=_get_seconds), "mlxrun": min(ours, key=_get_seconds)}
    pairs = zip(best["mlx-lm"].scores, best["mlxrun"].scores, strict=False)
    return {
        "items": {"mlx-lm": peer_count, "mlxrun": len(items)},
        "sides": {
            "mlx-lm": [run.to_json(peer_count) for run in peers],
            "mlxrun": [run.to_json(len(items)) for run in ours],
            "unscored": [run.to_json(len(items)) for run in plain],
        },
        "speed_ratio": len(items) / best["mlxrun"].seconds / (peer_count / best["mlx-lm"].seconds),
        "memory_ratio": max(run.peak for run in ours) / max(run.peak for run in plain),
        "largest_difference": max(abs(a - b) for a, b in pairs),
    }


def _get_seconds(run: ScoringRun) -> float:
    return run.seconds


def _run_engine(config: Config, items: Sequence[ChoiceItem], *, scored: bool) -> ScoringRun:
    """All choices in one engine. Not `scored`: the same prompts, each with one token of output."""
    from mlxrun.engine.factory import build_engine
    from mlxrun.model.machine import memory_meter

    engine = build_engine(config)
    params = SamplingParams(max_tokens=0, prompt_logprobs=1) if scored else SamplingParams(max_tokens=1)
    requests = [
        Request(f"{i} {j}", (*item.question, *answer), params, score_from=len(item.question))
        for i, item in enumerate(items)
        for j, answer in enumerate(item.answers)
    ]
    memory_meter.start_measuring(drop_pool=True)
    start = time.perf_counter()
    scores = _serve(engine, requests)
    seconds, peak = time.perf_counter() - start, memory_meter.read_peak()
    del engine  # its close() would end this thread's MLX streams
    return ScoringRun(seconds, [scores[request.id] for request in requests], peak)


def _serve(engine: Engine, requests: Sequence[Request]) -> dict[str, float]:
    scores = dict.fromkeys((request.id for request in requests), 0.0)

    def take(event: TokenEvent) -> None:
        if event.error is not None:
            raise event.error
        scores[event.request_id] += sum(score.logprob for score in event.prompt_logprobs if score)

    for request in requests:
        engine.add(request)
    while engine.busy:
        for event in engine.step():
            take(event)
    return scores


def _run_peer(config: Config, items: Sequence[ChoiceItem]) -> ScoringRun:
    """As `MLXLM.loglikelihood` does: the question once, then each answer on a copy of its cache."""
    import mlxrun.model  # noqa: F401  OpenBLAS goes before mlx

    # isort: split
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models.cache import make_prompt_cache

    from mlxrun.model.loader import load_adapter
    from mlxrun.model.machine import memory_meter
    from mlxrun.model.model_info import load_model_info

    network = load_adapter(config, load_model_info(config.model, weights=True)).model
    memory_meter.start_measuring(drop_pool=True)
    start, scores = time.perf_counter(), []
    for item in items:
        cache = make_prompt_cache(network)
        ids = mx.array(item.question)[None]
        for at in range(0, ids.shape[1], STEP):
            logits = network(ids[:, at : at + STEP], cache=cache)
            mx.eval([layer.state for layer in cache])
            mx.clear_cache()
        first = nn.log_softmax(logits[:, -1, :].astype(mx.float32))
        best = mx.argmax(first).item()
        for answer in item.answers:
            total, is_greedy = first[0, answer[0]].item(), answer[0] == best
            if len(answer) > 1:
                given, targets = mx.array(answer[:-1])[None], mx.array(answer[1:])[None]
                logits = network(given, cache=copy.deepcopy(cache))
                logprobs = nn.log_softmax(logits.astype(mx.float32))
                found = mx.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
                greedy = targets == mx.argmax(logits, axis=-1)
                mx.eval(found, greedy)
                mx.clear_cache()
                total += mx.sum(found).item()
                is_greedy &= mx.all(greedy).item()
            scores.append(total)
    return ScoringRun(time.perf_counter() - start, scores, memory_meter.read_peak())


def print_prompt_scoring_report(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the table, and what was measured and where."""
    console = make_console(console)
    part = report["workloads"]["prompt-scoring"]
    rows = []
    for side, title in (("mlx-lm", "mlx_lm.evaluate's method"), ("mlxrun", "mlxrun")):
        speeds = sorted(run["items_per_second"] for run in part["sides"][side])
        rows.append([title, str(part["items"][side]), f"{speeds[-1]:,.2f}"])
    console.print(
        make_table(("four choices, a shared context", "items", "items/s"), 1, rows, console.is_terminal)
    )
    console.print(
        f"ratio {part['speed_ratio']:.1f}; scores differ by at most {part['largest_difference']:.1e}; "
        f"peak memory is {part['memory_ratio']:.2f} of that without scoring",
        highlight=False,
        soft_wrap=True,
    )
    for line in build_notes(report):
        console.print(line, highlight=False, soft_wrap=True)
