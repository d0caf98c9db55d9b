"""`mlxrun view`: it serves the runs of a folder until a signal, and says where."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest

from mlxrun.cli.main import main
from tests.helpers.batch_fakes import chats
from tests.helpers.command_processes import PATIENCE, start_program
from tests.helpers.report_jobs import run_lines

pytestmark = pytest.mark.thorough


async def test_a_folder_is_served_until_a_signal(tmp_path: Path) -> None:
    await run_lines(tmp_path / "one", chats(2))
    command = (sys.executable, "-m", "mlxrun", "view", str(tmp_path), "--port", "0")
    with start_program(command) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        assert url.endswith("/ui/runs") and "://127.0.0.1:" in url
        async with aiohttp.ClientSession() as http:
            async with http.get(url) as response:
                assert "one/job.out.jsonl" in await response.text()
            async with http.get(url, params={"run": "one/job.out.jsonl"}) as response:
                assert 'id="head"' in await response.text()
            async with http.get(url, headers={"Host": "evil.example"}) as response:
                assert response.status == 403
            for path in ("", "/ui", "/ui/"):  # a browser is led to the page
                address = url.removesuffix("/ui/runs") + path
                async with http.get(address, headers={"Accept": "text/html"}) as response:
                    assert (response.status, str(response.url)) == (200, url)
                async with http.get(address) as response:
                    assert response.status == 404, "nothing else is served"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


def test_what_cannot_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["view", str(tmp_path), "--set", "server.host=0.0.0.0"]) == 2
    assert "server.api_keys" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["view", str(tmp_path), "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"--port: cannot listen on 127.0.0.1:{port}" in said and "`--port 0`" in said
