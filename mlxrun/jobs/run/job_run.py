"""One run of a job, from start to exit code.

Before the engine starts, the run locks the folder, reads and checks the job file, and reconciles earlier
runs. Then it runs the lines, sorts the outputs and writes the manifest. The engine starts only if a line is
left to run. However the run ends, finished lines stay finished. Once no line is left, partial answers and the
job's cache are deleted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mlxrun.api.text.model_info import ModelInfo
from mlxrun.config.setting_fields import to_plain
from mlxrun.config.settings import Config
from mlxrun.core.errors import ConfigError, JobError, MlxrunError, ModelLoadError
from mlxrun.jobs.agents.agent_answerer import AgentAnswerer
from mlxrun.jobs.agents.turn_journal import TurnJournal
from mlxrun.jobs.lines.job_check import check_chats, check_evals, check_lines
from mlxrun.jobs.lines.job_file import NO_SCORERS, JobLine
from mlxrun.jobs.lines.line_index import DONE, FAILED, TODO, LineIndex
from mlxrun.jobs.lines.line_keys import LineKeys, collect_settings, digest_settings
from mlxrun.jobs.records.manifest import Manifest
from mlxrun.jobs.records.manifest_checks import check_errors_file, check_owner, check_settings
from mlxrun.jobs.records.output_writer import OutputWriter, sort_outputs
from mlxrun.jobs.records.reconciliation import JobState, Reconciler
from mlxrun.jobs.records.run_paths import JobPaths, lock_folder
from mlxrun.jobs.run import job_cache
from mlxrun.jobs.run.line_answerer import Answerer, LineAnswerer, LinePreparer, WorkerPool, get_base_seed
from mlxrun.jobs.run.line_runner import BACKOFF, LineRunner
from mlxrun.jobs.run.partial_answers import PartialAnswers
from mlxrun.jobs.run.progress import ProgressMeter, ProgressView, make_view, pluralize
from mlxrun.jobs.run.status_file import StatusFile
from mlxrun.jobs.run.stop_signals import Interrupted, StopSignals
from mlxrun.jobs.scoring.eval_spec import EvalReader
from mlxrun.jobs.scoring.score_groups import Scores
from mlxrun.jobs.scoring.scorer_process import end_scorers_by

if TYPE_CHECKING:
    from mlxrun.engine.client import EngineClient

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobSetup:
    """What a job runs on. `start`: starts the engine if a line is left to run; `device`: describes the
    machine; `evals`: reads the `eval` of lines; `pool`: answers the lines in place of the engine of `start`;
    `find_group`: as in LineIndex; `user`: the setup of the model that plays the user, if it is another one.
    With `shared_engine`, requests yield to those of other clients, and the engine stays open. With
    `keep_engine`, it stays open for later jobs."""

    config: Config
    config_hash: str
    model_info: ModelInfo
    preparer: LinePreparer
    start: Callable[[], Coroutine[Any, Any, EngineClient]]
    device: Callable[[], Mapping[str, Any]]
    shared_engine: bool = False
    keep_engine: bool = False
    evals: EvalReader = NO_SCORERS
    pool: WorkerPool | None = None
    find_group: Callable[[JobLine], int] = lambda line: 0
    user: JobSetup | None = None

    def collect_settings(self) -> dict[str, Any]:
        """Collect all settings that change an answer."""
        found = collect_settings(self.config, self.model_info)
        return found if self.user is None else {**found, "user": self.user.collect_settings()}

    def describe_model(self) -> dict[str, Any]:
        """Describe the model as the manifest does: its place, its name and the digests of its files."""
        names = {"fingerprint": "model", "tokenizer_sha256": "tokenizer", "template_sha256": "template"}
        digests = {name: self.model_info.digests[key] for name, key in names.items()}
        return {"path": self.config.model.path, "name": self.model_info.name, **digests}


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The flags of `mlxrun batch`. `limit`: 0 only completes the files of earlier runs; `mixed`: add lines to
    those that other versions or another device have computed."""

    fresh: bool = False
    retry_failed: bool = False
    strict: bool = False
    limit: int | None = None
    mixed: bool = False


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The result of a run that was not interrupted. `done`, `failed` and `scores` cover the whole job; the
    meter counts the lines up to `limit`."""

    exit_code: int
    done: int
    failed: int
    meter: ProgressMeter
    scores: Scores

    @property
    def is_complete(self) -> bool:
        """Whether every line of the job was answered or failed."""
        return self.done + self.failed == self.meter.lines

    @property
    def has_more(self) -> bool:
        """Whether earlier runs have answered lines beyond `limit`."""
        return self.done + self.failed > self.meter.done + self.meter.failed

    def format_done(self) -> str:
        """Format how many lines are done: `3 of 8 lines`, or of the first ones if no others are done."""
        if self.has_more:
            return f"{self.done} of {pluralize(self.meter.lines, 'line')}"
        return self.meter.format_done()


@dataclass(slots=True)
class JobRun:
    """One run of a job. `say`: gets sentences for the user; `stop`: ends the run; `view`: shows the progress;
    `backoff`: seconds before a second try."""

    paths: JobPaths
    setup: JobSetup
    options: JobOptions
    say: Callable[[str], None]
    stop: StopSignals
    view: Callable[[ProgressMeter], ProgressView] = make_view
    clock: Callable[[], float] = time.monotonic
    backoff: float = BACKOFF
    _meter: ProgressMeter = field(init=False)
    _status: StatusFile = field(init=False)
    _answers: PartialAnswers = field(init=False)
    _turns: TurnJournal = field(init=False)

    async def run(self) -> JobOutcome:
        """Run the job. JobError, EngineDead, ModelLoadError or Interrupted if it cannot be finished."""
        media, preparer = self.setup.config.media, self.setup.preparer
        settings = await asyncio.to_thread(self.setup.collect_settings)
        digest, batch_id = digest_settings(settings), preparer.stamp.batch_id if preparer.stamp else ""
        limits = {"max_video": media.video_max_bytes, "max_audio": media.audio_max_bytes}
        keys = LineKeys(digest, preparer.folder, media.max_bytes, batch_id=batch_id, **limits)
        setup = self.setup
        index = LineIndex(self.paths.job, keys, evals=setup.evals, find_group=setup.find_group)
        try:
            with self.stop.handle_signals(), lock_folder(self.paths.folder):
                await asyncio.to_thread(index.scan, lambda: self.stop.requested)
                self.stop.check()
                return await self._run(index, settings)
        except BaseException:  # a stuck engine may cause any, such as that no thread can be started
            self.stop.exit_if_stuck()
            raise
        finally:
            index.close()

    async def _run(self, index: LineIndex, settings: Mapping[str, Any]) -> JobOutcome:
        config, limit = self.setup.config, self.options.limit
        end = len(index) if limit is None else min(limit, len(index))
        await self._check(index, end)
        if self.options.fresh:
            await asyncio.to_thread(self._start_anew)
        retry = end if self.options.retry_failed else 0
        reconciler = Reconciler(index, self.paths, retry=retry, check_stop=self.stop.check)
        await asyncio.to_thread(reconciler.read_journal)
        if self.stop.owns_process:  # a server has nobody to ask; there, old answers are moved away
            check_settings(self.paths, settings, reconciler.state.old_settings, config.model.path)
        facts, device = self._collect_facts(settings), await asyncio.to_thread(self.setup.device)
        manifest = Manifest(self.paths, facts, get_base_seed(config), device)
        lines, left = await asyncio.to_thread(reconciler.count_claims, end)
        manifest.count_lines(lines)
        self._check_environment(manifest, left)
        await asyncio.to_thread(manifest.begin, index, reconciler.state.runs, end)
        digest = digest_settings(settings)
        with end_scorers_by(self.stop.end_by):
            state = await asyncio.to_thread(reconciler.rewrite, digest)
        manifest.scores = state.scores
        manifest.count_lines(state.lines)
        self._answers = PartialAnswers(self.paths.answers, keep=not config.engine.reproducible)
        self._turns = TurnJournal(self.paths.turns)
        if manifest.has_moved:
            self._answers.delete_file()
            self._turns.delete_file()
        await asyncio.to_thread(self._answers.read, index)
        await asyncio.to_thread(self._turns.read, index)
        self._meter = meter = ProgressMeter(
            self.clock, end, len(index), total_prompt=state.prompt, total_output=state.output
        )
        self._count_written(index)
        self._report_earlier_runs(state, digest)
        with StatusFile(self.paths.status, meter, manifest.run) as self._status:
            return await self._complete(index, end, manifest)

    async def _complete(self, index: LineIndex, end: int, manifest: Manifest) -> JobOutcome:
        """Run the lines that are left, and complete the files whatever comes."""
        meter = self._meter
        try:
            if left := index.state.count(TODO, 0, end):
                self._check_environment(manifest, left)  # edited records add to the lines that are left
                await self._run_lines(
                    index, end, OutputWriter(self.paths, index, manifest.run, self.clock), manifest.scores
                )
            exit_code = 1 if meter.failed or manifest.scores.broken else 0
            if self.setup.config.batch.order == "input":
                await asyncio.to_thread(sort_outputs, self.paths, index)
            await asyncio.to_thread(manifest.end, index, meter, exit_code, complete=True)
            if not index.state.count(TODO):
                self._answers.delete_file()
                self._turns.delete_file()
                await asyncio.to_thread(job_cache.delete_cache, self.paths.cache)
        except MlxrunError as error:
            await self._record_failure(error, index, manifest)
            raise
        done, failed = index.state.count(DONE), index.state.count(FAILED)
        return JobOutcome(exit_code, done, failed, meter, manifest.scores)

    def _start_anew(self) -> None:
        """Set aside what earlier runs wrote (`--fresh`)."""
        folder = self.paths.set_outputs_aside()
        job_cache.delete_cache(self.paths.cache)
        if folder is not None:
            self.say(f"starting over; the earlier answers were moved to {folder}")

    async def _check(self, index: LineIndex, end: int) -> None:
        """JobError if the run would overwrite another job's files, or if the settings refuse its lines."""
        await asyncio.to_thread(check_errors_file, self.paths)
        if not self.options.fresh:
            await asyncio.to_thread(check_owner, self.paths, index.sha256)
        strict = self.options.strict or self.setup.config.batch.on_invalid == "fail"
        if self.stop.owns_process:
            await asyncio.to_thread(check_chats, index, self.setup.model_info, end)
            if not strict:  # which names all lines that are refused
                await asyncio.to_thread(check_evals, index, end)
        if strict:

            def report(number: int, reason: str) -> None:
                self.say(f"{index.path}:{number}: {reason}")

            checked = await self.stop.run(check_lines(index, self.setup.preparer, end, report))
            if checked.refused:
                lines = pluralize(checked.lines, "line")
                raise JobError(f"{index.path}: {checked.refused} of {lines} refused; nothing was run")

    def _check_environment(self, manifest: Manifest, left: int) -> None:
        """JobError if the answers of two environments would mix and nobody has said that they may. A server
        has nobody to ask: there the manifest says it."""
        if not self.options.mixed and self.stop.owns_process:
            manifest.check_environment(left)

    async def _run_lines(self, index: LineIndex, end: int, writer: OutputWriter, scores: Scores) -> None:
        """Start the engine and run the lines that are left."""
        setup, meter = self.setup, self._meter
        engines: list[EngineClient | WorkerPool] = [] if setup.pool is None else [setup.pool]

        async def start() -> Answerer:  # an engine is known at once, also if a signal comes with it
            if setup.pool is not None:
                meter.workers = setup.pool.list_workers
                meter.counters = setup.pool.read_cache_counters
                return await setup.pool.start(meter, self._answers)
            engines.append(client := await setup.start())
            meter.counters = client.read_cache_counters
            if setup.config.speculation.method != "off":
                meter.drafts = lambda: client.read_stats().counts["speculation"]
            config, background = setup.config, setup.shared_engine
            return LineAnswerer(client, setup.preparer, config, meter, self._answers, background)

        async def start_user(user: JobSetup) -> Answerer:
            engines.append(client := await user.start())
            return LineAnswerer(client, user.preparer, user.config, meter, self._answers)

        try:
            self._status.set_state("loading")
            answerer = await self.stop.run(start())
            if setup.preparer.folder is not None:  # a server runs no code of clients
                user = None if setup.user is None else await self.stop.run(start_user(setup.user))
                answerer = AgentAnswerer(answerer, self._turns, setup.preparer.folder, user)
            runner = LineRunner(index, writer, answerer, setup.config, meter, scores, self.backoff)
            self._status.set_state("running")
            view = self.view(meter)
            try:
                await self.stop.run(runner.run(end, view.update))
            finally:
                view.close()
        finally:
            meter.freeze_counters()
            try:
                self._answers.close()
                self._turns.close()
                await asyncio.to_thread(writer.close)
            finally:
                for engine in [] if setup.shared_engine or setup.keep_engine else engines:
                    await self.stop.run_cleanup(engine.close())

    def _collect_facts(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What the manifest records of the config and the model, and the settings that change answers."""
        config, user = self.setup.config, self.setup.user
        stamp, scoring = self.setup.preparer.stamp, self.setup.evals.describe()
        return {
            **({} if stamp is None else {"batch": asdict(stamp)}),
            "config": to_plain(config),
            "config_hash": self.setup.config_hash,
            "model": self.setup.describe_model(),
            **({} if user is None else {"user_model": user.describe_model()}),
            "settings": settings,
            **({"scoring": scoring} if scoring else {}),
        }

    def _report_earlier_runs(self, state: JobState, settings: str) -> None:
        """Say what earlier runs left, a sentence for each fact; `settings`: the digest of this run's."""
        meter = self._meter
        for problem in state.problems:
            self.say(f"{problem}; this entry is skipped, and its line's record is checked without it")
        if state.old_settings not in (None, settings):
            self.say("the model or a setting that affects answers has changed since the earlier run")
        for reason, number in sorted(state.discarded.items()):
            self.say(_DISCARDED[reason].format(pluralize(number, "line")))
        if state.dropped:
            self.say(f"moved to {self.paths.dropped}: {pluralize(state.dropped, 'record')}")
        if state.unverified:
            self.say(_UNVERIFIED.format(pluralize(state.unverified, "record"), journal=self.paths.journal))
        if meter.total and (state.done or state.failed):
            can_retry = meter.failed and self.stop.owns_process
            again = " (--retry-failed runs these again)" if can_retry else ""
            self.say(f"continuing: {meter.format_done()} done, {meter.failed} failed{again}")
        if self._answers:
            count = pluralize(len(self._answers), "partial answer")
            self.say(f"{count} of the last run will be continued")
        if self._turns:
            count = pluralize(len(self._turns), "conversation")
            self.say(f"{count} of the last run will be continued")

    def _count_written(self, index: LineIndex) -> None:
        """Count the lines that have a record. Those that could not be written are computed again."""
        meter = self._meter
        meter.done, meter.failed = (index.state.count(state, 0, meter.total) for state in (DONE, FAILED))

    async def _record_failure(self, error: MlxrunError, index: LineIndex, manifest: Manifest) -> None:
        """Complete the files for the next run, and say how to continue."""
        meter = self._meter
        self._count_written(index)
        try:
            await asyncio.to_thread(manifest.end, index, meter, error.exit_code, complete=False)
        except JobError as second:
            log.warning("%s", second)
        self._status.set_state("interrupted" if isinstance(error, Interrupted) else "failed")
        if isinstance(error, ConfigError | ModelLoadError) and not (meter.done or meter.failed):
            return  # there is nothing to continue from, and the error says why
        done = f"{meter.format_done()} done, {meter.failed} failed"
        resumable = not isinstance(error, ConfigError | ModelLoadError) and self.stop.owns_process
        self.say(f"{done}; the same command continues from here" if resumable else done)


_UNVERIFIED = (
    "warning: {} cannot be verified, as {journal} has no digest of them: edited answers would not be "
    "noticed; only their shape was checked, and that their ids fit the lines, the model and the settings"
)
_DISCARDED = {
    "changed": "{} will run again because the job or the model changed",
    "gone": "the job no longer contains {}",
    "edited": "{} will run again because the output was edited or damaged",
    "broken": "the output had {} that this job did not write or that were damaged",
    "twice": "the output had more than one record of {}; one record of each is kept",
    "torn": "the output had {} that the last run did not finish writing, now removed",
    "lost": "{} will run again because finished records are missing in the output",
    "retried": "{} that failed will be tried again",
}
