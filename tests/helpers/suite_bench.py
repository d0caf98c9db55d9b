"""Runs suites on the echoing engine of batch_fakes, in this process or in one that may be killed."""

from __future__ import annotations

import asyncio
import io
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxrun.api.text.model_info import ModelInfo
from mlxrun.config.settings import Config
from mlxrun.core.errors import MlxrunError, ModelLoadError
from mlxrun.evals.suites.suite_manifest import SuiteManifest, read_suite_manifest
from mlxrun.evals.suites.suite_run import SuiteRun, SuiteSetup
from mlxrun.jobs.run.job_run import JobOptions
from mlxrun.jobs.run.progress import ProgressMeter, ProgressView, make_view
from mlxrun.jobs.run.stop_signals import StopSignals
from tests.helpers.batch_fakes import FakeClient
from tests.helpers.suite_files import read_cells
from tests.helpers.tokenizers import FakeModelInfo


@dataclass
class SuiteBench:
    """Starts one suite again and again. `broken`: last parts of model.path whose weights cannot be loaded;
    `loads` counts the loads of the last start by the same; `clients`: the engines that it had."""

    path: Path
    pause: float = 0.0
    broken: set[str] = field(default_factory=set)
    unreadable: set[str] = field(default_factory=set)
    loads: Counter[str] = field(default_factory=Counter)
    clients: list[FakeClient] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    log: Path | None = None  # a file with a line for each load
    load_takes: float = 0.0  # seconds, by the clock of the run
    _late: float = 0.0

    @property
    def folder(self) -> Path:
        return self.path.with_suffix(".out")

    def read(self) -> dict[str, Any]:
        """suite.json."""
        found = read_suite_manifest(self.folder / "suite.json")
        assert found is not None
        return found

    def get_states(self) -> dict[str, str]:
        return {each["name"]: each["state"] for each in self.read()["cells"]}

    async def run(self, only: str = "", **options: Any) -> int:
        """One start; `only`: the beginning of the names of the cells that run."""
        file, cells, jobs = read_cells(self.path)
        for counted in (self.loads, self.clients, self.said, self.titles):
            counted.clear()
        manifest = SuiteManifest(self.folder, file, cells)
        setup = SuiteSetup(self._load, self._start, lambda config: {"name": "fake"})
        chosen = [cell for cell in cells if cell.name.startswith(only)]
        stop, flags = StopSignals(self.said.append), JobOptions(**options)
        run = SuiteRun(self.folder, chosen, jobs, manifest, setup, flags, self.said.append, stop, self._view)
        run.clock = lambda: time.monotonic() + self._late
        return await run.run()

    def _view(self, meter: ProgressMeter, title: str) -> ProgressView:
        self.titles.append(title)
        return make_view(meter, io.StringIO(), title)

    def _load(self, config: Config) -> ModelInfo:
        if _get_name(config) in self.unreadable:
            raise ModelLoadError("there is no tokenizer.json")
        return FakeModelInfo(digests={**FakeModelInfo().digests, "model": _get_name(config)})

    async def _start(self, config: Config, info: Any, cache: Path) -> Any:
        name = _get_name(config)
        self.loads[name] += 1
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{os.getpid()} {name}\n")
        self._late += self.load_takes
        if name in self.broken:
            raise ModelLoadError(f"{name}: the weights are damaged")
        self.clients.append(FakeClient(info, self.pause))
        return self.clients[-1]


def _get_name(config: Config) -> str:
    return config.model.path.rpartition("/")[2]


def run_suite_in_process(path: Path, pause: float, log: Path) -> None:
    """For a process of its own, which may be killed: ends with the suite's exit code."""
    bench = SuiteBench(path, pause, log=log)
    try:
        code = asyncio.run(bench.run())
    except MlxrunError as error:
        raise SystemExit(error.exit_code) from error
    raise SystemExit(code)
