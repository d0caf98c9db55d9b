"""What a model may be called: the configured names, its own, and its path."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxrun.api.text.model_info import choose_adapter, list_accepted_names
from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import NotFound
from mlxrun.model.load.model_files import EMBEDDED
from mlxrun.model.load.model_info import LoadedModelInfo, load_model_info


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("models") / "tiny-9b"
    made.mkdir()
    for file in EMBEDDED.iterdir():
        (made / file.name).symlink_to(file)
    return made


def host(path: Path | str, *names: str) -> LoadedModelInfo:
    return load_model_info(ModelSettings(path=str(path), names=names))


def test_names_do_not_hide_the_models_own(folder: Path) -> None:
    """The first name answers; the folder's name is listed last, and its path is taken but not listed."""
    found = host(folder, "foo", "bar")
    assert (found.name, found.names) == ("foo", ("foo", "bar", "tiny-9b"))
    for name in ("foo", "bar", "tiny-9b", str(folder), None):
        choose_adapter(name, found)
    for name in ("baz", folder.parent.name, "embedded"):
        with pytest.raises(NotFound, match="is not served here; the names are foo, bar, tiny-9b$"):
            choose_adapter(name, found)


def test_the_name_that_was_meant_is_said(folder: Path) -> None:
    for name in ("FOO", "foo2"):
        with pytest.raises(NotFound, match=r"is not served here \(did you mean 'foo'\?\); the names are"):
            choose_adapter(name, host(folder, "foo"))


def test_without_names_any_will_do(folder: Path) -> None:
    found = host(folder)
    assert (found.name, found.names) == ("tiny-9b", ())
    choose_adapter("gpt-4o", found)


def test_the_built_in_model_is_called_embedded() -> None:
    found = host("embedded", "foo")
    assert (found.name, found.names) == ("foo", ("foo", "embedded"))
    choose_adapter("embedded", found)


def test_an_empty_name_is_none_and_adapters_have_all_names_of_their_model() -> None:
    """So too at the front of several models, which knows the list only."""
    adapter = SimpleNamespace(name="sql")
    model: Any = SimpleNamespace(
        name="gpt-4o", names=("gpt-4o", "smol"), aliases=("../smol",), adapters=[adapter]
    )
    assert choose_adapter("", model) is None
    for name in ("sql", "gpt-4o:sql", "smol:sql", "../smol:sql"):
        assert choose_adapter(name, model) is adapter and name in list_accepted_names(model)
    for name in ("gpt-4o", "smol", "../smol"):
        assert choose_adapter(name, model) is None and name in list_accepted_names(model)
