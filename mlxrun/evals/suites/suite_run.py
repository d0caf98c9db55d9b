"""Runs the cells of a suite as ordinary jobs, one after the other, with one engine for all cells of a model.

Each cell is resumable like any job: its folder has its own journal and lock. A model that cannot be loaded
fails only its own cells; each start tries it once.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxrun.api.text.model_info import ModelInfo
from mlxrun.config.setting_fields import hash_config
from mlxrun.config.settings import Config
from mlxrun.core.errors import JobError, MlxrunError
from mlxrun.evals.judge_run import run_judge
from mlxrun.evals.run_folders.run_folder import DONE, LIMITED, RunFolder
from mlxrun.evals.suites.cell_changes import is_computed_as_now
from mlxrun.evals.suites.cell_jobs import CellJobs
from mlxrun.evals.suites.matrix import Cell
from mlxrun.evals.suites.suite_manifest import CHANGED, SuiteManifest, count_first_lines
from mlxrun.evals.suites.task_template import parse_task_judge
from mlxrun.jobs.agents.agent_settings import make_user_config
from mlxrun.jobs.lines.job_check import make_eval_reader
from mlxrun.jobs.records.run_paths import JobPaths, lock_folder, wrap_write_errors
from mlxrun.jobs.run.job_cache import delete_cache
from mlxrun.jobs.run.job_run import JobOptions, JobOutcome, JobRun, JobSetup
from mlxrun.jobs.run.line_answerer import LinePreparer
from mlxrun.jobs.run.progress import ProgressMeter, ProgressView, make_view, pluralize
from mlxrun.jobs.run.stop_signals import Interrupted, StopSignals
from mlxrun.jobs.scoring.score_groups import format_score

if TYPE_CHECKING:
    from mlxrun.engine.client import EngineClient

MakeView = Callable[[ProgressMeter, str], ProgressView]
StartEngine = Callable[[], Coroutine[Any, Any, "EngineClient"]]


@dataclass(frozen=True, slots=True)
class SuiteSetup:
    """What a suite runs on. `load`: reads a model without its weights, and blocks; `start`: loads the
    weights, and gets the model and a folder for its prefix cache; `device`: describes the machine as an
    engine with the config uses it; `share`: gives the first of two models its part of the memory."""

    load: Callable[[Config], ModelInfo]
    start: Callable[[Config, ModelInfo, Path], Coroutine[Any, Any, EngineClient]]
    device: Callable[[Config], Mapping[str, Any]]
    share: Callable[[Config, ModelInfo, ModelInfo], Config] = lambda config, own, other: config


@dataclass(slots=True)
class SharedEngine:
    """The engine of several jobs, and the one of the model that plays the user. The first job that needs it
    starts it, at most once."""

    clock: Callable[[], float] = time.monotonic
    _seconds: float = 0.0
    _client: EngineClient | None = None
    _error: MlxrunError | None = None
    _user: SharedEngine | None = None

    @property
    def seconds(self) -> float:
        """How long the starts took."""
        return self._seconds + (0 if self._user is None else self._user.seconds)

    def share(self, setup: JobSetup) -> JobSetup:
        """Return the setup of a job that uses this engine, and leaves it open."""
        user = setup.user
        if user is not None:
            self._user = self._user or SharedEngine(self.clock)
            user = self._user.share(user)
        return replace(setup, start=partial(self.start, setup.start), keep_engine=True, user=user)

    async def start(self, begin: StartEngine) -> EngineClient:
        """Return the engine, which `begin` starts if there is none. A failed start is not repeated: its error
        is raised again."""
        if self._error is not None:
            raise self._error
        if self._client is None:
            begun = self.clock()
            try:
                self._client = await begin()
                self._seconds = self.clock() - begun
            except MlxrunError as error:
                self._error = error
                raise
        return self._client

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        if self._user is not None:
            await self._user.close()


@dataclass(slots=True)
class SuiteRun:
    """One start of a suite. `cells`: the cells to run; `say`: gets sentences for the user."""

    folder: Path
    cells: Sequence[Cell]
    jobs: CellJobs
    manifest: SuiteManifest
    setup: SuiteSetup
    options: JobOptions
    say: Callable[[str], None]
    stop: StopSignals
    view: MakeView = lambda meter, title: make_view(meter, title=title)
    clock: Callable[[], float] = time.monotonic
    _exits: list[int] = field(default_factory=list)
    _paths: dict[str, JobPaths] = field(default_factory=dict)
    _digests: dict[str, str] = field(default_factory=dict)  # of job files, by the names of cells

    async def run(self) -> int:
        """Run the unfinished cells, and return the exit code. Interrupted if a signal came; JobError if the
        suite's own files cannot be written."""
        with wrap_write_errors(self.folder, begun=self.folder.exists()):
            self.folder.mkdir(parents=True, exist_ok=True)
        with self.stop.handle_signals(), lock_folder(self.folder):
            await asyncio.to_thread(self._write_jobs)
            self.manifest.begin()
            try:
                for key in dict.fromkeys(cell.engine_key for cell in self.cells):
                    await self._run_group([cell for cell in self.cells if cell.engine_key == key])
            except Interrupted as error:
                self.manifest.end(error.exit_code, "interrupted")
                raise
            finally:
                self.stop.exit_if_stuck()
            code = max(self._exits, default=0)
            self.manifest.end(code, "failed" if code > 1 else "done")
            return code

    def _find_job(self, cell: Cell) -> Path:
        return self.folder / cell.name / "job.jsonl"

    def _write_jobs(self) -> None:
        """Write the job file of each cell. One that changes makes its changed lines run again."""
        written: dict[str, tuple[Path, str]] = {}
        for cell in self.cells:
            self.stop.check()
            path = self._find_job(cell)
            if cell.lines_key in written:
                first, digest = written[cell.lines_key]
                self.jobs.copy(first, path)
            else:
                digest = self.jobs.write(cell, path)
                written[cell.lines_key] = path, digest
            self._digests[cell.name], self._paths[cell.name] = digest, JobPaths(path)
        self._mark_changed(written)

    def _mark_changed(self, written: dict[str, tuple[Path, str]]) -> None:
        """Mark the cells whose lines, settings or scorers are others now: their scores are earlier ones.
        This start may leave them out, or end before they run. One that is as the suite again is done again.
        `written`: digests of job files."""
        digests = {key: digest for key, (_, digest) in written.items()}
        for cell in self.manifest.cells:
            record = self.manifest.records[cell.name]
            if record["state"] == "failed" and cell.name not in self._digests:
                self._judge_again(cell, record)
            elif record["state"] == "running":  # by an earlier start, which was killed
                record["state"] = "interrupted"
            if record["state"] not in (DONE, CHANGED):
                continue
            self.stop.check()
            path = self._find_job(cell)
            if cell.lines_key not in digests:
                digests[cell.lines_key] = self.jobs.compute_digest(cell, path)
            is_same = digests[cell.lines_key] == record["job_sha256"] and is_computed_as_now(
                cell, path, self.jobs.file.folder, bool(record["done"])
            )
            record["state"] = DONE if is_same else CHANGED

    def _judge_again(self, cell: Cell, record: dict[str, Any]) -> None:
        """Give a failed cell that this start leaves out the state of its answers, if they have the settings
        that the suite has now: what refused them in an earlier start is gone. A cell without answers is to do
        if it failed with other settings. One whose run itself ended with an error stays failed."""
        path = self._find_job(cell)
        if not path.parent.is_dir() or not JobPaths(path).manifest.exists():
            if record["config_hash"] != cell.config_hash:
                record.update(state="todo", error=None)
            return
        try:
            run = RunFolder.open(JobPaths(path).out)
        except JobError:  # damaged; a start of the cell mends it
            return
        state, config = _find_state(run, record), self.jobs.add_media_folder(cell)
        if state is not None and run.manifest.get("config_hash") == hash_config(config):
            record.update(state=state, error=None, job_sha256=run.manifest["input"]["sha256"])

    async def _run_group(self, cells: Sequence[Cell]) -> None:
        first = cells[0]
        cache = self.folder / "cache" / first.engine_key[:16]
        user_config = make_user_config(first.config)
        configs = [first.config] if user_config is None else [first.config, user_config]
        try:
            infos = [await self.stop.run(asyncio.to_thread(self.setup.load, each)) for each in configs]
        except Interrupted:
            raise
        except MlxrunError as error:
            for cell in cells:
                self._record_failure(cell, error)
            return

        async def begin(at: int) -> EngineClient:
            config, info = configs[at], infos[at]
            if at == 0:
                self.manifest.count_load(list(dict.fromkeys(cell.model for cell in cells)))
            if len(infos) > 1:
                config = self.setup.share(config, info, infos[1 - at])
            return await self.setup.start(config, info, cache)

        engine, starts = SharedEngine(self.clock), [partial(begin, at) for at in range(len(infos))]
        try:
            for cell in cells:
                await self._run_cell(cell, engine, list(zip(infos, starts, strict=True)))
        finally:
            await self.stop.run_cleanup(engine.close())
            gc.collect()  # the weights must be gone before those of the next model are loaded
        if all(self.manifest.records[cell.name]["state"] == "done" for cell in cells):
            await asyncio.to_thread(delete_cache, cache)  # no engine writes to it any more

    async def _run_cell(
        self, cell: Cell, engine: SharedEngine, models: Sequence[tuple[ModelInfo, StartEngine]]
    ) -> None:
        """Run a cell. `models`: its own, then the one that plays the user if there is one."""
        begun = self.clock() - engine.seconds  # the loading of weights is not the cell's time
        self.manifest.update(cell, state="running", error=None, job_sha256=self._digests[cell.name])
        try:
            setup = engine.share(self._make_setup(cell, models))
            paths = self._paths[cell.name]

            def say(text: str) -> None:
                self.say(f"{cell.name}: {text}")

            def view(meter: ProgressMeter) -> ProgressView:
                return self.view(meter, cell.name)

            outcome = await JobRun(paths, setup, self.options, say, self.stop, view).run()
            judge = parse_task_judge(cell.task, self.jobs.file.folder, f"{cell.name}: judge")
            if judge is not None and outcome.done and outcome.is_complete:
                scores = await run_judge(paths, judge, setup, self.stop, say, view)
                outcome = replace(outcome, scores=scores)
        except Interrupted:
            seconds = self._add_seconds(cell, begun + engine.seconds)
            self.manifest.update(cell, state="interrupted", seconds=seconds)
            raise
        except MlxrunError as error:
            self._record_failure(cell, error)
        else:
            self._record_outcome(cell, outcome, self._add_seconds(cell, begun + engine.seconds))

    def _make_setup(self, cell: Cell, models: Sequence[tuple[ModelInfo, StartEngine]]) -> JobSetup:
        own, job = self.jobs.add_media_folder(cell), self._paths[cell.name].job
        configs, setups = [own, make_user_config(own)][: len(models)], list[JobSetup]()
        for config, (info, start) in zip(configs, models, strict=True):
            assert config is not None, "only a config with a user has a second model"
            preparer, device = LinePreparer(info, config, job.parent), partial(self.setup.device, config)
            setups.append(JobSetup(config, hash_config(config), info, preparer, start, device))
        return replace(setups[0], evals=make_eval_reader(job), user=next(iter(setups[1:]), None))

    def _add_seconds(self, cell: Cell, begun: float) -> float:
        earlier = self.manifest.records[cell.name]["seconds"] or 0.0
        return round(float(earlier) + self.clock() - begun, 3)

    def _record_outcome(self, cell: Cell, outcome: JobOutcome, seconds: float) -> None:
        meter, scores = outcome.meter, outcome.scores
        self._exits.append(outcome.exit_code)
        self.manifest.update(
            cell,
            config_hash=cell.config_hash,
            state=DONE if outcome.is_complete else LIMITED,
            lines=meter.lines,
            done=outcome.done,
            failed=outcome.failed,
            cut_by_length=scores.cut_by_length,
            scores=scores.describe() if scores.groups else None,
            tokens={"prompt": meter.total_prompt, "output": meter.total_output},
            seconds=seconds,
        )
        total = scores.compute_total()
        counts = {"failed": outcome.failed, "unscored": total.unscored}
        notes = "".join(f", {count} {word}" for word, count in counts.items() if count)
        shown = f", {format_score(total)}" if scores.groups else ""
        self.say(f"{cell.name}: {outcome.format_done()} done{notes}{shown}")

    def _record_failure(self, cell: Cell, error: MlxrunError) -> None:
        self._exits.append(error.exit_code)
        has_answers = self.manifest.records[cell.name]["lines"] is not None
        of_failure = {} if has_answers else {"config_hash": cell.config_hash}
        self.manifest.update(cell, state="failed", error=str(error), **of_failure)
        self.say(f"{cell.name}: failed: {error}")


def _find_state(run: RunFolder, record: Mapping[str, Any]) -> str | None:
    """The state of a cell whose settings were refused, by its run. None if it failed in the run, or behind
    it, as a judge may."""
    last = run.manifest["runs"][-1] if run.manifest["runs"] else {}
    if last.get("exit") in (JobError.exit_code, MlxrunError.exit_code):
        return None
    if run.shown_state not in (DONE, LIMITED):
        return "interrupted"
    scores = run.manifest.get("scores") or {}
    is_known = record["lines"] is not None and record["scores"] == (scores if scores.get("groups") else None)
    return run.shown_state if is_known else None


def count_states(records: Sequence[Mapping[str, Any]]) -> str:
    """Count the cells in each state, for people."""
    states = [
        f"with the first {pluralize(first, 'line')}" if (first := count_first_lines(each)) else each["state"]
        for each in records
    ]
    parts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    return f"{pluralize(len(states), 'cell')}: {', '.join(parts)}"
