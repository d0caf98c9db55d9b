"""`mlxrun view`: serves all runs of a folder as pages for a browser on this machine, live while they run."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxrun.cli.options import add_config_options, load_command_config
from mlxrun.core.terminal import print_line

if TYPE_CHECKING:
    from aiohttp import web

EPILOG = """\b
Examples:
  mlxrun view                            the runs in this folder, on http://127.0.0.1:8010/ui/runs
  mlxrun view jobs --open                those of another folder, and opens the browser
  mlxrun view suite.out --port 0         one suite, on any free port
  ssh -L 8010:127.0.0.1:8010 HOST mlxrun view jobs     from another machine

\b
The index has every job and suite in FOLDER and below it: name, model, state, progress, score and time. A name
opens the report of `mlxrun report`, which goes on with the run. Choose some and press Compare to have their
answers side by side. Keys: j, k, Enter, x, /; in a report also o and d.
Nothing is written. It listens on this machine alone, and refuses requests for other host names. For others
set server.host and server.api_keys (-c FILE); the browser asks for a key. Prompts and answers are shown.
A running `mlxrun serve` shows the same under /ui/runs (server.runs_path).

\b
Exit codes: 0 stopped; 2 no such folder, config, or the port is taken.
"""


@click.command(epilog=EPILOG)
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False), default=".")
@click.option(
    "--port", type=int, default=8010, show_default=True, metavar="PORT", help="Port; 0: any free port."
)
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
@add_config_options
def command(folder: Path, port: int, opens: bool, config_path: Path | None, sets: tuple[str, ...]) -> int:
    """Serve the runs in FOLDER as pages for a browser, live while they run."""
    from mlxrun.cli.signal_loop import run_async
    from mlxrun.evals.reports.run_pages import RunPages
    from mlxrun.server.app import make_app
    from mlxrun.server.endpoints import runs

    loaded = load_command_config(config_path, sets, [("--port", "server.port", str(port))], several=True)
    config = replace(loaded.config, apis=replace(loaded.config.apis, ui=True))
    app = make_app(config, surfaces=[runs.SURFACE])
    app[runs.RUN_PAGES] = RunPages(folder)
    return run_async(_serve(app, opens))


async def _serve(app: web.Application, opens: bool) -> int:
    """Serve until a signal; the exit code."""
    from mlxrun.server.certificate import read_certificate
    from mlxrun.server.http.access import CONFIG
    from mlxrun.server.http.surface import RUNS_PATH
    from mlxrun.server.lifecycle import handle_signals, listen

    stop = asyncio.Event()
    with handle_signals(stop, lambda text: None):
        certificate = read_certificate(app[CONFIG].server)
        async with listen(app, certificate=certificate, port_key="--port") as url:
            print_line(f"{url}{RUNS_PATH} (Ctrl-C ends it)")
            if opens:
                click.launch(url + RUNS_PATH)
            await stop.wait()
    return 0
