"""Answers lines of batches in the process of a model, as a server of this model alone does.

The front sends each line by HTTP, and gets a LineResult. Nothing of a line that is cut off is kept.
"""

from __future__ import annotations

import pickle
import time

from aiohttp import web

from mlxrun.cluster.line_worker import answer_line
from mlxrun.cluster.models.messages import BatchLine
from mlxrun.config.settings import Config
from mlxrun.jobs.lines.job_file import MAX_LINE
from mlxrun.jobs.records.output_records import LineTokens
from mlxrun.jobs.run.job_service import ServerLinePreparer
from mlxrun.jobs.run.line_answerer import LineAnswerer
from mlxrun.jobs.run.partial_answers import PartialAnswerTable
from mlxrun.jobs.run.progress import ProgressMeter
from mlxrun.server.engine_state import LoadedEngine
from mlxrun.server.http.json_bodies import read_bytes
from mlxrun.server.http.surface import Endpoint, Surface

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
