"""`python -m benchmarks prefix-cache`: cold and warm requests to the prefix cache, and mlx-lm's prompt cache
beside it.

All sides of a family are loaded at once and take turns round by round (A B, B A, ...). Each round has new
random tokens; the first one, of the same lengths, is not measured. Answers are compared with those of a side
without a cache, which is loaded after the measurements.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.prefix_cache.measurement import (
    ServedCase,
    Side,
    compute_same_share,
    run_script,
    summarize_rounds,
)
from benchmarks.prefix_cache.models import VISION, open_family_model
from benchmarks.prefix_cache.workloads import (
    IMAGE,
    LOOKUP,
    NO_REUSE,
    SCRIPTS,
    Script,
    make_distinct,
    make_script,
)
from mlxrun import __version__
from mlxrun.cli.bench.engine.benchmark import OURS, PEER, alternate
from mlxrun.cli.bench.engine.measurement import Contender, run_workload
from mlxrun.cli.bench.models import BenchModel
from mlxrun.config.settings import Config
from mlxrun.core.errors import ConfigError

FORMAT = 2
ON, OFF = "on", "off"

Say = Callable[[str], None]
Sides = Mapping[str, Side]
Scripts = Callable[[str, str], Script]  # scenario, seed


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What to measure."""

    model: str
    families: tuple[str, ...]
    scenarios: tuple[str, ...]
    config: Config
    scale: float = 1.0
    repeat: int = 3
    peer: bool = True
    seed: int = 0


def run_cache_bench(plan: CachePlan, say: Say) -> dict[str, Any]:
    """Measure everything; the report, as `--json` writes it."""
    from benchmarks.prefix_cache.lookup import measure_lookup
    from mlxrun.model.machine.device import describe_device, resolve_config
    from mlxrun.model.machine.versions import list_library_versions

    plan = replace(plan, config=resolve_config(plan.config))
    if plan.config.cache.backend == "none":
        raise ConfigError("cache.backend: none leaves nothing to measure")
    measured = {
        family: _measure_family(plan, family, say)
        for family in plan.families
        if _select_scenarios(plan, family)
    }
    return {
        "format": FORMAT,
        "versions": {"mlxrun": __version__} | list_library_versions(),
        "device": describe_device(),
        "settings": _collect_settings(plan),
        "families": measured,
        "lookup": measure_lookup(plan.config, plan.seed, say) if LOOKUP in plan.scenarios else None,
    }


def _collect_settings(plan: CachePlan) -> dict[str, Any]:
    settings = {
        "model": plan.model,
        "scale": plan.scale,
        "repeat": plan.repeat,
        "seed": plan.seed,
        "engine": asdict(plan.config.engine),
        "scheduler": asdict(plan.config.scheduler),
        "cache": asdict(plan.config.cache),
    }
    if plan.peer:
        from benchmarks.prefix_cache.mlx_lm_side import CACHES
        from mlxrun.cli.bench.engine.mlx_lm_contender import SETTINGS

        settings[PEER] = SETTINGS | {"prompt_cache_size": CACHES}
    return settings


def _select_scenarios(plan: CachePlan, family: str) -> tuple[str, ...]:
    """The scenarios of the plan that fit: images are for vision models, and vision models for images."""
    fit = (IMAGE,) if family == VISION else (*SCRIPTS, NO_REUSE)
    return tuple(name for name in plan.scenarios if name in fit)


def _measure_family(plan: CachePlan, family: str, say: Say) -> dict[str, Any]:
    """One family's part of the report."""
    names = _select_scenarios(plan, family)
    parts: dict[str, Any] = {}
    with open_family_model(plan.model, plan.seed, family) as model:
        config = _make_config(plan.config, model, family)
        peer = plan.peer and family != VISION
        played = [name for name in names if name != NO_REUSE]
        if played:
            parts = _measure_scenarios(plan, family, model, config, played, peer, say)
        if NO_REUSE in names:
            parts[NO_REUSE] = _measure_no_reuse(plan, family, model, config, say)
    return {"model": model.name, "dtype": model.dtype, "vocab": model.vocab, "scenarios": parts}


def _make_config(config: Config, model: BenchModel, family: str) -> Config:
    """Ours computes in the file's type, as mlx-lm does; the vision model has no peer."""
    settings = replace(config.model, path=str(model.folder))
    if settings.dtype == "auto" and model.dtype is not None and family != VISION:
        settings = replace(settings, dtype=model.dtype)  # type: ignore[arg-type]
    return replace(config, model=settings)


def _disable_cache(config: Config) -> Config:
    cache = replace(config.cache, backend="none", image_bytes=0)
    return replace(config, cache=cache)


# -- scripts ----------------------------------------------------------------------------------------


