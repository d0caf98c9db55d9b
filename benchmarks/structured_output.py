"""`python -m benchmarks structured-output`: the cost of schemas while 16 rows decode, one each.

Both sides are mlxrun's engine with the same files, prompts and seeds; on one side each row has a grammar.
Answers are arrays that cannot end before their last token, so all rows decode together to the end. Random
weights try everything that a schema allows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure_plan import MeasurePlan
from mlxrun.cli.bench.engine.benchmark import SideRuns, make_meter, measure_workload
from mlxrun.cli.bench.engine.measurement import RequestOutput, compute_medians
from mlxrun.cli.bench.engine.mlxrun_contender import MlxrunContender
from mlxrun.cli.bench.engine.workloads import BenchRequest, RequestWorkload
from mlxrun.cli.bench.models import PRESETS, BenchModel, open_model
from mlxrun.cli.bench.report import build_notes, make_console, make_table
from mlxrun.config.settings import Config
from mlxrun.core.errors import MlxrunError
from mlxrun.core.request import Grammar, Request, SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from mlxrun.engine.engine import Engine

ROWS = 16
PROMPT, OUTPUT = 32, 256  # tokens
SCHEMAS, FREE = "schemas", "free"  # the sides
_FIELDS: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 40},
    {"type": "integer"},
    {"type": "number", "minimum": 0, "maximum": 1000},
    {"enum": ["red", "green", "blue", None]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 8},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,6}$"},
    {"anyOf": [{"type": "null"}, {"type": "string", "format": "date"}]},
)


class GrammarContender:
    """mlxrun's engine as a contender: sampled answers, each by its request's grammar if it has one."""

    name = "mlxrun"

    def __init__(self, engine: Engine, grammars: Mapping[str, Grammar]) -> None:
        self._engine = engine
        self._ours = MlxrunContender(engine)
        self._grammars = grammars

    def add(self, jobs: Sequence[BenchRequest]) -> None:
        """One request a job; its number is its seed."""
        stops = self._engine.model_info.eos_ids
        for i, job in enumerate(jobs):
            ruled = job.id in self._grammars
            params = SamplingParams(job.output, 1.0, seed=i, stop_ids=stops if ruled else frozenset())
            self._engine.add(Request(job.id, job.prompt, params, grammar=self._grammars.get(job.id)))

    def step(self) -> list[RequestOutput]:
        """One engine step."""
        return self._ours.step()

    def close(self) -> None:
        """Drop the engine."""
        self._ours.close()
        del self._engine


def make_schema(row: int) -> dict[str, Any]:
    """Make a schema that no other row has: an array of objects that does not end."""
    fields = {f"field_{row}_{i}": _FIELDS[(row + i) % len(_FIELDS)] for i in range(2 + row % 4)}
    item = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "array", "items": item, "minItems": 100_000}


def make_workload(scale: float, vocab: int, seed: int) -> RequestWorkload:
    """Make 16 prompts, all submitted at once."""
    rng, length = random.Random(f"masks {seed}"), max(2, round(PROMPT * scale))
    output = max(24, round(OUTPUT * scale))
    jobs = (
        BenchRequest(f"row-{i:02d}", tuple(rng.choices(range(vocab), k=length)), output) for i in range(ROWS)
    )
    return RequestWorkload("structured-output", tuple(jobs))


def run_structured_output_bench(plan: MeasurePlan, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure both sides in turn; return the report, as `--json` writes it."""
    from mlxrun.model.machine.device import resolve_config

    config = resolve_config(plan.config)
    config = replace(config, cache=replace(config.cache, backend="none"))
    with open_model(plan.model, plan.seed) as model:
        if plan.model in PRESETS:
            write_byte_tokenizer(model.folder, model.vocab)
        work = make_workload(plan.scale, min(model.vocab, 256), plan.seed)
        openers = {side: _make_loader(side, model, config, work) for side in (FREE, SCHEMAS)}
        sides = measure_workload(work, openers, plan.repeat, make_meter(), say)
    if failed := next((f"{name}: {side.error}" for name, side in sides.items() if side.error), None):
        raise MlxrunError(f"{work.name}: {failed}")
    return plan.build_report(model, {work.name: summarise(work, sides)})


def _make_loader(
    side: str, model: BenchModel, config: Config, work: RequestWorkload
) -> Callable[[], GrammarContender]:
    from mlxrun.api.structured.grammar import compile_grammar
    from mlxrun.engine.build import build_engine

    settings = replace(config.model, path=str(model.folder))

    def load() -> GrammarContender:
        engine = build_engine(replace(config, model=settings))
        ruled = work.requests if side == SCHEMAS else ()
        grammars = {
            job.id: compile_grammar("json_schema", make_schema(i), engine.model_info, param="schema")
            for i, job in enumerate(ruled)
        }
        return GrammarContender(engine, grammars)

    return load


def summarise(work: RequestWorkload, sides: Mapping[str, SideRuns]) -> dict[str, Any]:
    """Return the medians of each side, and the ratio of the speed with schemas to that without."""
    median = {name: compute_medians(side.runs) for name, side in sides.items()}
    ratio = {}
    for key in ("decode_tps", "output_tps"):
        ours, free = median[SCHEMAS][key], median[FREE][key]
        ratio[key] = ours / free if ours and free else None
    return {
        "rows": len(work.requests),
        "output_tokens": work.output_tokens,
        "sides": {name: {"runs": side.runs, "median": median[name]} for name, side in sides.items()},
        "ratio": ratio,
    }


def print_structured_output_report(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the table, and what was measured and where."""
    console = make_console(console)
    part = report["workloads"]["structured-output"]
    cells = []
    for key, title in (("decode_tps", "decode, tok/s"), ("output_tps", "whole workload, tok/s")):
        free, ruled = (part["sides"][side]["median"][key] for side in (FREE, SCHEMAS))
        cells.append(
            [
                title,
                *(_format_number(value, 0) for value in (free, ruled)),
                _format_number(part["ratio"][key], 2),
            ]
        )
    columns = (f"{part['rows']} rows", "without", "a schema each", "ratio")
    console.print(make_table(columns, 1, cells, console.is_terminal))
    for line in build_notes(report):
        console.print(line, highlight=False, soft_wrap=True)


def _format_number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def write_byte_tokenizer(folder: Path, vocab: int) -> None:
    """Write a tokenizer of bytes and random words for a preset, whose own tokens are no text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: i for i, letter in enumerate(["<end>", *letters])}
    rng = random.Random(0)
    parts = [*"abcdefghijklmnopqrstuvwxyz0123456789", '"', '":', "},{", '","', "\u0120"]
    while len(words) < vocab:
        words.setdefault("".join(rng.choices(parts, k=rng.randint(2, 6))), len(words))
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
