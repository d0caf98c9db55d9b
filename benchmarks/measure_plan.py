"""What a benchmark of one model measures, and the report around its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxrun import __version__
from mlxrun.cli.bench.models import BenchModel
from mlxrun.config.settings import Config

FORMAT = 1


@dataclass(frozen=True, slots=True)
class MeasurePlan:
    """`scale`: of lengths, or of the number of items."""

    model: str
    config: Config
    scale: float = 1.0
    repeat: int = 3
    seed: int = 0

    def build_report(self, model: BenchModel, workloads: Mapping[str, Any]) -> dict[str, Any]:
        """The report of what was measured on the plan's model, as `--json` writes it."""
        from mlxrun.model.machine.device import describe_device
        from mlxrun.model.machine.versions import list_library_versions

        return {
            "format": FORMAT,
            "versions": {"mlxrun": __version__} | list_library_versions(),
            "device": describe_device(),
            "model": {"name": model.name, "dtype": model.dtype, "vocab": model.vocab},
            "settings": {"scale": self.scale, "repeat": self.repeat, "seed": self.seed},
            "workloads": workloads,
        }
