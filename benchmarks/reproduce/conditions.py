"""The conditions that need no process of their own: alone, beside others, in another order, and with caches.

Every run is a job as `mlxrun batch` runs it. The oracle computes one request at a time, without a cache, on
an engine that has computed nothing before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.reproduce.answers import Answers, Differences, count_differences, read_answers
from benchmarks.reproduce.lines import LineWriter, shuffle_lines
from benchmarks.reproduce.memory_shortage import (
    ROWS_IN_MEMORY,
    compute_tight_limit,
    count_preemptions,
    reserve_nothing,
)
from benchmarks.reproduce.models import ReproduceModel
from mlxrun.config.setting_fields import hash_config
from mlxrun.config.settings import Config
from mlxrun.core.errors import MlxrunError
from mlxrun.evals.replay import make_serial_config
from mlxrun.jobs.records.run_paths import JobPaths
from mlxrun.jobs.run.job_run import JobOptions, JobOutcome, JobRun, JobSetup
from mlxrun.jobs.run.line_answerer import LinePreparer
from mlxrun.jobs.run.progress import make_view, pluralize
from mlxrun.jobs.run.stop_signals import StopSignals

if TYPE_CHECKING:
    from mlxrun.engine.client import EngineClient
    from mlxrun.model.load.model_info import LoadedModelInfo

ROWS = 64
CHUNK = 32  # tokens; short, so that the prompts of the test have several
# The config of every run, for a file or `build_config`.
SETTINGS: dict[str, dict[str, Any]] = {
    "engine": {"reproducible": True},
    "scheduler": {"chunk": CHUNK, "max_running": ROWS},
    "cache": {"backend": "memory", "memory_bytes": 2_000_000_000, "checkpoint_every": CHUNK},
    "sampling": {"seed": 11},
    "log": {"level": "warning"},
}


@dataclass(slots=True)
class ModelRuns:
    """The runs of one model. `folder`: for jobs and outputs; `lines`: of the job; `more_tokens`: how much
    longer answers are than usual."""

    model: ReproduceModel
    folder: Path
    config: Config
    count: int
    more_tokens: int = 0
    info: LoadedModelInfo = field(init=False)
    lines: list[str] = field(init=False)
    oracle: Answers = field(init=False)

    def __post_init__(self) -> None:
        from mlxrun.model.load.model_info import load_model_info

        self.folder.mkdir(parents=True, exist_ok=True)
        self.info = load_model_info(self.config.model, weights=True)
        is_chat = self.info.chat_template is not None
        writer = LineWriter(is_chat, self.model.images, self.more_tokens)
        self.lines = writer.write(self.job, self.count)

    @property
    def job(self) -> Path:
        return self.folder / "job.jsonl"

    def get_paths(self, name: str) -> JobPaths:
        """The paths of a run of the job, by the name of its output."""
        return JobPaths(self.job, self.folder / f"{name}.out.jsonl")

    async def run_oracle(self) -> None:
        """Compute every line alone and cold."""
        await self._run_alone("oracle")
        self.oracle = read_answers(self.get_paths("oracle"))

    async def run_alone(self) -> Differences:
        """The same again, on another engine."""
        await self._run_alone("alone")
        return self._compare("alone")

    async def run_together(self) -> tuple[Differences, Differences]:
        """All lines, many at once; and again on the same engine, whose cache has their prompts then."""
        client = await self._start(self.config)
        try:
            first = await self._run("together", self.config, client)
            second = await self._run("warm-memory", self.config, client)
        finally:
            await client.close()
        return self._compare("together", first), self._compare("warm-memory", second, needs_hits=True)

    async def run_shuffled(self) -> tuple[Differences, Differences]:
        """All lines in another order; and in their own on a new engine, whose cache on disk has their
        prompts."""
        cache = replace(self.config.cache, backend="disk", disk_path=str(self.folder / "cache"))
        config = replace(self.config, cache=cache)
        outcomes = []
        for name in ("shuffled", "warm-disk"):
            client = await self._start(config)
            try:
                outcomes.append(await self._run(name, config, client))
            finally:
                await client.close()
        return self._compare("shuffled", outcomes[0]), self._compare(
            "warm-disk", outcomes[1], needs_hits=True
        )

    async def run_preempted(self) -> Differences:
        """All lines where memory holds few rows and is admitted to the last byte, so that rows which have
        begun their answers are preempted. MlxrunError if none is, however few rows it holds."""
        # By default they take a share of the limit, so that they would leave rows more of a tight one.
        media = replace(self.config.media, memory_bytes=1_000_000)
        cache = replace(self.config.cache, image_bytes=1_000_000)
        config = replace(self.config, media=media, cache=cache)
        with reserve_nothing():
            for rows in ROWS_IN_MEMORY:
                name = f"preempted-{rows}"
                limit = await self._compute_tight_limit(config, rows)
                scheduler = replace(config.scheduler, memory_limit=limit)
                client = await self._start(replace(config, scheduler=scheduler))
                try:
                    with count_preemptions() as preempted:
                        await self._run(name, config, client)
                finally:
                    await client.close()
                if preempted.begun:
                    note = f"{pluralize(preempted.begun, 'preemption')} in {self.count} lines"
                    return self._compare(name, note=note)
        raise MlxrunError(f"{self.model.name}: preempted: no row was that had begun its answer")

    async def _compute_tight_limit(self, config: Config, rows: int) -> int:
        """The memory limit that holds so many rows, by an engine without it."""
        client = await self._start(config)
        try:
            headroom = config.scheduler.memory_headroom
            return await compute_tight_limit(client, headroom, self._list_lengths(), rows)
        finally:
            await client.close()

    def _list_lengths(self) -> list[int]:
        """Tokens of each line, all its choices together."""
        bodies = (json.loads(line)["response"]["body"] for line in self.oracle.values())
        return [int(body["usage"]["total_tokens"]) for body in bodies]

    async def _run_alone(self, name: str) -> None:
        config = replace(self.config, batch=replace(self.config.batch, concurrency=1))
        client = await self._start(make_serial_config(config))
        try:
            await self._run(name, config, client)
        finally:
            await client.close()

    async def _start(self, config: Config) -> EngineClient:
        from mlxrun.engine.client import EngineClient

        return await EngineClient.start(config, self.info)

    async def _run(self, name: str, config: Config, client: EngineClient) -> JobOutcome:
        """Run the job on an engine, which stays open."""
        from mlxrun.api.parsers.registry import detect_formats

        async def get_client() -> EngineClient:
            return client

        formats = detect_formats(self.info.chat_template, self.info.tokenizer, config.parsers)
        preparer = LinePreparer(self.info, config, self.folder, formats=formats)
        setup = JobSetup(config, hash_config(config), self.info, preparer, get_client, dict, keep_engine=True)
        paths = self.get_paths(name)
        if name == "shuffled":
            paths = JobPaths(self.folder / "shuffled.jsonl", paths.out)
            shuffle_lines(paths.job, self.lines)
        with _open_null() as nowhere:
            view = partial(make_view, stream=nowhere)
            return await JobRun(paths, setup, JobOptions(), _ignore, StopSignals(_ignore), view).run()

    def _compare(
        self, name: str, outcome: JobOutcome | None = None, *, needs_hits: bool = False, note: str = ""
    ) -> Differences:
        """Compare with the oracle. MlxrunError if a cache should have been used and was not."""
        share = outcome.meter.cached_share if outcome else 0.0
        if needs_hits and share < 0.1:
            raise MlxrunError(
                f"{self.model.name}: {name}: the cache was not used ({share:.0%} of the tokens)"
            )
        note = f"{share:.0%} reused" if outcome else note
        return count_differences(self.oracle, read_answers(self.get_paths(name)), note)


def _ignore(text: str) -> None:
    """Nobody reads what a job says here."""


@contextmanager
def _open_null() -> Iterator[Any]:
    with open(os.devnull, "w") as nowhere:
        yield nowhere
