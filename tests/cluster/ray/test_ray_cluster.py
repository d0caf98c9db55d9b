"""What `--ray` says where Ray is missing, out of reach or too small. No Ray is started."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxrun.cli.main import main
from mlxrun.cluster.ray.ray_cluster import LOCAL, _init, place_workers
from mlxrun.config.settings import WorkersSettings
from mlxrun.core.errors import ConfigError
from tests.helpers.command_processes import PATIENCE

JOB = '{"id": "a", "prompt": "once"}\n'


def run(tmp_path: Path, *arguments: str) -> int:
    job = tmp_path / "job.jsonl"
    job.write_text(JOB)
    return main(["batch", str(job), *arguments])


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(tmp_path, "--ray") == 2
    assert "pip install 'mlxrun[ray]'" in capsys.readouterr().err
    assert not (tmp_path / "job.out.jsonl.run").exists()


@contextmanager
def listen(answer: bytes) -> Iterator[str]:
    """The address of a server that answers one client with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE)

        def serve() -> None:
            with server.accept()[0] as connection:
                connection.settimeout(PATIENCE)
                connection.recv(100)
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(PATIENCE)


def find_closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_addresses_out_of_reach(tmp_path: Path, capsys: Any) -> None:
    """Exit 2, what to do instead, and no waiting: Ray itself would try for minutes."""
    assert run(tmp_path, "--ray", find_closed_port()) == 2
    assert "cannot be reached" in (text := capsys.readouterr().err) and "ray start --head" in text
    with listen(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
        assert run(tmp_path, "--ray", address) == 2
    assert "what listens there is not Ray" in capsys.readouterr().err
    assert run(tmp_path, "--ray", "ray://10.0.0.1:10001") == 2
    assert "Ray Client is not supported" in capsys.readouterr().err
    assert run(tmp_path, "--ray", "127.0.0.1:99999") == 2
    assert "a port is a number from 1 to 65535" in capsys.readouterr().err
    assert run(tmp_path, "--ray", "somewhere") == 2
    assert "neither HOST:PORT nor `auto`" in capsys.readouterr().err


def test_auto_leads_to_a_cluster_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Ray would try for a minute."""
    monkeypatch.setenv("RAY_ADDRESS", closed := find_closed_port())
    assert run(tmp_path, "--ray", "auto") == 2
    assert f"--ray auto ({closed}): cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ("Failed to connect to Ray cluster at 10.0.0.1:6379", "RAY_AUTH_MODE=token"),
        ("Version mismatch: The cluster was started with", "the same versions of Ray and Python"),
    ],
)
def test_what_ray_says_gets_a_hint(reason: str, hint: str) -> None:
    def init(**_: Any) -> None:
        raise ConnectionError(reason)

    with pytest.raises(ConfigError, match=hint):
        _init(SimpleNamespace(init=init), "auto", {})


def test_a_local_ray_that_cannot_be_reached_is_no_cluster() -> None:
    """A part of it has ended while it started: a token would not help."""

    def init(**_: Any) -> None:
        raise ConnectionError("Failed to connect to GCS")

    with pytest.raises(ConfigError, match="started on this machine: Failed to connect.*try again") as caught:
        _init(SimpleNamespace(init=init), LOCAL, {})
    assert "RAY_AUTH" not in str(caught.value)


def make_ray(*nodes: dict[str, float]) -> Any:
    """What `place_workers` reads of Ray: its nodes."""
    found = [{"NodeID": f"{n:056x}", "Alive": True, "Resources": node} for n, node in enumerate(nodes)]
    return SimpleNamespace(nodes=lambda: [*found, {"NodeID": "f" * 56, "Alive": False, "Resources": {}}])


def test_one_worker_a_gpu_else_one_a_machine() -> None:
    gpus = place_workers(make_ray({"CPU": 8, "GPU": 2}, {"CPU": 8, "GPU": 1}), WorkersSettings())
    assert [each["num_gpus"] for each in gpus] == [1.0] * 3
    machines = place_workers(make_ray({"CPU": 8}, {"CPU": 4}), WorkersSettings())
    assert [each["num_cpus"] for each in machines] == [8, 4]
    three = place_workers(make_ray({"CPU": 8}, {"CPU": 4}), WorkersSettings(count=3))
    assert [each["num_cpus"] for each in three] == [4, 4, 4]
    own = WorkersSettings(resources={"GPU": 0.5, "big": 1})
    placed = place_workers(make_ray({"CPU": 8, "GPU": 2, "big": 3}), own)
    assert [each["resources"] for each in placed] == [{"big": 1.0}] * 3


def test_more_workers_than_processors_get_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    place_workers(make_ray({"CPU": 1}, {"CPU": 1}), WorkersSettings(count=2))
    assert not caplog.messages
    place_workers(make_ray({"CPU": 1}, {"CPU": 1}), WorkersSettings(count=9))
    assert "9 workers share 2 processors" in caplog.text


@pytest.mark.parametrize(
    ("settings", "nodes"),
    [
        (WorkersSettings(count=3), ({"CPU": 8, "GPU": 2},)),
        (WorkersSettings(resources={"GPU": 1}), ({"CPU": 8}, {"CPU": 8})),
        (WorkersSettings(), ({"CPU": 0},)),
    ],
)
def test_no_room(settings: WorkersSettings, nodes: tuple[dict[str, float], ...]) -> None:
    with pytest.raises(ConfigError, match="workers"):
        place_workers(make_ray(*nodes), settings)
