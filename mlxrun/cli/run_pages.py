"""Which folder of runs a server shows."""

from __future__ import annotations

import os

from aiohttp import web

from mlxrun.config.settings import Config
from mlxrun.core.cache_home import expand_home
from mlxrun.evals.reports.run_pages import RunPages
from mlxrun.server.data_folder import claim_data_folder
from mlxrun.server.endpoints.runs import RUN_PAGES


def show_runs(app: web.Application, config: Config) -> web.Application:
    """Have the application of a server show the runs of server.runs_path, or its own batches; return it. With
    API keys, batches belong to their keys, and are not shown."""
    server, folder = config.server, None
    if server.runs_path is not None:
        folder = expand_home(server.runs_path)
    elif config.apis.ui and config.apis.batches and not server.api_keys:
        folder = claim_data_folder(server, os.environ) / "batches"
    if folder is not None:
        app[RUN_PAGES] = RunPages(folder)
    return app
