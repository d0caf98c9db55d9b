"""The entry point `inspect_ai` of the package, where Inspect AI finds mlxrun's provider.

Inspect loads this module with every command, so the engine is imported only when a model is made.
"""

from __future__ import annotations

from inspect_ai.model import ModelAPI, modelapi


@modelapi(name="mlxrun")
def mlxrun() -> type[ModelAPI]:
    """Return the provider of models named `mlxrun/...`."""
    from mlxrun.evals.harnesses.inspect_provider import InspectProvider

    return InspectProvider
