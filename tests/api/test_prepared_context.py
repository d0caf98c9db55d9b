"""A broken chat template is refused when a model is loaded, not at the first request."""

from __future__ import annotations

import re
import shutil
from importlib.resources import files
from pathlib import Path

import pytest

from mlxrun.api.prepared import ApiContext
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.config.settings import (
    Config,
    ModelSettings,
)
from mlxrun.core.errors import ModelLoadError
from mlxrun.jobs.run.line_answerer import LinePreparer
from mlxrun.model.load.model_info import load_model_info
from tests.helpers.tokenizers import (
    FakeModelInfo,
)


def spoiled(folder: Path, name: str, text: str) -> Path:
    """The embedded model with one file of another content."""
    shutil.copytree(str(files("mlxrun.model.embedded") / "model"), folder)
    (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chat_template.jinja", "{% if x %}\n{{ y }"),
        ("chat_template.json", '{"chat_template": "{% for %}"}'),
    ],
)
def test_a_broken_template_in_the_model_s_folder(tmp_path: Path, name: str, text: str) -> None:
    """The error names the file and the line, for the server's context and for a job's. Its twin is whole."""
    folder = spoiled(tmp_path / "model", name, text)
    config = Config(model=ModelSettings(path=str(folder)))
    model_info = load_model_info(config.model)
    said = rf"^{re.escape(str(folder / name))}: the chat template is broken: line \d+: "
    with pytest.raises(ModelLoadError, match=said):
        ApiContext(model_info, config, MediaLoader(config.media, None))
    with pytest.raises(ModelLoadError, match=said):
        LinePreparer(model_info, config, None)
    whole = load_model_info(ModelSettings())
    assert ApiContext(whole, Config(), MediaLoader(Config().media, None)).model_info is whole


def test_a_broken_template_of_the_config() -> None:
    """It is the config's file that is named; a model from elsewhere has at least its name."""
    model_info = FakeModelInfo(chat_template="{{ x", name="org/m")
    loader = MediaLoader(Config().media, None)
    with pytest.raises(ModelLoadError, match=r"^my\.jinja: the chat template is broken"):
        ApiContext(model_info, Config(model=ModelSettings(chat_template="my.jinja")), loader)
    with pytest.raises(ModelLoadError, match="^the model org/m: the chat template is broken"):
        ApiContext(model_info, Config(), loader)
    assert ApiContext(FakeModelInfo(chat_template=None), Config(), loader)
