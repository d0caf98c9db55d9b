"""Which runs a server shows: those of server.runs_path, or its own batches where there are no keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mlxrun.cli.run_pages import show_runs
from mlxrun.config.settings import ApiSettings, Config, ServerSettings
from mlxrun.server.endpoints.runs import RUN_PAGES
from tests.helpers.batch_fakes import chats
from tests.helpers.report_jobs import run_lines

KEYS = {"alice": "sesame-0123456789abc"}


@pytest.mark.parametrize(
    ("settings", "apis", "shown"),
    [
        ({}, {}, ["b1/job/b1.out.jsonl"]),
        ({"api_keys": KEYS}, {}, None),
        ({}, {"batches": False}, None),
        ({"runs_path": "mine", "api_keys": KEYS}, {"batches": False}, ["job.out.jsonl"]),
    ],
)
async def test_the_folder(
    tmp_path: Path, settings: dict[str, Any], apis: dict[str, bool], shown: list[str] | None
) -> None:
    await run_lines(tmp_path / "mine", chats(1))
    await run_lines(tmp_path / "data" / "batches" / "b1" / "job", chats(1), "b1.jsonl")
    if "runs_path" in settings:
        settings = settings | {"runs_path": str(tmp_path / settings["runs_path"])}
    server = ServerSettings(data_path=str(tmp_path / "data"), **settings)
    pages = show_runs(web.Application(), Config(server=server, apis=ApiSettings(**apis))).get(RUN_PAGES)
    assert (None if pages is None else [run.key for run in pages.list_runs()]) == shown  # type: ignore[attr-defined]
