"""`python -m benchmarks waiting`: what a short prompt waits for behind a long one, by the length of steps.

Two engines in one process take turns. The steps of one are as long for a prompt by itself as any others.
Those of the other are as the device has them. A short prompt comes at some moment of a long prompt's prefill.
The long prompt's processor time alone says what shorter steps cost.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

from mlxrun.cli.bench.models import open_model
from mlxrun.cli.bench.report import make_console, make_table
from mlxrun.config.settings import Config
from mlxrun.core.request import Request, SamplingParams
from mlxrun.core.step_plan import StepCosts
from mlxrun.engine.engine import Engine

SIDES = ("whole steps", "as it is")


def run_waiting_bench(
    config: Config, model: str, long: int, short: int, turns: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Seconds until the first token of a prompt of `short` tokens alone and behind one of `long` tokens, and
    processor seconds of the long one alone: medians over turns."""
    rng = random.Random(0)
    found: dict[str, dict[str, list[float]]] = {
        side: {"alone_s": [], "behind_s": [], "long_processor_s": []} for side in SIDES
    }
    with open_model(model) as opened:
        config = replace(config, model=replace(config.model, path=str(opened.folder)))
        engines = {side: _build(config, whole=side == SIDES[0]) for side in SIDES}
        for turn in range(turns + 1):
            moment = rng.uniform(0.2, 0.8)
            for side in SIDES if turn % 2 else reversed(SIDES):
                prompts = [
                    tuple(rng.choices(range(opened.vocab), k=size)) for size in (short, long, long, short)
                ]
                measured = _measure(engines[side], prompts, moment)
                for name, value in measured.items() if turn else ():  # the first turn warms up
                    found[side][name].append(value)
            say(f"turn {turn} of {turns}")
    medians = {s: {name: statistics.median(v) for name, v in each.items()} for s, each in found.items()}
    costs = zip(*(found[side]["long_processor_s"] for side in SIDES), strict=True)
    cost = statistics.median(own / whole for whole, own in costs)
    return {
        "model": opened.name,
        "long": long,
        "short": short,
        "sides": medians,
        "long_processor_ratio": cost,
    }


def _build(config: Config, whole: bool) -> Engine:
    from mlxrun.engine import build
    from mlxrun.model.machine.device import choose_step_costs

    config = replace(config, cache=replace(config.cache, backend="none"))

    def choose_costs(given: Config) -> StepCosts:
        costs = choose_step_costs(given)
        return replace(costs, lone_share=1.0) if whole else costs

    with mock.patch.object(build, "choose_step_costs", choose_costs):
        return build.build_engine(config)


def _measure(engine: Engine, prompts: list[tuple[int, ...]], moment: float) -> dict[str, float]:
    """`moment`: the share of the long prompt's time at which the short one comes."""
    alone = _run(engine, {"short": (prompts[0], 0.0)})["short"]
    processor, started = time.process_time(), time.perf_counter()
    _run(engine, {"long": (prompts[1], 0.0)})
    processor, seconds = time.process_time() - processor, time.perf_counter() - started
    behind = _run(engine, {"long": (prompts[2], 0.0), "short": (prompts[3], moment * seconds)})["short"]
    return {"alone_s": alone, "behind_s": behind, "long_processor_s": processor}


def _run(engine: Engine, requests: dict[str, tuple[tuple[int, ...], float]]) -> dict[str, float]:
    """Seconds until each request's first token since it came, by prompt and the second at which it comes."""
    started, found, left = time.perf_counter(), dict[str, float](), dict(requests)
    while left or engine.busy:
        now = time.perf_counter() - started
        for name in [name for name, (_, at) in left.items() if at <= now]:
            engine.add(Request(name, left.pop(name)[0], SamplingParams(max_tokens=2)))
        for event in engine.step():
            if event.tokens:
                came = requests[event.request_id][1]
                found.setdefault(event.request_id, time.perf_counter() - started - came)
    return found


def print_waiting_report(report: dict[str, Any]) -> None:
    """A row for each side."""
    console, columns = (
        make_console(None),
        ("steps of a lone prompt", "alone, ms", "behind, ms", "times alone"),
    )
    cells = [
        (
            side,
            *(f"{1e3 * found[name]:.0f}" for name in ("alone_s", "behind_s")),
            f"{found['behind_s'] / found['alone_s']:.1f}",
        )
        for side, found in report["sides"].items()
    ]
    console.print(make_table(columns, 1, cells, console.is_terminal))
    console.print(
        f"processor time of the long prompt alone: {report['long_processor_ratio']:.2f} of whole steps"
    )
