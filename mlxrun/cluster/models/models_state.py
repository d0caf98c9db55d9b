"""What the application of the front knows of its models together, where a server knows its one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxrun.cluster.models.model_pool import ModelPool
from mlxrun.server.engine_state import EngineState


@dataclass(frozen=True, slots=True)
class CommonFacts:
    """What `ModelsState.find_model` says. `pooled`: None if no model only gives vectors or scores."""

    context_length: int
    vision: bool
    pooled: bool | None


class ModelsState(EngineState):
    """The engine's state at the front: it serves, whichever models are loaded."""

    def __init__(self, pool: ModelPool) -> None:
        super().__init__()
        self._pool = pool
        self._name = ", ".join(slot.name for slot in pool.slots)
        self._facts = [slot.facts for slot in pool.slots if slot.facts is not None]

    def find_model(self) -> Any:
        """What the limits of bodies and the lines at start need to know of the models together."""
        return CommonFacts(
            context_length=max((each.context_length for each in self._facts), default=0),
            vision=any(each.vision for each in self._facts),
            pooled=any("generate" not in each.tasks for each in self._facts) or None,
        )

    def start_draining(self) -> None:
        """Refuse new requests, here and in the processes, which let running ones finish."""
        super().start_draining()
        self._pool.drain_all()

    def describe_model(self) -> Mapping[str, Any]:
        """Describe the models together; /v1/status has a list of them besides."""
        common = self.find_model()
        tasks = dict.fromkeys(task for each in self._facts for task in each.tasks)
        sizes = {"context_length": common.context_length, "vision": common.vision, "tasks": list(tasks)}
        return {"name": self._name, **sizes}
