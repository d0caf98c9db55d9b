"""How transformers finds the names of its models: as the library does, but once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from transformers.utils import import_utils

from mlxrun.model.machine import transformers_scan
from mlxrun.model.machine.transformers_scan import shorten_scan

MODELS = Path(transformers.__file__).parent / "models"


@pytest.fixture(scope="module")
def untouched() -> Any:
    """The library's module as it is without mlxrun."""
    spec = importlib.util.spec_from_file_location("transformers.utils.untouched", import_utils.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def count_searched_files(module: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many files the two imports search that transformers makes of the same folder."""
    searched = []
    fetch = module.fetch__all__
    monkeypatch.setattr(module, "fetch__all__", lambda content: searched.append(1) or fetch(content))
    module.define_import_structure.cache_clear()
    module.create_import_structure_from_path.cache_clear()
    module.define_import_structure(MODELS, prefix="models")
    module.define_import_structure(str(MODELS / "__init__.py"))
    return len(searched)


def test_the_same_names_are_found_once(untouched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has the short scan, as mlxrun.model was imported before transformers."""
    assert import_utils.fetch__all__.__module__ == transformers_scan.__name__
    once, twice = (count_searched_files(each, monkeypatch) for each in (import_utils, untouched))
    assert once > 1000 and twice == 2 * once
    for arguments in ((MODELS, "models"), (str(MODELS / "__init__.py"),)):
        found = import_utils.define_import_structure(*arguments)
        assert found == untouched.define_import_structure(*arguments)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "a = 1\n",
        "__all__ = ['A', \"B\"]",
        "a = 1\n__all__ = ['A']\n__all__ = [\n    'B',\n    'C',\n]\nb = 1\n",
        "print('__all__')\n",
        "if a:\n    __all__ = ['A']\n",
        "a = 1\n\x0c__all__ = ['A']\n",
        "a = 1\n__all__ = ['A']\n\x0c__all__ = ['B']\n",
    ],
)
def test_the_names_of_a_file(untouched: Any, content: str) -> None:
    assert import_utils.fetch__all__(content) == untouched.fetch__all__(content)


def test_another_version_stays_as_it_is() -> None:
    module = SimpleNamespace(fetch__all__=len)
    shorten_scan(module)
    assert module == SimpleNamespace(fetch__all__=len)
