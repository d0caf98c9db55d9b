"""What front ends need of a model: the loaded model and the tests' own have all of it."""

from __future__ import annotations

import inspect

import pytest

from mlxrun.api.text.model_info import ModelInfo
from mlxrun.config.settings import ModelSettings
from mlxrun.model.load.model_info import load_model_info
from tests.helpers.tokenizers import FakeModelInfo

NAMES = [name for name, _ in inspect.getmembers(ModelInfo) if not name.startswith("_")]


@pytest.mark.parametrize("name", NAMES)
def test_every_attribute_is_there(name: str) -> None:
    assert hasattr(load_model_info(ModelSettings()), name) and hasattr(FakeModelInfo(), name)


def test_the_attributes_are_documented() -> None:
    assert len(NAMES) > 8
    assert all(inspect.getdoc(getattr(ModelInfo, name)) for name in NAMES)
