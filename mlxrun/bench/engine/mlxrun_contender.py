"""mlxrun's Engine as a contender: the same class that serves jobs, stepped directly, without its thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mlxrun.bench.engine.measurement import Output
from mlxrun.bench.engine.workloads import Job
from mlxrun.config.settings import Config
from mlxrun.errors import MlxrunError
from mlxrun.scheduler.request import Request, SamplingParams, TokenEvent


class Steps(Protocol):
    """The part of engine.engine.Engine that is used here."""

    @property
    def busy(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def step(self) -> list[TokenEvent]: ...


class MlxrunContender:
    """Greedy requests without stop ids."""

    name = "mlxrun"

    def __init__(self, engine: Steps) -> None:
        self._engine = engine

    @classmethod
    def open(cls, config: Config) -> MlxrunContender:
        """Load the model that the config names."""
        from mlxrun.engine.factory import build_engine

        return cls(build_engine(config))

    def add(self, jobs: Sequence[Job]) -> None:
        """One request a job."""
        for job in jobs:
            self._engine.add(Request(job.id, job.prompt, SamplingParams(max_tokens=job.output)))

    def step(self) -> list[Output]:
        """One engine step; progress of prefill is left out, a failed request ends the benchmark."""
        if not self._engine.busy:
            raise MlxrunError("bench: the engine is idle but has not answered every request")
        outputs = []
        for event in self._engine.step():
            if event.error is not None:
                raise event.error
            if event.tokens or event.finish is not None:
                outputs.append(Output(event.request_id, event.tokens, event.finish is not None))
        return outputs

    def close(self) -> None:
        """Drop the engine. Its own close() would end this thread's MLX streams, which the next side needs."""
        del self._engine
