"""`python -m benchmarks prefix-cache`: requests that meet the prefix cache cold and warm, beside mlx-lm's
prompt cache.

All sides of a family are loaded at once and take turns round by round (A B, B A, ...). A round draws fresh
tokens; one round of the same lengths goes before, unmeasured. Answers are compared with a side that keeps
nothing, loaded when the measuring is over.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.prefix_cache.measurement import Record, Side, play, same_tokens, summary
from benchmarks.prefix_cache.models import VISION, open_family_model
from benchmarks.prefix_cache.workloads import IMAGE, LOOKUP, NOTHING, SCRIPTS, Script, distinct, make_script
from mlxrun import __version__
from mlxrun.bench.engine.benchmark import OURS, PEER, alternate
from mlxrun.bench.engine.measurement import Contender, run_workload
from mlxrun.bench.models import BenchModel
from mlxrun.config.settings import Config
from mlxrun.errors import ConfigError

FORMAT = 1
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
    from mlxrun.model.doctor import describe_device
    from mlxrun.model.machine.device import resolve_config
    from mlxrun.model.machine.versions import list_library_versions

    plan = replace(plan, config=resolve_config(plan.config))
    if plan.config.cache.backend == "none":
        raise ConfigError("cache.backend: none leaves nothing to measure")
    measured = {family: _family(plan, family, say) for family in plan.families if _scenarios(plan, family)}
    return {
        "format": FORMAT,
        "versions": {"mlxrun": __version__} | list_library_versions(),
        "device": describe_device(),
        "settings": _settings(plan),
        "families": measured,
        "lookup": measure_lookup(plan.config, plan.seed, say) if LOOKUP in plan.scenarios else None,
    }


def _settings(plan: CachePlan) -> dict[str, Any]:
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
        from mlxrun.bench.engine.mlx_lm_contender import SETTINGS

        settings[PEER] = SETTINGS | {"prompt_cache_size": CACHES}
    return settings


def _scenarios(plan: CachePlan, family: str) -> tuple[str, ...]:
    """Those of the plan that fit: images need a vision model, and a vision model is measured with them."""
    fit = (IMAGE,) if family == VISION else (*SCRIPTS, NOTHING)
    return tuple(name for name in plan.scenarios if name in fit)


def _family(plan: CachePlan, family: str, say: Say) -> dict[str, Any]:
    """One family's part of the report."""
    names = _scenarios(plan, family)
    parts: dict[str, Any] = {}
    with open_family_model(plan.model, plan.seed, family) as model:
        config = _model_config(plan.config, model, family)
        peer = plan.peer and family != VISION
        played = [name for name in names if name != NOTHING]
        if played:
            parts = _played(plan, family, model, config, played, peer, say)
        if NOTHING in names:
            parts[NOTHING] = _nothing(plan, family, model, config, say)
    return {"model": model.name, "dtype": model.dtype, "vocab": model.vocab, "scenarios": parts}


def _model_config(config: Config, model: BenchModel, family: str) -> Config:
    """Ours computes in the file's type, as mlx-lm does; the vision model has no peer."""
    settings = replace(config.model, path=str(model.folder))
    if settings.dtype == "auto" and model.dtype is not None and family != VISION:
        settings = replace(settings, dtype=model.dtype)  # type: ignore[arg-type]
    return replace(config, model=settings)


def _uncached(config: Config) -> Config:
    cache = replace(config.cache, backend="none", image_bytes=0)
    return replace(config, cache=cache)


# -- scripts ----------------------------------------------------------------------------------------


def _played(
    plan: CachePlan, family: str, model: BenchModel, config: Config, names: list[str], peer: bool, say: Say
) -> dict[str, Any]:
    """Play every scenario on every side, then check the last round's answers."""
    results: dict[str, dict[str, list[list[Record]]]] = {}
    with _opened(model, config, family, peer, keep=True) as sides:
        scripts = _scripts(plan, model, config, sides[OURS], family)
        for name in names:
            results[name] = measure_rounds(name, sides, scripts, plan.repeat, lambda s: say(f"{family} {s}"))
    parts: dict[str, Any] = {
        name: {"sides": {side: summary(rounds) for side, rounds in by_side.items()}}
        for name, by_side in results.items()
    }
    with _opened(model, config, family, peer, keep=False) as plain:
        for name, by_side in results.items():
            for side, rounds in by_side.items():
                parts[name]["sides"][side]["same_tokens"] = same_tokens(plain[side], rounds[-1])
            say(f"{family} {name}: answers compared")
    return parts


