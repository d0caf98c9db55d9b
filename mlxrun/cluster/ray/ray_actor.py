"""The actor in which a worker runs, in a process that Ray has started. Only that process calls it.

Ray has set CUDA_VISIBLE_DEVICES before, so the engine sees only the devices of this worker.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlxrun.api.parsers.registry import detect_formats
from mlxrun.cluster.line_worker import LineWorker
from mlxrun.cluster.messages import PROTOCOL, SentLine, WorkerFacts, WorkerReport
from mlxrun.config.settings import Config
from mlxrun.core.errors import MlxrunError
from mlxrun.core.text_files import stamp_file
from mlxrun.core.visible_text import start_logging
from mlxrun.jobs.lines.line_keys import collect_settings, digest_settings
from mlxrun.jobs.records.manifest_checks import list_versions
from mlxrun.jobs.run.job_cache import choose_engine_config, lift_step_limit
from mlxrun.jobs.run.line_answerer import LinePreparer, count_lines_at_once

if TYPE_CHECKING:
    from mlxrun.model.load.model_info import LoadedModelInfo

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is made of. `job`: the job file as the driver sees it; `job_stamp`: its size in bytes and
    its time of change in ns. A worker that sees the same stamp has the same folder. `cache`: the folder of
    the job's prefix cache, used if the folder is the same; `linger`: see LineWorker."""

    config: Config
    job: Path
    job_stamp: list[int]
    cache: Path
    linger: float


def describe_worker(config: Config) -> tuple[WorkerFacts, LoadedModelInfo]:
    """Describe the worker that this process is with this config, and load its model without weights.
    ModelLoadError if that fails."""
    import mlxrun.model  # noqa: F401  the BLAS library goes before mlx
    from mlxrun.model.load.model_info import load_model_info
    from mlxrun.model.machine.device import describe_device

    info = load_model_info(config.model, weights=True)
    facts = WorkerFacts(
        host=socket.gethostname(),
        node=importlib.import_module("ray").get_runtime_context().get_node_id(),
        process=os.getpid(),
        protocol=PROTOCOL,
        versions=list_versions(),
        device=describe_device(config.engine),
        model=info.digests["model"],
        settings=digest_settings(collect_settings(config, info)),
        rows=config.scheduler.max_running,
        most=count_lines_at_once(config),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
    )
    return facts, info


class LineActor:
    """A worker, reached by Ray. Errors that say what is wrong with it are returned, not raised."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._shares_folder = stamp_file(spec.job) == spec.job_stamp
        self._worker: LineWorker | None = None
        self._model_info: LoadedModelInfo | None = None
        start_logging(spec.config.log.level)

    async def describe(self) -> WorkerFacts | MlxrunError:
        """Describe this worker, before its model's weights are loaded."""
        try:
            facts, self._model_info = await asyncio.to_thread(describe_worker, self._spec.config)
        except MlxrunError as error:
            return error
        return replace(facts, shares_folder=self._shares_folder)

    async def load(self) -> MlxrunError | None:
        """Load the weights and start the engine, after `describe`."""
        from mlxrun.engine.client import EngineClient

        config, info = self._spec.config, self._model_info
        assert info is not None
        # Else lines come with their images; a path that is left was not readable there, and is not here.
        folder = self._spec.job.parent if self._shares_folder else Path(tempfile.mkdtemp(prefix="mlxrun-"))
        try:
            formats = detect_formats(info.chat_template, info.tokenizer, config.parsers)
            preparer = LinePreparer(info, config, folder, formats=formats)
            engine_config = lift_step_limit(config)
            if self._shares_folder:
                engine_config = choose_engine_config(config, self._spec.cache)
            client = await EngineClient.start(engine_config, info)
        except MlxrunError as error:
            return error
        self._worker = LineWorker(client, preparer, config, self._spec.linger)
        return None

    async def submit(self, lines: Sequence[SentLine]) -> None:
        """Hand lines over. This and the other methods are those of `messages.Worker`."""
        assert self._worker is not None
        self._worker.submit(lines)

    async def poll(self) -> WorkerReport:
        assert self._worker is not None
        return await self._worker.poll()

    async def withdraw(self, count: int) -> list[int]:
        assert self._worker is not None
        return self._worker.withdraw(count)

    async def close(self) -> None:
        if self._worker is not None:
            await self._worker.close()
