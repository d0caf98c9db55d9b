"""What every test needs: no model hub, and no config from the environment it happens to run in."""

from __future__ import annotations

import importlib
import os

import hypothesis
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # on tiny matrices its threads only wait for each other

importlib.import_module("mlxrun.model")  # as the product does: OpenBLAS has to be there before MLX

from fixtures_models import zoo  # noqa: E402, F401

# No deadlines: machines differ. In CI the same examples each time.
hypothesis.settings.register_profile("mlxrun", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("mlxrun")


@pytest.fixture(autouse=True)
def _no_config_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLXRUN_")]:
        monkeypatch.delenv(name)
