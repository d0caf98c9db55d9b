"""One run of a job from start to exit code: lock, read, reconcile, run, finish.

    lock -> scan -> (--strict) -> (--fresh) -> journal, manifest, cut -> engine -> lines -> order -> manifest

The engine starts only if a line is to be run. Whatever ends the run, finished lines stay finished; once none
is left to do, partial answers and the job's cache are removed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlxrun.batch import job_cache
from mlxrun.batch.job_check import check_chats, check_lines, say_problem
from mlxrun.batch.line_answerer import EngineClientInterface, LineAnswerer, Prepare, base_seed
from mlxrun.batch.line_index import DONE, FAILED, TODO, Index
from mlxrun.batch.line_keys import LineKeys, settings_digest
from mlxrun.batch.line_runner import BACKOFF, LineRunner, Watcher
from mlxrun.batch.manifest import Facts, Manifest, Status, check_owner
from mlxrun.batch.output_writer import Writer, sort_outputs
from mlxrun.batch.partial_answers import PartialAnswers
from mlxrun.batch.progress import ProgressMeter, View, make_view
from mlxrun.batch.reconciliation import Reconciler, Resumed
from mlxrun.batch.run_paths import Paths, locked
from mlxrun.batch.score_table import count
from mlxrun.batch.scoring import Scores
from mlxrun.batch.stop_signals import Interrupted, StopSignals
from mlxrun.config.conversion import to_plain
from mlxrun.config.settings import Config
from mlxrun.errors import ConfigError, JobError, MlxrunError
from mlxrun.text.model_info import ModelInfo

log = logging.getLogger(__name__)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The flags of `mlxrun batch`."""

    fresh: bool = False
    retry_failed: bool = False
    strict: bool = False
    limit: int | None = None  # 0: only make what earlier runs left whole


