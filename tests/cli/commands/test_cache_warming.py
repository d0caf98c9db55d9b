"""`mlxrun cache warm`, `pinned` and `unpin`, with a server of the built-in model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxrun.cli.chat.local_server import run_local_server
from mlxrun.cli.commands.cache_warming import _list_workers
from mlxrun.cli.main import main
from mlxrun.cli.server_client import ServerClient
from mlxrun.config.settings import Config
from tests.api.test_prompt_prefix import BODIES


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with run_local_server(Config()) as found:
        yield found


@pytest.fixture
def bodies(tmp_path: Path) -> dict[str, Path]:
    """A file for each API, by the endpoint."""
    found = {}
    for endpoint, body in BODIES.items():
        found[endpoint] = tmp_path / f"{endpoint.rpartition('/')[2]}.json"
        found[endpoint].write_text(json.dumps(body))
    return found


def test_a_prompt_is_warmed_listed_and_unpinned(
    url: str, bodies: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for path in bodies.values():
        assert main(["cache", "warm", "--body", str(path), "--url", url]) == 0
        assert f"({path.stem})" in capsys.readouterr().out
    assert main(["cache", "pinned", "--url", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "pinned" in lines[0] and "in memory" in lines[0]
    ids = [line.split()[0] for line in lines[1:]]
    assert lines[-1].endswith("messages") and len(ids) == len(set(ids)) >= 2
    assert main(["cache", "unpin", ids[0][:6], "--url", url]) == 0
    assert f"unpinned {ids[0]}" in capsys.readouterr().out
    assert main(["cache", "unpin", ids[0], "--url", url]) == 2
    assert "no such prompt is pinned" in capsys.readouterr().err
    assert main(["cache", "unpin", "--all", "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unpinned"] == ids[1:]
    assert main(["cache", "unpin", "--all", "--url", url]) == 0
    assert "nothing is pinned" in capsys.readouterr().out


def test_name_endpoint_and_json(
    url: str, bodies: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(bodies["/v1/messages"])
    options = ["--url", url, "--endpoint", "/v1/messages", "--name", "claude", "--json"]
    assert main(["cache", "warm", "--body", path, *options]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["pinned"]["name"] == "claude" and made["pinned"]["tokens"] == made["prefix_tokens"]
    assert main(["cache", "pinned", "--url", url, "--json"]) == 0
    assert made["pinned"] in json.loads(capsys.readouterr().out)["pinned"]


def test_what_is_wrong_is_said(
    url: str,
    tmp_path: Path,
    bodies: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server's refusals as they are, and files and servers that are none."""
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    path = str(bodies["/v1/messages"])
    for arguments, code, text in (
        (["warm", "--body", str(broken), "--url", url], 2, "broken.json: this is no JSON body"),
        (["warm", "--body", path, "--endpoint", "/v1/chat/completions", "--url", url], 1, "system"),
        (["warm", "--body", path, "--url", "http://127.0.0.1:9"], 1, "does not answer"),
        (["unpin", "--url", url], 2, "give the ID"),
        (["unpin", "5f", "--all", "--url", url], 2, "give the ID"),
    ):
        assert main(["cache", *arguments]) == code, arguments
        assert text in capsys.readouterr().err
    commands = "mlxrun.cli.commands.cache_warming"
    monkeypatch.setattr(f"{commands}.find_server", lambda key: None)
    client = "mlxrun.cli.server_client"
    monkeypatch.setattr(f"{client}.list_certificates", dict)
    assert main(["cache", "pinned"]) == 2
    assert "no server runs" in capsys.readouterr().err
    monkeypatch.setattr(f"{client}.list_certificates", lambda: {"http://a": None, "http://b": None})
    for state, key, text in (
        ("ok", (), "http://b needs its API key: give --key"),
        ("ok", ("--key", "k"), "needs another API key"),
        ("loading", (), "http://b cannot be asked now, its state is: loading"),
    ):
        monkeypatch.setattr(f"{client}.read_state", lambda url, certificate, state=state: state)
        assert main(["cache", "pinned", *key]) == 2
        assert text in capsys.readouterr().err


def test_workers_and_models_are_named() -> None:
    found = _list_workers({"workers": [{"worker": 0, "pinned": []}, {"worker": 1, "pinned": []}]})
    assert [name for name, _ in found] == ["worker 0: ", "worker 1: "]
    assert _list_workers({"models": [{"model": "a", "pinned": []}]})[0][0] == "model a: "
    assert _list_workers({"pinned": []}) == [("", {"pinned": []})]


def test_a_server_without_a_loaded_model_has_nothing_pinned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerClient, "call", lambda *arguments: {"models": []})
    assert main(["cache", "pinned", "--url", "http://a"]) == 0
    assert capsys.readouterr().out == "http://a: no model is loaded, so nothing is pinned\n"
