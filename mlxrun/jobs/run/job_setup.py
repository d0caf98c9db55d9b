"""What a job runs on: its config, its model, and the engine of this process or those of workers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mlxrun.api.text.model_info import ModelInfo
from mlxrun.config.settings import Config
from mlxrun.jobs.lines.job_file import NO_SCORERS
from mlxrun.jobs.run.line_answerer import Answerer, LinePreparer
from mlxrun.jobs.run.partial_answers import PartialAnswers
from mlxrun.jobs.run.progress import ProgressMeter
from mlxrun.jobs.scoring.eval_spec import EvalReader

if TYPE_CHECKING:
    from mlxrun.engine.client import EngineClient


class WorkerPool(Protocol):
    """Engines in other processes, which answer the lines in place of one in this process."""

    async def start(self, meter: ProgressMeter, answers: PartialAnswers) -> Answerer:
        """Start the engines, and return what hands lines to them."""

    def list_workers(self) -> list[dict[str, Any]]:
        """The workers as status and manifest contain them, each with its `state`."""

    def read_cache_counters(self) -> Mapping[str, int]:
        """The sums of the engines' counters."""

    async def close(self) -> None:
        """Stop the engines."""


@dataclass(frozen=True, slots=True)
class JobSetup:
    """What a job runs on. `start` is called if a line is left to run; `device` describes the machine.
    `shared_engine`: requests yield to those of other clients, and the engine is not closed; `keep_engine`: it
    is not closed, as others run on it afterwards; `evals`: how the `eval` of lines is read; `pool`: answers
    the lines in place of the engine of `start`."""

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
