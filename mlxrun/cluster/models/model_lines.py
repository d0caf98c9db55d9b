"""Batches at the front of several models: each line is answered by the process of the model that it names.

The files of a batch, its journal and its outputs are the front's. The lines of one model run together, one
model after the other. The front sends each line by HTTP, and gets a LineResult. `LineDesk` answers it there
as a server of this model alone does. Nothing of a line that is cut off is kept.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from aiohttp import web

from mlxrun.api.stored_files import ReadFile, inline_files
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.cluster.line_worker import answer_line
from mlxrun.cluster.messages import LineResult, SentLine
from mlxrun.cluster.models.messages import BatchLine
from mlxrun.cluster.models.model_pool import ModelPool
from mlxrun.cluster.models.model_slot import ModelSlot
from mlxrun.cluster.models.models_state import join_models
from mlxrun.cluster.pool import take_result
from mlxrun.config.settings import Config
from mlxrun.core.errors import NotFound, RequestError
from mlxrun.jobs.lines.job_check import Report, check_line_body
from mlxrun.jobs.lines.job_file import MAX_LINE, JobLine
from mlxrun.jobs.lines.line_index import LineIndex
from mlxrun.jobs.records.output_records import BatchStamp, LineTokens
from mlxrun.jobs.run.job_run import JobSetup
from mlxrun.jobs.run.job_service import JobService, ServerLinePreparer
from mlxrun.jobs.run.line_answerer import LineAnswerer, LinePreparer
from mlxrun.jobs.run.partial_answers import PartialAnswers, PartialAnswerTable
from mlxrun.jobs.run.progress import ProgressMeter
from mlxrun.server.engine_state import LoadedEngine
from mlxrun.server.http.json_bodies import read_bytes
from mlxrun.server.http.surface import Endpoint, Surface

SendLine = Callable[[ModelSlot, BatchLine], Awaitable[LineResult]]


@dataclass(slots=True)
class LineSender:
    """Answers the lines of one batch, in place of an engine, and of what prepares lines for one. `send`:
    sends a line to a loaded model. No partial answers are kept."""

    pool: ModelPool
    send: SendLine
    concurrency: int = 1
    answers: PartialAnswers = None  # type: ignore[assignment]
    meter: ProgressMeter = None  # type: ignore[assignment]
    stamp: BatchStamp | None = None
    read_file: ReadFile | None = None
    folder: None = None

    def find_model(self, line: JobLine) -> ModelSlot:
        """Find the model of a line. NotFound if there is no such model."""
        name = line.body.get("model")
        if isinstance(name, str) and name:
            return self.pool.find(name)
        return self.pool.find_first(line.url)

    def find_group(self, line: JobLine) -> int:
        """Find the number of a line's model; 0 for an unknown one."""
        try:
            return self.find_model(line).number
        except NotFound:
            return 0

    async def start(self, meter: ProgressMeter, answers: PartialAnswers) -> LineSender:
        self.meter, self.answers = meter, answers
        return self

    async def answer(self, line: JobLine, key: str, tokens: LineTokens) -> dict[str, Any]:
        """Return the response body of `line`. `tokens` counts its tokens, also if it fails."""
        slot = self.find_model(line)
        if self.read_file is not None:
            line = replace(line, body=await inline_files(line.body, self.read_file, MAX_LINE))
        await self.pool.wait_loaded(slot, is_line=True)
        with self.pool.hold_line(slot):
            result = await self.send(slot, BatchLine(SentLine(0, replace(line, eval=None), key), self.stamp))
        counts = result.counts
        tokens.add(counts.computed, counts.reused, counts.output)
        self.meter.add_tokens(counts.computed, counts.reused, counts.output)
        return take_result(result, tokens, self.meter.clock())

    def list_workers(self) -> list[dict[str, Any]]:
        return []

    def read_cache_counters(self) -> Mapping[str, int]:
        return {}

    async def close(self) -> None:
        """Nothing: models are unloaded when they are idle."""


class ModelsJobService(JobService):
    """Runs the batches of a server of several models. `send`: as in LineSender; `digest`: returns what
    changes when the models would give other answers."""

    def __init__(
        self,
        config: Config,
        config_hash: str,
        pool: ModelPool,
        send: SendLine,
        digest: Callable[[], Awaitable[str]],
    ) -> None:
        async def refuse() -> Any:
            raise AssertionError("the lines are answered elsewhere")

        self._sender, self._model, self._digest = LineSender(pool, send), join_models(pool.slots), digest
        info, preparer = cast(ModelInfo, self._model), cast(LinePreparer, self._sender)
        group = self._sender.find_group
        super().__init__(JobSetup(config, config_hash, info, preparer, refuse, dict, True, find_group=group))
        self._sender.concurrency = self._setup.config.batch.concurrency or 1

    async def make_setup(self, stamp: BatchStamp | None, read_file: ReadFile | None) -> JobSetup:
        if not self._model.digests:
            digests = {"model": await self._digest(), "tokenizer": "", "template": ""}
            self._model = replace(self._model, digests=digests)
        sender, info = replace(self._sender, stamp=stamp, read_file=read_file), cast(ModelInfo, self._model)
        return replace(self._setup, model_info=info, preparer=cast(LinePreparer, sender), pool=sender)

    async def check_requests(self, index: LineIndex, read_file: ReadFile | None, report: Report) -> None:
        """Report lines for unknown models, and wrong names and types of fields. No model is loaded for it."""
        for position in range(len(index)):
            line = index.load(position).line
            assert isinstance(line, JobLine)
            try:
                self._sender.find_model(line)
                check_line_body(line)
            except RequestError as error:
                report(line.number, str(error))


LINE_PATH = "/line"
_MOST = 2 * MAX_LINE  # bytes of a pickled line


class LineDesk:
    """Answers the lines that arrive at one model."""

    def __init__(self, loaded: LoadedEngine, config: Config) -> None:
        self._client = loaded.client
        self._preparer = ServerLinePreparer(loaded.client.model_info, config, loaded.context.formats)
        self._config = config

    async def answer(self, request: web.Request) -> web.Response:
        """Answer the line in a request of the front. EngineDead if the engine has ended."""
        given: BatchLine = pickle.loads(await read_bytes(request, _MOST))
        table, meter = PartialAnswerTable(keep=False), ProgressMeter(time.monotonic)
        preparer = self._preparer.for_batch(given.stamp, None)
        answerer = LineAnswerer(self._client, preparer, self._config, meter, table, background=True)
        tokens = LineTokens()
        tokens.times.started = meter.clock()
        return web.Response(body=pickle.dumps(await answer_line(answerer, given.sent, tokens)))

    @property
    def surface(self) -> Surface:
        """The path to which the front sends lines."""
        endpoint = Endpoint("POST", LINE_PATH, self.answer, "Answer a line", public=True, max_body=_MOST)
        return Surface("lines", (endpoint,), is_api=False)
