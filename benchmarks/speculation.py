"""`python -m benchmarks speculation`: the same answers with drafts and without, on two engines in turns.

Random weights do not copy a text as trained models do. So the answers of `edit` and `prose` are written here,
and forced where tokens are sampled, on both sides alike; the model's forwards are all real. `free` forces
nothing: greedy and sampled answers of the model, of which tokens and logprobs are compared. `language` is for
the model that is trained here (mtp_model.py): sampled texts of its language, of which nothing is forced.

A draft model of random weights agrees with no other one, and a head of random weights with no model. So where
answers are forced, their predictions are too: each is the token that is due with the probability
`acceptance`, by the position's own chance.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks import mtp_model
from benchmarks.measure_plan import MeasurePlan
from mlxrun.cli.bench.models import PRESETS, BenchModel, open_model
from mlxrun.cli.bench.report import make_console, make_table
from mlxrun.core.errors import ConfigError
from mlxrun.core.request import Request, SamplingParams, TokenEvent

if TYPE_CHECKING:
    from mlxrun.engine.engine import Engine

TEXT, PROSE_PROMPT, EDIT_EVERY = 512, 256, 32  # tokens
WORDS = 2000  # of prose; the word of rank r is 1 / r as frequent as the first
WORKLOADS = ("edit", "prose", "free")
LANGUAGE, LANGUAGE_PROMPT = "language", 32  # tokens
ROWS = (1, 16)
FORCED = 1e6  # added to the logit of the token that is due


@dataclass(frozen=True, slots=True)
class DraftSide:
    """The side with drafts: `method` of the config; `draft`: a preset or a folder, None: no model drafts;
    `acceptance`: share of a model's or a head's predictions that hold, where answers are forced."""

    method: str = "ngram"
    draft: str | None = None
    acceptance: float = 0.8


@dataclass(frozen=True, slots=True)
class Case:
    """Requests; `scripts`: by seed of the request, prompt and answer; empty: nothing is forced."""

    requests: tuple[Request, ...]
    scripts: Mapping[int, Sequence[int]]


def run_speculation_bench(
    plan: MeasurePlan,
    rows: Sequence[int],
    workloads: Sequence[str],
    say: Callable[[str], None],
    side: DraftSide = DraftSide(),
) -> dict[str, Any]:
    """Tokens a second of both sides, what was drafted, and answers that differ. ConfigError for `language`
    with another model than the trained one."""
    if LANGUAGE in workloads and plan.model != mtp_model.TRAINED:
        raise ConfigError(f"--workload {LANGUAGE} needs --model {mtp_model.TRAINED}")
    with ExitStack() as stack:
        model = stack.enter_context(_open_target(plan, side.method, say))
        small = stack.enter_context(open_model(side.draft, plan.seed + 1)) if side.draft else None
        sides = {"off": _build(plan, model, "off"), "drafts": _build(plan, model, side.method, small)}
        found: dict[str, Any] = {}
        for workload in workloads:
            for count in rows:
                say(f"{workload}, {count} rows")
                case = make_case(workload, count, plan.scale, model.vocab, plan.seed)
                result = _measure(sides, case, plan.repeat, side.acceptance)
                found[f"{workload}, {count} rows"] = result
                speed, differ = result["tokens_per_second"], result["differing_answers"]
                say(f"  {speed['off']:.0f} and {speed['drafts']:.0f} tokens/s, {differ} answers differ")
        described = sides["drafts"].scheduler.drafts.describe()
        own = {"method": described["method"], "problem": described["problem"], **asdict(side)}
        return plan.build_report(model, found) | {"drafts": own | {"cost": described["model"]["cost"]}}


def _open_target(
    plan: MeasurePlan, method: str, say: Callable[[str], None]
) -> AbstractContextManager[BenchModel]:
    """The model of both sides; for `mtp`, a preset gets a head."""
    if plan.model == mtp_model.TRAINED:
        return mtp_model.open_trained_model(plan.seed, say)
    if method == "mtp" and plan.model in PRESETS:
        return mtp_model.open_model_with_head(plan.model, plan.seed)
    return open_model(plan.model, plan.seed)


def make_case(workload: str, rows: int, scale: float, vocab: int, seed: int) -> Case:
    """The requests of a workload, each with a text of its own."""
    rng = random.Random(f"{workload} {seed}")
    length = max(round(TEXT * scale), 16)
    if workload == LANGUAGE:
        params = SamplingParams(max_tokens=min(length, mtp_model.LENGTH - LANGUAGE_PROMPT), temperature=1.0)
        prompts = mtp_model.make_prompts(rows, LANGUAGE_PROMPT, seed)
        return Case(
            tuple(Request(f"{i}", tuple(p), replace(params, seed=i)) for i, p in enumerate(prompts)), {}
        )
    requests, scripts = [], {}
    for row in range(rows):
        if workload == "edit":
            prompt = rng.choices(range(2, vocab), k=length)
            answer = _edit(prompt, vocab, rng)
        else:
            weights = [1 / rank for rank in range(1, min(WORDS, vocab - 2) + 1)]
            words = rng.choices(range(2, 2 + len(weights)), weights, k=PROSE_PROMPT + length)
            prompt, answer = words[:PROSE_PROMPT], words[PROSE_PROMPT:]
        warm = 0.8 if workload == "free" and row % 2 else 0.0
        logprobs = 0 if workload == "free" else None
        params = SamplingParams(max_tokens=len(answer), seed=row, temperature=warm, logprobs=logprobs)
        requests.append(Request(f"{row}", tuple(prompt), params))
        scripts[row] = [*prompt, *answer]
    return Case(tuple(requests), {} if workload == "free" else scripts)


def _edit(text: Sequence[int], vocab: int, rng: random.Random) -> list[int]:
    """The text with words replaced, left out or put in here and there."""
    edited: list[int] = []
    for token in text:
        kind = rng.randrange(3) if rng.random() < 1 / EDIT_EVERY else None
        if kind is None:
            edited.append(token)
        elif kind < 2:
            edited += rng.choices(range(2, vocab), k=1 + rng.randrange(3)) + [token] * kind
    return edited


@contextmanager
def _force_answers(scripts: Mapping[int, Sequence[int]], acceptance: float) -> Iterator[None]:
    """Sample the tokens of the scripts; the row's seed says which. What drafts samples them by chance."""
    import mlx.core as mx

    from mlxrun.model.run.sampler import Sampler
    from mlxrun.model.speculation import draft_model, mtp_source

    def list_due(sampler: Sampler, positions: Sequence[int]) -> list[int]:
        due = [scripts[row.params.seed] for row in sampler.rows]
        return [text[min(n, len(text) - 1)] for text, n in zip(due, positions, strict=True)]

    def force(x: mx.array, tokens: Sequence[int]) -> mx.array:
        return x.at[mx.arange(len(tokens)), mx.array(tokens)].add(FORCED)

    class DraftSampler(Sampler):
        def _add_noise(self, x: mx.array, positions: Sequence[int]) -> mx.array:
            seeds = [row.params.seed for row in self.rows]
            fails = [_fails(s, n, acceptance) for s, n in zip(seeds, positions, strict=True)]
            tokens = zip(list_due(self, positions), fails, strict=True)
            return force(x, [token ^ failed for token, failed in tokens])

    def choose(self: Sampler, x: mx.array, positions: Sequence[int]) -> mx.array:
        return force(x, list_due(self, positions))

    with (
        mock.patch.object(Sampler, "_add_noise", choose),
        mock.patch.object(draft_model, "Sampler", DraftSampler),
        mock.patch.object(mtp_source, "Sampler", DraftSampler),
    ):
        yield