def _measure_scenarios(
    plan: CachePlan, family: str, model: BenchModel, config: Config, names: list[str], peer: bool, say: Say
) -> dict[str, Any]:
    """Play every scenario on every side, then check the last round's answers."""
    results: dict[str, dict[str, list[list[ServedCase]]]] = {}
    with _open_sides(model, config, family, peer, keep=True) as sides:
        scripts = _make_scripts(plan, model, config, sides[OURS], family)
        for name in names:
            results[name] = measure_rounds(name, sides, scripts, plan.repeat, lambda s: say(f"{family} {s}"))
    parts: dict[str, Any] = {
        name: {"sides": {side: summarize_rounds(rounds) for side, rounds in by_side.items()}}
        for name, by_side in results.items()
    }
    with _open_sides(model, config, family, peer, keep=False) as plain:
        for name, by_side in results.items():
            for side, rounds in by_side.items():
                parts[name]["sides"][side]["same_tokens"] = compute_same_share(plain[side], rounds[-1])
            say(f"{family} {name}: answers compared")
    return parts


def _make_scripts(plan: CachePlan, model: BenchModel, config: Config, ours: Any, family: str) -> Scripts:
    if family == VISION:
        from benchmarks.prefix_cache.image import make_image_script

        return lambda name, seed: make_image_script(
            ours.model_info, config, plan.scale, f"{plan.seed} {seed}"
        )
    return lambda name, seed: make_script(name, plan.scale, model.vocab, f"{plan.seed} {seed}")


@contextlib.contextmanager
def _open_sides(
    model: BenchModel, config: Config, family: str, peer: bool, keep: bool
) -> Iterator[dict[str, Side]]:
    """All sides, loaded; `keep`: with their caches."""
    from benchmarks.prefix_cache.mlxrun_side import MlxrunSide

    with contextlib.ExitStack() as stack:
        ours = MlxrunSide.open(config if keep else _disable_cache(config), count=family == VISION)
        stack.callback(ours.close)
        sides: dict[str, Side] = {OURS: ours}
        if peer:
            from benchmarks.prefix_cache.mlx_lm_side import MlxLmSide

            sides[PEER] = MlxLmSide.open(model.folder, keep)
            stack.callback(sides[PEER].close)
        yield sides


def measure_rounds(
    name: str, sides: Sides, scripts: Scripts, repeat: int, say: Say
) -> dict[str, list[list[ServedCase]]]:
    """A round to warm up and `repeat` measured ones on each side, in alternating order."""
    rounds: dict[str, list[list[ServedCase]]] = {side: [] for side in sides}
    for contender in sides.values():
        run_script(contender, scripts(name, "warm-up"))
    for side in alternate(list(sides), repeat):
        number, start = len(rounds[side]) + 1, time.perf_counter()
        rounds[side].append(run_script(sides[side], scripts(name, str(number))))
        say(f"{name} {side} {number}/{repeat}: {time.perf_counter() - start:.2f} s")
    return rounds


# -- no reuse ---------------------------------------------------------------------------------------


def _measure_no_reuse(
    plan: CachePlan, family: str, model: BenchModel, config: Config, say: Say
) -> dict[str, Any]:
    """The cost of the cache where nothing can be reused."""
    from mlxrun.cli.bench.engine.mlxrun_contender import MlxrunContender

    engines: dict[str, Contender] = {
        ON: MlxrunContender.open(config),
        OFF: MlxrunContender.open(_disable_cache(config)),
    }
    try:
        return compare_without_reuse(
            engines, plan, model.vocab, lambda line: say(f"{family} {NO_REUSE} {line}"), time.perf_counter
        )
    finally:
        for engine in engines.values():
            engine.close()


def compare_without_reuse(
    engines: Mapping[str, Contender], plan: CachePlan, vocab: int, say: Say, clock: Callable[[], float]
) -> dict[str, Any]:
    """Tokens a second of distinct prompts with and without a cache, in turns (A B B A); the ratio is the
    median over pairs of neighbours, which a slow moment of the machine hits alike."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for name in engines:
        run_workload(engines[name], make_distinct(plan.scale, vocab, f"{plan.seed} warm-up"), clock)
    for name in alternate(list(engines), 2 * plan.repeat):
        work = make_distinct(plan.scale, vocab, f"{plan.seed} {len(rates[name])}")
        trace = run_workload(engines[name], work, clock)
        rates[name].append((work.prompt_tokens + work.output_tokens) / (trace.end - trace.start))
        say(f"{name} {len(rates[name])}/{2 * plan.repeat}: {rates[name][-1]:,.0f} tok/s")
    pairs = [on / off for on, off in zip(rates[ON], rates[OFF], strict=True)]
    return {
        "runs": rates,
        "median": {name: statistics.median(values) for name, values in rates.items()},
        "ratio": statistics.median(pairs),
    }
