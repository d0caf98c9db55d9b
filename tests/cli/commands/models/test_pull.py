"""Commands about models against a hub on this machine: each is a process, since the hub's address is fixed at
import."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlxrun.model.load.model_files import EMBEDDED
from tests.helpers.fake_hub import REVISION, FakeHub, run_fake_hub

ID = "mlx-community/Tiny-Chat-4bit"
PROGRAM = "import sys; from mlxrun.cli.main import main; sys.exit(main())"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    shutil.copytree(EMBEDDED, folder)
    with run_fake_hub({ID: (folder, "apache-2.0"), "mlx-community/Tiny-Chat-8bit": (folder, "mit")}) as hub:
        yield hub


@pytest.fixture
def run(hub: FakeHub, tmp_path: Path) -> Run:
    """Runs mlxrun with that hub and an empty cache. `offline`: the hub cannot be reached; `url`: of another
    one."""

    def call(*args: str, offline: bool = False, url: str = hub.url) -> subprocess.CompletedProcess[str]:
        url = "http://127.0.0.1:9" if offline else url
        environ = os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        command = [sys.executable, "-c", PROGRAM, *args]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)

    return call


@pytest.mark.slow
def test_a_model_comes_is_listed_shown_and_goes(run: Run, hub: FakeHub, tmp_path: Path) -> None:
    pulled = run("pull", "tiny-chat-4bit")
    assert pulled.returncode == 0, pulled.stderr
    assert f"tiny-chat-4bit is {ID}" in pulled.stderr and "licence: apache-2.0" in pulled.stderr
    assert f"{ID} is here" in pulled.stdout
    hub.requests.clear()
    again = run("pull", "Tiny-Chat-4bit")
    assert again.returncode == 0 and "0 B of " in again.stderr
    assert not any(request.startswith("GET") and request.endswith(".safetensors") for request in hub.requests)
    (listed,) = json.loads(run("list", "--json").stdout)["models"]
    assert listed["id"] == ID and listed["bytes"] > 1_000_000
    table = run("list").stdout
    assert ID in table and "and `embedded`, the built-in one" in table
    shown = run("show", "tiny-chat-4bit", "--json", offline=True)
    assert shown.returncode == 0, shown.stderr
    facts = json.loads(shown.stdout)
    assert facts["model"] == ID and facts["context"] > 0 and "licence" not in facts
    ambiguous = run("rm", "no-such-model")
    assert ambiguous.returncode == 2 and "there is no model no-such-model" in ambiguous.stderr
    refused = run("rm", "tiny-chat-4bit")
    assert refused.returncode == 2 and "give --yes" in refused.stderr
    data = tmp_path / "hf" / "hub" / f"datasets--{ID.replace('/', '--')}" / "snapshots" / ("b" * 40)
    data.mkdir(parents=True)
    removed = run("rm", "tiny-chat-4bit", "--yes")
    assert removed.returncode == 0 and "freed" in removed.stdout
    assert "only `embedded`" in run("list").stdout
    assert data.is_dir(), "a dataset of the same name is none of the model"


@pytest.mark.slow
def test_what_is_wrong_is_said_with_a_suggestion(run: Run) -> None:
    unknown = run("pull", "tiny-chat-3bit")
    assert unknown.returncode == 3 and "did you mean 'tiny-chat-" in unknown.stderr
    missing = run("pull", "owner/name")
    assert missing.returncode == 3 and "the hub has no such model" in missing.stderr
    other = run("show", "nothing-like-it")
    assert other.returncode == 3 and "of mlx-community; a model of another owner" in other.stderr
    folder = run("pull", str(EMBEDDED))
    assert folder.returncode == 2 and "is not a model of the hub" in folder.stderr
    assert not any("Traceback" in each.stderr for each in (unknown, missing, other, folder))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["pull", "show", "fit", "chat"])
def test_without_a_network_one_line_says_so(run: Run, command: str) -> None:
    """No line of the hub's library, which would repeat its request for half a minute."""
    question = ["-p", "hi"] if command == "chat" else []
    short = run(command, "nothing-like-it", *question, offline=True)
    reason = "is neither a folder nor a model in the local cache, and the hub cannot be reached"
    said = f"mlxrun: 'nothing-like-it' {reason}; `mlxrun list` names the models that are here\n"
    assert (short.returncode, short.stderr) == (3, said)
    full = run(command, "owner/name", *question, offline=True)
    assert full.returncode == 3
    assert "Retrying" not in full.stderr and full.stderr.count("hub cannot be reached") == 1


@pytest.mark.slow
def test_a_hub_that_accepts_and_never_answers_is_not_waited_for(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with ThreadPoolExecutor() as pool:  # they wait at the same time
            both = [*pool.map(lambda name: run("show", name, url=url), ("tiny-chat-4bit", ID))]
        for found in both:
            assert found.returncode == 3 and "the hub cannot be reached" in found.stderr
            assert found.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_hub_that_is_busy_is_asked_again(run: Run, hub: FakeHub) -> None:
    """And that is logged once, although the hub's library has a handler of its own."""
    hub.failing.append(f"/tree/{REVISION}")
    pulled = run("pull", ID)
    assert pulled.returncode == 0 and not hub.failing, pulled.stderr
    assert pulled.stderr.count("503 thrown while requesting") == 1
