"""What is made of Ray's messages when an actor ends."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mlxrun.cluster.messages import WorkerDied, WorkerRefused
from mlxrun.cluster.ray.ray_client import RayActor, RayCrew, RayWatch, describe_end
from mlxrun.core.errors import EngineDead
from tests.helpers.fake_workers import FACTS


class RayError(Exception):
    """As ray.exceptions has it."""


class RayTaskError(RayError):
    cause = KeyError("x")


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> RayActor:
    """An actor of a Ray that starts nothing."""
    found = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
    monkeypatch.setitem(sys.modules, "ray.exceptions", found)  # type: ignore[arg-type]
    made = SimpleNamespace(remote=lambda spec: None)
    ray = SimpleNamespace(remote=lambda kind: SimpleNamespace(options=lambda **_: made), nodes=list)
    return RayActor(RayCrew(ray, RayWatch({}), mixed=False), object, None, {})


async def reply(error: Exception) -> Any:
    raise error


def test_the_first_and_last_line_without_colours_and_guesses() -> None:
    text = "The actor died.\n  more\n\n\x1b[36mModuleNotFoundError\x1b[39m: x\n"
    assert describe_end(text) == "The actor died. ModuleNotFoundError: x"
    assert describe_end("It ended. Some common causes include: (1) ...") == "It ended."
    assert describe_end("") == "no reason is known"


def test_the_end_of_a_process_is_one_sentence() -> None:
    text = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: ServerActor\n\tpid: 7\n"
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit "
        "detail: Worker unexpectedly exits with a connection error code 2. End of file. There are some "
        "potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage."
    )
    said = "its worker process has died: Worker unexpectedly exits with a connection error code 2"
    assert describe_end(text) == said
    assert describe_end("It died.\nThe actor is dead because its node has died.") == "its node has died"


async def test_a_worker_that_cannot_import_mlxrun_is_refused_at_once(actor: RayActor) -> None:
    text = "The actor died because of an error raised in its creation task\nNo module named 'mlxrun'"
    with pytest.raises(WorkerRefused, match="No module named 'mlxrun'. Install the same version") as refused:
        await actor.call(reply(RayError(text)))
    assert refused.value.exit_code == 2


async def test_other_ends_are_deaths(actor: RayActor) -> None:
    with pytest.raises(WorkerDied, match="killed"):
        await actor.call(reply(RayError("killed")))
    with pytest.raises(EngineDead, match="a worker failed: KeyError"):
        await actor.call(reply(RayTaskError()))
    actor._facts = FACTS
    with pytest.raises(WorkerDied) as died:
        await actor.call(reply(RayError("its machine is gone")))
    assert died.value.blameless
