"""`python -m benchmarks prompt-logprobs`: four-choice items that share a context, beside mlx-lm's method.

mlx_lm.evaluate groups choices by question: it computes the question's whole prompt, and then each choice on a
copy of that cache (`MLXLM.loglikelihood`). The same calls are made here, without lm-eval around them, on the
model as the engine loads it. mlxrun gets all choices of all items at once, and begins with an empty prefix
cache; with `http`, a server gets them too (`benchmarks.http_logprobs`). All sides are measured in turn, and
ratios are of one turn, since a busy machine is not as fast in the next.
"""

from __future__ import annotations

import copy
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.http_logprobs import run_http_side
from benchmarks.measure_plan import MeasurePlan
from mlxrun.cli.bench.models import open_model
from mlxrun.cli.bench.report import build_notes, make_console, make_table
from mlxrun.config.settings import Config
from mlxrun.core.request import Request, SamplingParams, TokenEvent

if TYPE_CHECKING:
    from rich.console import Console

    from mlxrun.engine.engine import Engine

ITEMS, PEER_ITEMS, CHOICES = 1000, 50, 4
CONTEXT, QUESTION, ANSWER = 1000, (30, 70), (1, 8)  # tokens; ranges of random lengths
STEP = 2048  # tokens of a forward, as in mlx_lm.evaluate
MAX_QUEUE = 100_000
PEER, ENGINE, HTTP, UNSCORED = "mlx-lm", "mlxrun", "http", "unscored"
TITLES = {PEER: "mlx_lm.evaluate's method", ENGINE: "mlxrun, in process", HTTP: "mlxrun, over HTTP"}


@dataclass(frozen=True, slots=True)
class ChoiceItem:
    """A question, which begins with the shared context, and its answers."""

    question: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class LogprobRun:
    """One run of a side, of so many items. `cpu`: seconds of processor time; `scores`: the sum of each
    answer's logprobs; `peak`: bytes of memory. None: not measured."""

    items: int
    seconds: float
    cpu: float | None
    scores: list[float]
    peak: int | None = None

    def to_json(self) -> dict[str, float | None]:
        speeds = {"items_per_second": self.speed, "items_per_cpu_second": self.cpu_speed}
        return {"seconds": self.seconds, "cpu_seconds": self.cpu, **speeds, "peak": self.peak}

    @property
    def speed(self) -> float:
        """Items a second."""
        return self.items / self.seconds

    @property
    def cpu_speed(self) -> float | None:
        """Items a second of processor time."""
        return self.items / self.cpu if self.cpu else None


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


def run_prompt_logprobs_bench(
    plan: MeasurePlan, say: Callable[[str], None], *, http: bool = False
) -> dict[str, Any]:
    """Measure the sides in turn; return the report, as `--json` writes it."""
    from mlxrun.model.machine.device import resolve_config

    config = resolve_config(plan.config)
    config = replace(config, scheduler=replace(config.scheduler, max_queue=MAX_QUEUE))
    count, peer_count = max(4, round(ITEMS * plan.scale)), max(2, round(PEER_ITEMS * plan.scale))
    with open_model(plan.model, plan.seed) as model:
        config = replace(config, model=replace(config.model, path=str(model.folder)))
        items = make_items(count, model.vocab, plan.seed)
        turns = [_run_turn(config, items, peer_count, say, http=http) for _ in range(plan.repeat)]
    return plan.build_report(model, {"prompt-logprobs": _summarise(turns)})


def _run_turn(
    config: Config, items: Sequence[ChoiceItem], peer_count: int, say: Callable[[str], None], *, http: bool
) -> dict[str, LogprobRun]:
    runs = {PEER: _run_peer(config, items[:peer_count]), ENGINE: _run_engine(config, items, scored=True)}
    if http:
        runs[HTTP] = _run_http(config, items)
    say("; ".join(f"{name}: {run.speed:.2f} items/s" for name, run in runs.items()))
    return runs | {UNSCORED: _run_engine(config, items, scored=False)}