def _fails(seed: int, position: int, acceptance: float) -> bool:
    """Whether the prediction of this token is a wrong one."""
    return random.Random(f"{seed} {position}").random() >= acceptance


def _build(plan: MeasurePlan, model: BenchModel, method: Any, small: BenchModel | None = None) -> Engine:
    from mlxrun.engine.build import build_engine

    config = plan.config
    speculation = replace(config.speculation, method=method)
    settings = replace(config.model, path=str(model.folder), draft=str(small.folder) if small else None)
    cache = replace(config.cache, backend="none")
    return build_engine(replace(config, model=settings, cache=cache, speculation=speculation))


def _measure(sides: Mapping[str, Engine], case: Case, repeat: int, acceptance: float) -> dict[str, Any]:
    """Both sides in turns, after a run of each that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    answers: dict[str, list[Any]] = {}
    before = sides["drafts"].scheduler.drafts.describe()
    for turn in range(repeat + 1):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            if case.scripts:
                with _force_answers(case.scripts, acceptance):
                    taken, answers[name] = _run(sides[name], case.requests)
            else:
                taken, answers[name] = _run(sides[name], case.requests)
            if turn:
                seconds[name].append(taken)
    after = sides["drafts"].scheduler.drafts.describe()
    tokens = sum(len(answer) for answer, _ in answers["off"])
    speed = {name: tokens / statistics.median(taken) for name, taken in seconds.items()}
    drafts = {key: (after[key] - before[key]) // (repeat + 1) for key in ("steps", "drafted", "accepted")}
    differ = sum(a != b for a, b in zip(answers["off"], answers["drafts"], strict=True))
    return {
        **{"tokens_per_second": speed, "ratio": speed["drafts"] / speed["off"], "tokens": tokens},
        **drafts,
        "differing_answers": differ,
    }


def _run(engine: Engine, requests: Sequence[Request]) -> tuple[float, list[Any]]:
    """Seconds from the first token of any row to the last one; and each row's tokens and logprobs."""
    for request in requests:
        engine.add(request)
    events: list[TokenEvent] = []
    started = 0.0
    while engine.busy:
        new = engine.step()
        if not started and any(event.tokens for event in new):
            started = time.perf_counter()
        events += new
    taken = time.perf_counter() - started
    found: dict[str, tuple[list[int], list[float]]] = {request.id: ([], []) for request in requests}
    for event in events:
        if event.error is not None:
            raise event.error
        tokens, logprobs = found[event.request_id]
        tokens += event.tokens
        logprobs += [each.logprob for each in event.logprobs]
    return taken, list(found.values())


def print_speculation_report(report: Mapping[str, Any]) -> None:
    """Print a table of the workloads."""
    console = make_console(None)
    cells = [
        (
            *(name, f"{case['tokens_per_second']['off']:.0f}", f"{case['tokens_per_second']['drafts']:.0f}"),
            *(f"{case['ratio']:.2f} x", f"{case['steps']}", f"{case['drafted']}", f"{case['accepted']}"),
            f"{case['differing_answers']}",
        )
        for name, case in report["workloads"].items()
    ]
    titles = (
        "answers",
        "tokens/s",
        "with drafts",
        "ratio",
        "steps",
        "drafted",
        "accepted",
        "differ",
    )
    console.print(make_table(titles, 1, cells, console.is_terminal))
