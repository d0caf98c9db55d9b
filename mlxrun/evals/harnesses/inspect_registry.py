"""What Inspect AI finds of mlxrun: the entry point `inspect_ai` of the package names this module.

Inspect loads it with every command, so the engine is imported when a model is made.
"""

from __future__ import annotations

from inspect_ai.model import ModelAPI, modelapi


@modelapi(name="mlxrun")
def mlxrun() -> type[ModelAPI]:
    """The provider of models named `mlxrun/...`."""
    from mlxrun.evals.harnesses.inspect_provider import InspectProvider

    return InspectProvider