def _scripts(plan: CachePlan, model: BenchModel, config: Config, ours: Any, family: str) -> Scripts:
    if family == VISION:
        from benchmarks.prefix_cache.image import image_script

        return lambda name, seed: image_script(ours.model_info, config, plan.scale, f"{plan.seed} {seed}")
    return lambda name, seed: make_script(name, plan.scale, model.vocab, f"{plan.seed} {seed}")


@contextlib.contextmanager
def _opened(
    model: BenchModel, config: Config, family: str, peer: bool, keep: bool
) -> Iterator[dict[str, Side]]:
    """All sides, loaded; `keep`: with their caches."""
    from benchmarks.prefix_cache.mlxrun_side import OursCached

    with contextlib.ExitStack() as stack:
        ours = OursCached.open(config if keep else _uncached(config), count=family == VISION)
        stack.callback(ours.close)
        sides: dict[str, Side] = {OURS: ours}
        if peer:
            from benchmarks.prefix_cache.mlx_lm_side import MlxLmCached

            sides[PEER] = MlxLmCached.open(model.folder, keep)
            stack.callback(sides[PEER].close)
        yield sides


def measure_rounds(
    name: str, sides: Sides, scripts: Scripts, repeat: int, say: Say
) -> dict[str, list[list[Record]]]:
    """A round to warm up and `repeat` measured ones on each side, in alternating order."""
    rounds: dict[str, list[list[Record]]] = {side: [] for side in sides}
    for contender in sides.values():
        play(contender, scripts(name, "warm-up"))
    for side in alternate(list(sides), repeat):
        number, start = len(rounds[side]) + 1, time.perf_counter()
        rounds[side].append(play(sides[side], scripts(name, str(number))))
        say(f"{name} {side} {number}/{repeat}: {time.perf_counter() - start:.2f} s")
    return rounds


# -- no reuse ---------------------------------------------------------------------------------------


def _nothing(plan: CachePlan, family: str, model: BenchModel, config: Config, say: Say) -> dict[str, Any]:
    """What the cache costs where nothing can be reused."""
    from mlxrun.bench.engine.mlxrun_contender import MlxrunContender

    engines: dict[str, Contender] = {
        ON: MlxrunContender.open(config),
        OFF: MlxrunContender.open(_uncached(config)),
    }
    try:
        return compare(
            engines, plan, model.vocab, lambda line: say(f"{family} {NOTHING} {line}"), time.perf_counter
        )
    finally:
        for engine in engines.values():
            engine.close()


def compare(
    engines: Mapping[str, Contender], plan: CachePlan, vocab: int, say: Say, clock: Callable[[], float]
) -> dict[str, Any]:
    """Tokens a second of distinct prompts with and without a cache, in turns (A B B A); the ratio is the
    median over pairs of neighbours, which a slow moment of the machine hits alike."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for name in engines:
        run_workload(engines[name], distinct(plan.scale, vocab, f"{plan.seed} warm-up"), clock)
    for name in alternate(list(engines), 2 * plan.repeat):
        work = distinct(plan.scale, vocab, f"{plan.seed} {len(rates[name])}")
        trace = run_workload(engines[name], work, clock)
        rates[name].append((work.prompt_tokens + work.output_tokens) / (trace.end - trace.start))
        say(f"{name} {len(rates[name])}/{2 * plan.repeat}: {rates[name][-1]:,.0f} tok/s")
    pairs = [on / off for on, off in zip(rates[ON], rates[OFF], strict=True)]
    return {
        "runs": rates,
        "median": {name: statistics.median(values) for name, values in rates.items()},
        "ratio": statistics.median(pairs),
    }
