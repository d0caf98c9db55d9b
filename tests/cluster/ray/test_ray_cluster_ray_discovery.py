"""Which Ray `--ray auto` takes, by the command lines of what runs. No Ray is started."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mlxrun.cluster.ray.ray_cluster import find_own_address, sort_raylets
from mlxrun.core.errors import ConfigError

RAYLET = "/x/raylet/raylet --raylet_socket_name=/tmp/s --static_resource_list=CPU,2{} --gcs-address={}"
OTHERS = RAYLET.format("", "10.0.0.1:6379")
SECOND = RAYLET.format("", "10.0.0.1:7777")
PRIVATE = RAYLET.format(",mlxrun_private,1", "10.0.0.1:4242")
READER = "grep /raylet --gcs-address=10.0.0.1:1"


def find(monkeypatch: pytest.MonkeyPatch, noted: str, *commands: str) -> str:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("mlxrun.cluster.ray.ray_cluster.list_commands", lambda: list(commands))
    monkeypatch.setattr("mlxrun.cluster.ray.ray_cluster.read_noted_address", lambda ray: noted)
    return find_own_address(SimpleNamespace())


def test_the_ray_of_another_command_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sort_raylets([OTHERS, READER, PRIVATE]) == ({"10.0.0.1:6379"}, {"10.0.0.1:4242"})
    assert find(monkeypatch, "", PRIVATE, OTHERS) == "10.0.0.1:6379"
    with pytest.raises(ConfigError, match=r"no Ray runs on this machine \(those that other mlxrun commands"):
        find(monkeypatch, "", PRIVATE)
    with pytest.raises(ConfigError, match="no Ray runs on this machine: `ray start --head` starts one"):
        find(monkeypatch, "", READER)


def test_among_several_the_last_that_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(monkeypatch, "10.0.0.1:7777", OTHERS, SECOND) == "10.0.0.1:7777"
    assert find(monkeypatch, "10.0.0.1:1", OTHERS) == "10.0.0.1:6379"  # the noted one has ended
    assert find(monkeypatch, "10.0.0.1:1") == "10.0.0.1:1"  # whether it answers is found out later
    with pytest.raises(ConfigError, match="several Rays run on this machine .*10.0.0.1:6379, 10.0.0.1:7777"):
        find(monkeypatch, "", OTHERS, SECOND)


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:1")
    assert find_own_address(SimpleNamespace()) == "10.0.0.9:1"
