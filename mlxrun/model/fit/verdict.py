"""Whether a model fits in memory: how many rows of which length run together, and what would let more run.

Rows are admitted by the sum of memory_budget.py, and a model is refused before it is loaded by that of
footprint.py. The verdict asks both, so it is what the engine does with the same config.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from mlxrun.config.settings import CacheSettings, Config
from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.errors import ConfigError, MlxrunError, ModelLoadError
from mlxrun.core.memory_budget import MemoryBudget
from mlxrun.model.fit.outline import ModelOutline, load_outline
from mlxrun.model.fit.prediction import PredictedMemory, predict_encoding, predict_memory
from mlxrun.model.load.footprint import (
    check_memory,
    choose_quantization,
    make_memory_budget,
    measure_footprint,
)
from mlxrun.model.load.model_files import count_file_bytes
from mlxrun.model.load.model_info import LoadedModelInfo, load_model_info
from mlxrun.model.machine.decisions import Machine, decide_memory_limit
from mlxrun.model.machine.device import choose_step_costs, get_backend, resolve_config
from mlxrun.model.pooling.pooled_model import is_encoder

_KV_BITS: tuple[Literal[8, 4], ...] = (8, 4)
MIN_TOKENS = 2048  # of a row, where the whole context does not fit and nobody asked for a length
LEAST_TOKENS = 16  # of a row, as `--tokens` takes them
ANSWER = 256  # tokens of a row that are predicted as its answer


@dataclass(frozen=True, slots=True)
class WantedRows:
    """What should fit. None: as many as the config's `scheduler.max_running`, and the whole context; fewer
    are then enough."""

    rows: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class FitReport:
    """Sizes in bytes. `files`: of the weights on disk; `least`: see ModelOutline; `weights`, `load`, `run`:
    see PredictedMemory; `token`: of a token in the caches of a row; `state`: what a row takes besides;
    `rows_bytes`: caches of `rows` rows of `tokens` tokens; `images`, `features`: what decoded images and the
    cache of their features may take; `encoding`: see `predict_encoding`; `needed`: what admission reserves
    for weights and these rows; `limit`: what may be used, 0 if unknown.

    `fitting_rows`, `fitting_tokens`: what a config may ask for; 0 if nothing fits. `form`: of quantized
    weights, and why. `shortage`: why not even the shortest request fits in the limit, None if it does."""

    model: str
    fits: bool
    verdict: str
    rows: int
    tokens: int
    files: int
    least: int
    weights: int
    load: int
    run: int
    token: int
    state: int
    rows_bytes: int
    images: int
    features: int
    encoding: int | None
    needed: int
    limit: int
    fitting_rows: int
    fitting_tokens: int
    form: str
    shortage: str | None


def limit_memory(config: Config, total: int) -> Config:
    """The config for another machine of this kind, which has `total` bytes free."""
    backend = get_backend()
    machine = Machine(backend, total, total if backend != "cpu" else 0, total)
    limit = decide_memory_limit(machine, config.scheduler.memory_limit).value
    return replace(config, scheduler=replace(config.scheduler, memory_limit=limit))


def judge_model(config: Config, wanted: WantedRows, name: str) -> FitReport:
    """Judge the model of a config, whose files are there. ModelLoadError or ConfigError for what is wrong
    with its files, ConfigError for a model that only gives vectors. `name`: as the user calls it."""
    if wanted.rows is not None:
        config = replace(config, scheduler=replace(config.scheduler, max_running=wanted.rows))
    config = resolve_config(config)
    info = load_model_info(config.model, weights=True, announce=False, digest=False)
    if info.speech is not None:
        raise ConfigError(f"{name} only transcribes: its recordings keep nothing in memory afterwards")
    if is_encoder(info.config):
        raise ConfigError(f"{name} only gives vectors or scores: its texts keep nothing in memory")
    try:
        outline = load_outline(config, info)
    except ConfigError as error:  # weights in the form that the config wants are too large
        return _refuse(name, info, wanted, str(error))
    return _FitJudge(config, info, outline, wanted, name).judge()


def _refuse(name: str, info: LoadedModelInfo, wanted: WantedRows, reason: str) -> FitReport:
    files = count_file_bytes(info.folder)
    rows, tokens = wanted.rows or 1, wanted.tokens or info.context_length
    sizes = dict.fromkeys(("least", "weights", "load", "run", "token", "state", "rows_bytes", "images"), 0)
    empty = dict.fromkeys(("features", "encoding", "needed", "limit", "fitting_rows", "fitting_tokens"), 0)
    text = f"does not fit: {reason}"
    return FitReport(name, False, text, rows, tokens, files, form="", shortage=None, **sizes, **empty)


@dataclass(frozen=True, slots=True)
class _FitJudge:
    config: Config
    info: LoadedModelInfo
    outline: ModelOutline
    wanted: WantedRows
    name: str

    def judge(self) -> FitReport:
        budget, outline = self.make_budget(), self.outline
        shortage = budget.find_start_problem(pools=self.info.pooled is not None)
        refused = self.find_load_problem(shortage)
        tokens = self.choose_tokens(budget)
        most = self.wanted.rows or self.config.scheduler.max_running
        fitting = 0 if refused else budget.find_max_rows(tokens, most, self.min_chunk)
        rows = self.wanted.rows or max(fitting, 1)
        memory = self.predict(rows, tokens)
        row = measure_footprint(outline.cache, padding=1)
        fits = fitting >= rows
        length = tokens if fitting else self.find_longest(budget)
        needed = budget.compute_rows_bytes(rows, tokens, self.min_chunk)
        return FitReport(
            model=self.name,
            fits=fits,
            verdict=refused or self.describe(budget, rows, tokens, fits),
            rows=rows,
            tokens=tokens,
            files=count_file_bytes(self.info.folder),
            least=outline.least,
            weights=memory.weights,
            load=memory.load,
            run=memory.run,
            token=row.per_token + sum(size for _, size in row.windows),
            state=row.fixed,
            rows_bytes=rows * row.compute_row_bytes(tokens),
            images=budget.images,
            features=budget.features,
            encoding=predict_encoding(outline),
            needed=needed,
            limit=budget.limit,
            fitting_rows=0 if refused else max(fitting, 1 if length else 0),
            fitting_tokens=0 if refused else length,
            form=f"{', '.join(outline.kinds)}: {outline.form.reason}" if outline.kinds else "",
            shortage=shortage,
        )

    @property
    def min_chunk(self) -> int:
        """Prompt tokens of the smallest step."""
        chunk = self.config.scheduler.chunk
        assert chunk is not None
        return (
            chunk if self.config.engine.reproducible else min(chunk, choose_step_costs(self.config).min_chunk)
        )

    def make_budget(self, cache: CacheSettings | None = None) -> MemoryBudget:
        """The sum by which rows are admitted. ConfigError if these settings do not suit the model."""
        outline = self.outline
        quantization = choose_quantization(cache or self.config.cache, outline.cache)
        model = outline.caller.model
        return make_memory_budget(
            self.config, self.info, model, outline.cache, outline.vocab, quantization=quantization
        )

    def predict(self, rows: int, tokens: int) -> PredictedMemory:
        answer = min(ANSWER, max(tokens // 2, 1))
        return predict_memory(self.config, self.outline, rows, tokens - answer, answer)

    def find_load_problem(self, shortage: str | None) -> str | None:
        """Why the engine would refuse the model before any request; None if it would not. `shortage`: see
        FitReport."""
        try:
            check_memory(self.config, self.info)
        except (ModelLoadError, ConfigError) as error:
            return f"does not fit: {str(error).removeprefix(f'{self.info.folder}: ')}"
        return None if shortage is None else f"does not fit: {shortage}: no request can ever run"

    def choose_tokens(self, budget: MemoryBudget) -> int:
        """The length of rows: as wanted, else the context or what fits of it."""
        if self.wanted.tokens is not None:
            return self.wanted.tokens
        context = self.info.context_length
        return max(self.find_longest(budget), min(MIN_TOKENS, context))

    def find_longest(self, budget: MemoryBudget) -> int:
        """The most tokens that a row alone may have; 0 if none fits."""
        if not budget.fits([2], 1):
            return 0
        return budget.find_max_length(2, self.info.context_length, self.min_chunk)

    def describe(self, budget: MemoryBudget, rows: int, tokens: int, fits: bool) -> str:
        """The verdict in a sentence."""
        size = f"{rows} {'row' if rows == 1 else 'rows'} of {tokens:,} tokens"
        if budget.limit == 0:
            return f"the free memory is unknown: give it with --memory; {size} are wanted"
        limit = format_rounded(budget.limit)
        needed = format_rounded(budget.compute_rows_bytes(rows, tokens, self.min_chunk))
        if not fits:
            ways = "; ".join(self.list_ways(budget, rows, tokens)) or "nothing less does either"
            return f"does not fit: {size} need {needed}, and {limit} may be used. What would fit: {ways}"
        more = self.config.scheduler.max_running
        notes = [f"{needed} of the {limit} that may be used"]
        if tokens < self.info.context_length and self.wanted.tokens is None:
            notes.append(f"the context of {self.info.context_length:,} does not fit")
        if self.wanted.rows is None and rows < more:
            notes.append(f"further requests wait, or run beside shorter ones (up to {more})")
        return f"fits: {size} at a time; {'; '.join(notes)}"

    def list_ways(self, budget: MemoryBudget, rows: int, tokens: int) -> Iterator[str]:
        """What would fit in place of so many rows of this length."""
        fewer = budget.find_max_rows(tokens, rows, self.min_chunk)
        if fewer:
            yield f"{fewer} {'row' if fewer == 1 else 'rows'} of this length (--rows {fewer})"
        shorter = self._find_common_length(budget, rows, tokens)
        if shorter:
            yield f"{rows} of up to {shorter:,} tokens (--tokens {shorter})"
        for bits in _KV_BITS:
            try:
                packed = self.make_budget(replace(self.config.cache, kv_bits=bits))
            except MlxrunError:
                return
            if packed.find_max_rows(tokens, rows, self.min_chunk) == rows:
                yield f"all with cache.kv_bits: {bits}, which changes answers a little"
                return

    def _find_common_length(self, budget: MemoryBudget, rows: int, tokens: int) -> int:
        """The most tokens below `tokens` that each of so many rows may have; 0: not even LEAST_TOKENS."""
        lengths = range(LEAST_TOKENS, tokens)
        fitting = bisect_right(
            lengths, budget.limit, key=lambda length: budget.compute_rows_bytes(rows, length, self.min_chunk)
        )
        return lengths[fitting - 1] if fitting else 0
