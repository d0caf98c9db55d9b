"""mlxrun's Engine as a contender, stepped directly and without its thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlxrun.cli.bench.engine.measurement import RequestOutput
from mlxrun.cli.bench.engine.workloads import BenchRequest
from mlxrun.config.settings import Config
from mlxrun.core.errors import MlxrunError
from mlxrun.core.request import Request, SamplingParams

if TYPE_CHECKING:
    from mlxrun.engine.engine import Engine


class MlxrunContender:
    """Runs greedy requests without stop ids on an Engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @classmethod
    def open(cls, config: Config) -> MlxrunContender:
        """Load the model that the config names, and do what a server does until its first request comes."""
        from mlxrun.engine.build import build_engine

        engine = build_engine(config)
        engine.prepare()
        return cls(engine)

    def add(self, requests: Sequence[BenchRequest]) -> None:
        """Add requests in this order."""
        for request in requests:
            self._engine.add(Request(request.id, request.prompt, SamplingParams(max_tokens=request.output)))

    def step(self) -> list[RequestOutput]:
        """Make one engine step. Prefill progress is skipped. MlxrunError if a request fails, or if the engine
        is idle."""
        if not self._engine.busy:
            raise MlxrunError("bench: the engine is idle but has unfinished requests")
        outputs = []
        for event in self._engine.step():
            if event.error is not None:
                raise event.error
            if event.tokens or event.finish is not None:
                outputs.append(RequestOutput(event.request_id, event.tokens, event.finish is not None))
        return outputs

    def abort(self, request_id: str) -> None:
        """Cancel a request; its row is freed in the next step."""
        self._engine.abort(request_id)

    def settle(self) -> None:
        """Step until the engine has no work: the next step frees the row of an ended request."""
        while self._engine.busy:
            self._engine.step()

    def close(self) -> None:
        """Release the engine. Its own close() would end this thread's MLX streams, which the next side
        needs."""
        self._engine.held.close()
        del self._engine