def _summarise(turns: Sequence[Mapping[str, LogprobRun]]) -> dict[str, Any]:
    ours = [name for name in turns[0] if name in (ENGINE, HTTP)]
    expected = turns[0][PEER].scores
    scores = [run[name].scores[: len(expected)] for run in turns for name in ours]
    peaks = {name: max(turn[name].peak or 0 for turn in turns) for name in (ENGINE, UNSCORED)}
    return {
        "items": {name: run.items for name, run in turns[0].items() if name != UNSCORED},
        "sides": {name: [turn[name].to_json() for turn in turns] for name in turns[0]},
        "ratios": {name: _compute_ratios(turns, name) for name in ours},
        "memory_ratio": peaks[ENGINE] / peaks[UNSCORED],
        "largest_difference": max(
            abs(a - b) for found in scores for a, b in zip(found, expected, strict=True)
        ),
    }


def _compute_ratios(turns: Sequence[Mapping[str, LogprobRun]], name: str) -> dict[str, list[float]]:
    """Of each turn, how many times as many items as the peer's method a side does in a second, and in a
    second of processor time."""
    cpu = [(turn[name].cpu_speed, turn[PEER].cpu_speed) for turn in turns]
    return {
        "speed": [turn[name].speed / turn[PEER].speed for turn in turns],
        "cpu": [own / peer for own, peer in cpu if own and peer],
    }


def _run_http(config: Config, items: Sequence[ChoiceItem]) -> LogprobRun:
    choices = [(item.question, answer) for item in items for answer in item.answers]
    with tempfile.TemporaryDirectory(prefix="mlxrun-scoring-") as folder:
        seconds, cpu, scores = run_http_side(config, choices, Path(folder))
    return LogprobRun(len(items), seconds, cpu, scores)


def _run_engine(config: Config, items: Sequence[ChoiceItem], *, scored: bool) -> LogprobRun:
    """All choices in one engine. Not `scored`: the same prompts, each with one token of output."""
    from mlxrun.engine.build import build_engine
    from mlxrun.model.machine import device

    engine = build_engine(config)
    params = SamplingParams(max_tokens=0, prompt_logprobs=1) if scored else SamplingParams(max_tokens=1)
    requests = [
        Request(f"{i} {j}", (*item.question, *answer), params, logprobs_from=len(item.question))
        for i, item in enumerate(items)
        for j, answer in enumerate(item.answers)
    ]
    device.start_measuring(drop_pool=True)
    start, cpu = time.perf_counter(), time.process_time()
    scores = _serve(engine, requests)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = device.read_peak()
    del engine  # its close() would end this thread's MLX streams
    return LogprobRun(len(items), seconds, cpu, [scores[request.id] for request in requests], peak)


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


def _run_peer(config: Config, items: Sequence[ChoiceItem]) -> LogprobRun:
    """As `MLXLM.loglikelihood` does: the question once, then each answer on a copy of its cache."""
    import mlxrun.model  # noqa: F401  OpenBLAS goes before mlx

    # isort: split
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models.cache import make_prompt_cache

    from mlxrun.model.load.loader import load_caller
    from mlxrun.model.load.model_info import load_model_info
    from mlxrun.model.machine import device

    network = load_caller(config, load_model_info(config.model, weights=True)).model
    device.start_measuring(drop_pool=True)
    start, cpu, scores = time.perf_counter(), time.process_time(), []
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
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return LogprobRun(len(items), seconds, cpu, scores, device.read_peak())


def print_prompt_logprobs_report(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the table, and what was measured and where."""
    console = make_console(console)
    part = report["workloads"]["prompt-logprobs"]
    rows = []
    for side, title in TITLES.items():
        if runs := part["sides"].get(side):
            ratios = part["ratios"].get(side, {"speed": (), "cpu": ()})
            speed = median(run["items_per_second"] for run in runs)
            cells = (_format_ratios(ratios[kind]) for kind in ("speed", "cpu"))
            rows.append([title, str(part["items"][side]), f"{speed:,.2f}", *cells])
    names = ("four choices, a shared context", "items", "items/s", "times", "times by processor time")
    console.print(make_table(names, 1, rows, console.is_terminal))
    console.print(
        f"medians of {len(part['sides'][PEER])} turns; "
        f"scores differ by at most {part['largest_difference']:.1e}; "
        f"peak memory in process is {part['memory_ratio']:.2f} of that without scoring",
        highlight=False,
        soft_wrap=True,
    )
    for line in build_notes(report):
        console.print(line, highlight=False, soft_wrap=True)


def _format_ratios(ratios: Sequence[float]) -> str:
    """The median, and the least and the greatest one if there are several."""
    if len(ratios) < 2:
        return "".join(f"{ratio:.1f}" for ratio in ratios)
    return f"{median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
