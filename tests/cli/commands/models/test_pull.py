"""Commands about models against a hub on this machine: each is a process, since the hub's address is fixed at
import."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlxrun.model.load.model_files import EMBEDDED
from tests.helpers.fake_hub import FakeHub, run_fake_hub

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
    """Runs mlxrun with that hub and an empty cache. `offline`: the hub does not answer."""

    def call(*args: str, offline: bool = False) -> subprocess.CompletedProcess[str]:
        url = "http://127.0.0.1:9" if offline else hub.url
        environ = os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        command = [sys.executable, "-c", PROGRAM, *args]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)

    return call


@pytest.mark.slow
def test_a_model_comes_is_listed_shown_and_goes(run: Run, hub: FakeHub) -> None:
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
    assert ID in run("list").stdout
    shown = run("show", "tiny-chat-4bit", "--json", offline=True)
    assert shown.returncode == 0, shown.stderr
    facts = json.loads(shown.stdout)
    assert facts["model"] == ID and facts["context"] > 0 and "licence" not in facts
    ambiguous = run("rm", "no-such-model")
    assert ambiguous.returncode == 2 and "there is no model no-such-model" in ambiguous.stderr
    refused = run("rm", "tiny-chat-4bit")
    assert refused.returncode == 2 and "give --yes" in refused.stderr
    removed = run("rm", "tiny-chat-4bit", "--yes")
    assert removed.returncode == 0 and "freed" in removed.stdout
    assert "no models yet" in run("list").stdout


@pytest.mark.slow
def test_what_is_wrong_is_said_with_a_suggestion(run: Run) -> None:
    unknown = run("pull", "tiny-chat-3bit")
    assert unknown.returncode == 3 and "did you mean 'tiny-chat-" in unknown.stderr
    missing = run("pull", "owner/name")
    assert missing.returncode == 3 and "the hub has no such model" in missing.stderr
    offline = run("pull", "tiny-chat-4bit", offline=True)
    assert offline.returncode == 3 and "the hub cannot be reached" in offline.stderr
    folder = run("pull", str(EMBEDDED))
    assert folder.returncode == 2 and "is not a model of the hub" in folder.stderr
    assert not any("Traceback" in each.stderr for each in (unknown, missing, offline, folder))