@dataclass(frozen=True, slots=True)
class JobSetup:
    """What a job runs on. `start` is called if there is something to do, and its client closed at the end."""

    config: Config
    config_hash: str
    model_info: ModelInfo
    prepare: Prepare
    start: Callable[[], Coroutine[Any, Any, EngineClientInterface]]
    device: Callable[[], Mapping[str, Any]]  # called once the engine runs


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a run ended that was not cut short."""

    exit_code: int
    meter: ProgressMeter
    scores: Scores


@dataclass(slots=True)
class JobRun:
    """One run; `say` gets sentences for the user, `view` shows the progress, `stop` ends it (by default
    signals do)."""

    paths: Paths
    setup: JobSetup
    options: JobOptions
    say: Say
    view: Callable[[ProgressMeter], View] = make_view
    stop: StopSignals | None = None
    clock: Callable[[], float] = time.monotonic
    backoff: float = BACKOFF
    _device: Mapping[str, Any] | None = field(default=None, init=False)

    async def run(self) -> JobOutcome:
        """Run the job. JobError, EngineDead, ModelLoadError or Interrupted if it cannot be finished."""
        stop = self.stop or StopSignals(self.say)
        config = self.setup.config
        settings = settings_digest(config, self.setup.model_info)
        keys = LineKeys(settings, self.setup.prepare.folder, config.media.max_bytes)
        index = Index(self.paths.job, keys)
        try:
            with stop.listening(), locked(self.paths):
                await asyncio.to_thread(index.scan, lambda: stop.requested)
                stop.check()
                return await self._run(index, settings, stop)
        except Interrupted:
            stop.leave_if_stuck()
            raise
        finally:
            index.close()

    async def _run(self, index: Index, settings: str, stop: StopSignals) -> JobOutcome:
        config = self.setup.config
        limit = self.options.limit
        end = len(index) if limit is None else min(limit, len(index))
        if not self.options.fresh:
            await asyncio.to_thread(check_owner, self.paths, index.sha256)
        if self._commanded:
            await asyncio.to_thread(check_chats, index, self.setup.model_info, end)
        if self.options.strict or config.batch.on_invalid == "fail":
            await stop.run(self._refuse_bad(index, end))
        if self.options.fresh:
            self.paths.forget()
            await asyncio.to_thread(job_cache.remove, self.paths.cache)
        reconciler = Reconciler(index, self.paths, retry=end if self.options.retry_failed else 0)
        await asyncio.to_thread(reconciler.read_journal)
        manifest = Manifest(self.paths, self._facts())
        await asyncio.to_thread(manifest.begin, index, reconciler.found.runs)
        found = await asyncio.to_thread(reconciler.rewrite, settings)
        answers = PartialAnswers(self.paths.answers, keep=not config.engine.reproducible)
        await asyncio.to_thread(answers.read, index)
        self._tell(found, settings, index, len(answers))
        meter = _meter(index, end, found, self.clock)
        status = Status(self.paths.status, manifest.run)
        try:
            run = Run(index, end, meter, found.scores, status, stop, answers)
            await self._lines(run, manifest.run)
            exit_code = 1 if meter.failed else 0
            if config.batch.order == "input":
                await asyncio.to_thread(sort_outputs, self.paths, index)
            await asyncio.to_thread(manifest.end, index, meter, exit_code, self._device, complete=True)
            if not index.state.count(TODO):
                answers.remove()
                await asyncio.to_thread(job_cache.remove, self.paths.cache)
        except MlxrunError as error:
            await self._end_badly(error, index, meter, manifest, status)
            raise
        status.write("done", meter, force=True)
        return JobOutcome(exit_code, meter, found.scores)

    async def _refuse_bad(self, index: Index, end: int) -> None:
        report = partial(say_problem, index.path, self.say)
        checked = await check_lines(index, self.setup.prepare, end, report)
        if checked.refused:
            share = f"{checked.refused} of {count(checked.lines, 'line')}"
            raise JobError(f"{index.path}: {share} refused; nothing was run")

    async def _lines(self, run: Run, number: int) -> None:
        """Start the engine if there is something to do, and do it."""
        if not run.index.state.count(TODO, 0, run.end):
            return
        writer = Writer(self.paths, run.index, number)
        client: EngineClientInterface | None = None
        try:
            run.status.write("loading", run.meter, force=True)
            client = started = await run.stop.run(self.setup.start())
            self._device = self.setup.device()
            run.meter.counters = started.read_cache_counters
            answerer = LineAnswerer(started, self.setup.prepare, self.setup.config, run.meter, run.answers)
            runner = LineRunner(run.index, writer, answerer, self.setup.config, run.meter, run.scores)
            runner.backoff = self.backoff
            with run.watched(self.view) as watcher:
                await run.stop.run(runner.run(run.end, watcher))
        finally:
            run.meter.freeze()
            try:
                run.answers.close()
                await asyncio.to_thread(writer.close)
            finally:
                if client is not None:
                    await run.stop.patient(client.close())

    def _facts(self) -> Facts:
        setup = self.setup
        names = {"model": "fingerprint", "tokenizer": "tokenizer_sha256", "template": "template_sha256"}
        model = {new: setup.model_info.digests[old] for old, new in names.items()}
        model = {"path": setup.config.model.path, **model}
        return Facts(to_plain(setup.config), setup.config_hash, model, base_seed(setup.config))

    def _tell(self, found: Resumed, settings: str, index: Index, partial: int) -> None:
        """What earlier runs left, in a line each."""
        for problem in found.problems:
            self.say(f"{problem}: this entry of the journal is skipped; its record is checked by itself")
        if found.old_settings not in (None, settings):
            self.say("the model, or a setting that changes answers, is not that of the earlier run")
        for reason, number in sorted(found.cut.items()):
            self.say(_CUT[reason].format(count(number, "line"), dropped=self.paths.dropped))
        if found.done or found.failed:
            again = " (--retry-failed runs these again)" if found.failed and self._commanded else ""
            self.say(
                f"going on: {found.done} of {count(len(index), 'line')} done, {found.failed} failed{again}"
            )
        if partial:
            self.say(f"{count(partial, 'partial answer')} of the last run: continued, not begun anew")

    async def _end_badly(
        self, error: MlxrunError, index: Index, meter: ProgressMeter, manifest: Manifest, status: Status
    ) -> None:
        """Leave everything as the next run needs it, and say how to go on."""
        try:
            await asyncio.to_thread(manifest.end, index, meter, error.exit_code, self._device, complete=False)
        except JobError as second:
            log.warning("%s", second)
        status.write("interrupted" if isinstance(error, Interrupted) else "failed", meter, force=True)
        state = f"{meter.done} of {count(meter.total, 'line')} done, {meter.failed} failed"
        again = not isinstance(error, ConfigError) and self._commanded
        self.say(f"{state}; the same command goes on from here" if again else state)

    @property
    def _commanded(self) -> bool:
        """Whether there is a command, and somebody to hear how to use it: a server has neither."""
        return self.stop is None or self.stop.process


@dataclass(frozen=True, slots=True)
class Run:
    """What the lines of one run share."""

    index: Index
    end: int
    meter: ProgressMeter
    scores: Scores
    status: Status
    stop: StopSignals
    answers: PartialAnswers

    @contextmanager
    def watched(self, make: Callable[[ProgressMeter], View]) -> Iterator[Watcher]:
        """Progress and status while lines run."""
        view = make(self.meter)
        try:
            yield _Both(view, self.status, self.meter)
        finally:
            view.close()


@dataclass(frozen=True, slots=True)
class _Both:
    view: View
    status: Status
    meter: ProgressMeter

    def update(self) -> None:
        self.view.update()
        self.status.write("running", self.meter)


_CUT = {
    "changed": "{} changed, or the model did: run again, old answers kept in {dropped}",
    "gone": "{} no longer in the job: answers moved to {dropped}",
    "edited": "{} edited in the output since: run again, what was there is in {dropped}",
    "broken": "{} of the output not ours: moved to {dropped}",
    "twice": "{} twice in the output: one record of each kept",
    "torn": "{} torn when the last run was killed: run again",
    "retried": "{} that failed: tried again",
}


def _meter(index: Index, end: int, found: Resumed, clock: Callable[[], float]) -> ProgressMeter:
    done, failed = index.state.count(DONE, 0, end), index.state.count(FAILED, 0, end)
    return ProgressMeter(clock, end, done, failed, all_prompt=found.prompt, all_output=found.output)
