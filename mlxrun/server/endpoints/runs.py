"""/ui/runs, the page of the runs in a folder: jobs and suites, live while they run.

Browsers ask for an API key by themselves there, as no script of a page can send one when a page is opened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from typing import Protocol

from aiohttp import web

from mlxrun.core.errors import JobError, NotFound, RequestError
from mlxrun.server.endpoints.ui import send_page
from mlxrun.server.http.surface import RUNS_PATH, Endpoint, Surface


class PagesOfRuns(Protocol):
    """The pages of a folder of runs. `render` blocks; NotFound for keys of runs that are not there, and
    JobError for damaged runs. `keys`: of the runs in a report; none for the index."""

    @property
    def policy(self) -> str: ...
    def render(self, keys: Sequence[str], known: Container[str] = ()) -> tuple[str, str]:
        """The digest of what a page shows, and the page; empty if the digest is one of `known`."""


RUN_PAGES = web.AppKey("run_pages", PagesOfRuns)


async def get_runs(request: web.Request) -> web.StreamResponse:
    """Send the index, or the report of the runs that the query names; 304 if the browser has this version."""
    pages = request.app.get(RUN_PAGES)
    if pages is None:
        raise NotFound(f"{RUNS_PATH} shows the runs of a folder: name it in server.runs_path")
    keys = request.query.getall("run", [])
    known = [each.value for each in request.if_none_match or ()]
    try:
        etag, html = await asyncio.to_thread(pages.render, keys, known)
    except JobError as error:  # the server is not at fault
        raise RequestError(str(error), param="run", code=error.code) from error
    return send_page(request, html.encode("utf-8", "replace"), "text/html", pages.policy, etag)


SURFACE = Surface(
    "ui",
    (Endpoint("GET", RUNS_PATH, get_runs, "The runs of a folder", role="admin", engine=False, is_page=True),),
    is_api=False,
)
