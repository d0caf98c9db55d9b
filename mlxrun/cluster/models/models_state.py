"""What the application of the front knows of its models together, where a server knows its one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxrun.cluster.models.model_pool import ModelPool
from mlxrun.cluster.models.model_slot import ModelSlot
from mlxrun.server.engine_state import EngineState


@dataclass(frozen=True, slots=True)
class JointModel:
    """The models together, where a server has one `ModelInfo`. `pooled`: None if no model gives vectors or
    scores; `speech`: None if none transcribes; `digests`: change when a model or a setting for it does."""

    name: str
    context_length: int
    pooled: bool | None
    speech: bool | None
    tasks: Sequence[str] = ()
    modalities: Sequence[str] = ()
    digests: Mapping[str, str] = field(default_factory=dict)
    adapters: Sequence[Any] = ()
    eos_ids: frozenset[int] = frozenset()
    defaults: Mapping[str, float] = field(default_factory=dict)
    processor_digest: bytes = b""
    video_sampling: None = None
    audio_sampling: None = None

    @property
    def vision(self) -> bool:
        return "image" in self.modalities


def join_models(slots: Sequence[ModelSlot]) -> JointModel:
    """Join what is known of several models."""
    facts = [slot.facts for slot in slots if slot.facts is not None]
    return JointModel(
        name=", ".join(slot.name for slot in slots),
        context_length=max((each.context_length for each in facts), default=0),
        pooled=any({"embed", "score"} & {*each.tasks} for each in facts) or None,
        speech=any("transcribe" in each.tasks for each in facts) or None,
        tasks=list(dict.fromkeys(task for each in facts for task in each.tasks)),
        modalities=list(dict.fromkeys(kind for each in facts for kind in each.modalities)),
    )


class ModelsState(EngineState):
    """The engine's state at the front: it serves, whichever models are loaded."""

    def __init__(self, pool: ModelPool) -> None:
        super().__init__()
        self._pool = pool
        self._joint = join_models(pool.slots)

    def find_model(self) -> Any:
        """What limits of bodies and the lines at start need to know of the models together."""
        return self._joint

    def start_draining(self) -> None:
        """Refuse new requests, here and in the processes, which let running ones finish."""
        super().start_draining()
        self._pool.drain_all()

    def describe_model(self) -> Mapping[str, Any]:
        """Describe the models together; /v1/status has a list of them besides."""
        joint = self._joint
        takes = {"vision": joint.vision, "input_modalities": joint.modalities, "tasks": joint.tasks}
        return {"name": joint.name, "context_length": joint.context_length, **takes}
