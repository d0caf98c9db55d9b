"""`mlxrun serve`: a config with several mistakes, and the command from start to exit code."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mlxrun.cli.commands.serve import EPILOG
from mlxrun.cli.main import main
from mlxrun.config.loading import LoadedConfig, load_config
from mlxrun.core.errors import ConfigError
from mlxrun.model.load.model_files import EMBEDDED
from mlxrun.server.app import list_surfaces
from mlxrun.server.batches.batch_queue import BATCH_QUEUE
from mlxrun.server.responses.response_runs import RESPONSES
from tests.helpers.command_processes import run_program, start_program
from tests.helpers.server_fakes import FakeEngine


@pytest.fixture
def _no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mlxrun.cli.commands.serve.serve_until_signal", never)


@pytest.mark.usefixtures("_no_server")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--set", "server.port=abc", "--port", "0"], ["server.port: 'abc' is not an integer"]),
        (["--set", "server.port=-1", "--port", "70000"], ["70000 is more than", "-1 is less than"]),
        (["--set", "server.prt=1", "--set", "server.port=x", "--port", "1"], ["server.prt", "server.port"]),
    ],
    ids=["hidden", "both", "with others"],
)
def test_an_option_hides_no_mistake(
    flags: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every mistake is shown, each once, also where --port or --host would have gone over it."""
    assert main(["serve", *flags]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == len(said), shown
    for text in said:
        assert sum(text in each for each in shown) == 1, shown


@pytest.mark.parametrize("given", ["folder", "./folder"])
def test_a_model_may_be_named_as_an_argument(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes over the config; a folder comes before a short name."""
    found: list[LoadedConfig] = []

    async def serve(loaded: LoadedConfig, *others: object) -> int:
        found.append(loaded)
        return 0

    monkeypatch.setattr("mlxrun.cli.commands.serve.serve_until_signal", serve)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EMBEDDED, tmp_path / "folder")
    assert main(["serve", given, "--set", "model.path=embedded"]) == 0
    assert found[0].config.model.path == str(tmp_path / "folder")


@pytest.mark.usefixtures("_no_server")
@pytest.mark.parametrize("flags", [["--set", "server.port=1", "--port", "0"], ["--port", "0"]], ids=str)
def test_an_option_goes_over_what_is_right(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The twin: it comes to the start."""
    assert main(["serve", *flags]) == 3
    assert "server.port" not in capsys.readouterr().err


@pytest.mark.usefixtures("_no_server")
def test_a_file_that_an_option_makes_right(capsys: pytest.CaptureFixture[str]) -> None:
    """What contradicts itself without the option is no mistake with it."""
    Path("c.yaml").write_text("server:\n  host: 0.0.0.0\n")
    assert main(["serve", "-c", "c.yaml", "--host", "127.0.0.1"]) == 3
    assert main(["serve", "-c", "c.yaml"]) == 2
    assert "server.host" in capsys.readouterr().err


def test_the_help_and_the_readme_name_every_interface() -> None:
    """Each by the first part of its paths, and in README.md by its key too."""
    readme = Path(__file__).parents[3].joinpath("README.md").read_text(encoding="utf-8")
    for surface in list_surfaces():
        assert all(f"`apis.{name}`" in readme for name in surface.switches), surface.name
        for endpoint in surface.endpoints:
            first = endpoint.path.removeprefix("/v1").split("/")[1]
            assert f"/{first}" in EPILOG and f"/{first}" in readme, endpoint.path


async def test_the_engine_is_closed_if_the_batches_cannot_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mlxrun.cli.commands import serve
    from mlxrun.engine.client import EngineClient
    from mlxrun.server.batches.batch_queue import BatchQueue
    from mlxrun.server.batches.storage import Storage

    engine, loaded = FakeEngine(), load_config(None, (), {})

    async def start(*_: Any) -> FakeEngine:
        return engine

    async def fails(*_: Any) -> None:
        raise ConfigError("no batches")

    monkeypatch.setattr(EngineClient, "start", start)
    monkeypatch.setattr(BatchQueue, "start", fails)
    with pytest.raises(ConfigError, match="no batches"):
        await serve._load(loaded, BatchQueue(Storage(tmp_path, 10**9)))
    assert engine.closed


@pytest.mark.parametrize(
    ("sets", "kept"),
    [
        ([], ["batches", "responses"]),
        (["server.store_days=0"], ["batches"]),
        (["server.store_responses=0"], ["batches"]),
        (["apis.responses=false"], ["batches"]),
        (["apis.batches=false"], ["responses"]),
        (["apis.batches=false", "server.store_days=0"], []),
    ],
    ids=" ".join,
)
def test_what_is_kept_in_the_data_folder(
    sets: list[str], kept: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that nothing is kept in is not claimed either."""
    apps: list[web.Application] = []

    async def run(app: web.Application, *_: Any, **named: Any) -> int:
        apps.append(app)
        return 0

    monkeypatch.setattr("mlxrun.server.lifecycle.run", run)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert main(["serve", *(part for each in sets for part in ("--set", each))]) == 0
    (app,) = apps
    stores = {"batches": BATCH_QUEUE in app, "responses": app[RESPONSES].store.is_durable}
    assert [name for name, stored in stores.items() if stored] == kept
    assert bool([*tmp_path.iterdir()]) == bool(kept)


@pytest.mark.slow
def test_the_command_serves_and_stops(tmp_path: Path) -> None:
    """`mlxrun serve` on the embedded model: the printed URL answers, SIGTERM ends it with 0, however often it
    is sent."""
    program = (
        "import sys; from mlxrun.cli import interrupts, main; interrupts.SETTLE = 600; sys.exit(main.main())"
    )
    command = [sys.executable, "-c", program, "serve", "--port", "0"]
    command += ["--set", f"server.data_path={tmp_path / 'data'}"]
    log = tmp_path / "log"
    with log.open("w") as errors, start_program(command, cwd=tmp_path, stderr=errors) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+?(?=;)", process.stdout.readline())
        assert found
        assert process.stdout.readline().startswith("ready: embedded")
        body = json.dumps({"messages": [{"role": "user", "content": "What is 2 + 3?"}]}).encode()
        request = urllib.request.Request(
            f"{found[0]}/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.loads(response.read())["choices"][0]["message"]["content"] == "5"
        process.send_signal(signal.SIGTERM)
        while not (line := process.stdout.readline()).startswith("stopping"):
            assert line, f"it ended: {log.read_text()}"
        until = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < until:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.001)
        assert process.poll() == 0


def test_a_public_address_without_keys_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mlxrun", "serve", "--host", "0.0.0.0", "--port", "0"]
    done = run_program(command, cwd=tmp_path)
    assert done.returncode == 2
    assert "--host: server.host: 0.0.0.0 can be reached from other machines" in done.stderr


@pytest.mark.parametrize("sets", [(), ("--set", "server.allow_public=true")], ids=["no key", "public"])
def test_a_host_that_does_not_exist_is_named(tmp_path: Path, sets: tuple[str, ...]) -> None:
    """It needs no keys, as no server starts there. The resolver is not needed for a name with two dots."""
    command = [sys.executable, "-m", "mlxrun", "serve", "--host", "no..host", "--port", "0", *sets]
    done = run_program(command, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith("server.host: the host name 'no..host' does not exist\n")
    assert len(done.stderr.splitlines()) == 1
