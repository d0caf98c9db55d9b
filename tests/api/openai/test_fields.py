"""What is refused is in docs/clients.md, field by field: B23. A broken template is refused when a model is
loaded, not at the first request: A50."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import pytest

from mlxrun.api.anthropic import fields as anthropic_fields
from mlxrun.api.context import ApiContext
from mlxrun.api.openai import fields as openai_fields
from mlxrun.api.responses import fields as responses_fields
from mlxrun.batch.line_answerer import LinePreparer
from mlxrun.config.settings import Config, ModelSettings
from mlxrun.errors import ModelLoadError
from mlxrun.model.model_info import load_model_info
from mlxrun.text.images import MediaLoader
from tests.helpers.tokenizers import FakeModelInfo

CLIENTS = Path(__file__).parents[3] / "docs" / "clients.md"


def documented() -> dict[str, dict[str, str]]:
    """The tables of the section: by their title, why each field is refused."""
    section = CLIENTS.read_text(encoding="utf-8").split("## What is refused\n")[1].split("\n## ")[0]
    tables: dict[str, dict[str, str]] = {}
    for left, right in re.findall(r"^\| (.+) \| (.+) \|$", section, re.MULTILINE):
        if right == "why":
            last = tables.setdefault(left, {})
        else:
            last |= dict.fromkeys(re.findall(r"`(\w+)`", left), right)
    return tables


def known() -> dict[str, Mapping[str, str]]:
    chat, completion = openai_fields.REFUSED["chat"], openai_fields.REFUSED["completion"]
    both = dict(chat.items() & completion.items())
    return {
        "/v1/chat/completions and /v1/completions": both,
        "/v1/chat/completions": {name: chat[name] for name in chat if name not in both},
        "/v1/completions": {name: completion[name] for name in completion if name not in both},
        "/v1/responses": responses_fields.REFUSED,
        "/v1/messages and /v1/messages/count_tokens": anthropic_fields.BODY.refused,
        "Blocks of /v1/messages": anthropic_fields.REFUSED_BLOCKS,
    }


def test_the_documents_name_what_is_refused() -> None:
    assert documented() == known()
    assert anthropic_fields.COUNT_BODY.refused == anthropic_fields.BODY.refused


def spoiled(folder: Path, name: str, text: str) -> Path:
    """The embedded model with one file of another content."""
    shutil.copytree(str(files("mlxrun.embedded") / "model"), folder)
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
    """The error names the file and the line, for the server's side and for a job's. Its twin is whole."""
    folder = spoiled(tmp_path / "model", name, text)
    config = Config(model=ModelSettings(path=str(folder)))
    host = load_model_info(config.model)
    said = rf"^{re.escape(str(folder / name))}: the chat template is broken: line \d+: "
    with pytest.raises(ModelLoadError, match=said):
        ApiContext(host, config, MediaLoader(config.media, None))
    with pytest.raises(ModelLoadError, match=said):
        LinePreparer(host, config, None)
    whole = load_model_info(ModelSettings())
    assert ApiContext(whole, Config(), MediaLoader(Config().media, None)).model_info is whole


def test_a_broken_template_of_the_config() -> None:
    """It is the config's file that is named; a model from elsewhere has at least its name."""
    host = FakeModelInfo(chat_template="{{ x", name="org/m")
    loader = MediaLoader(Config().media, None)
    with pytest.raises(ModelLoadError, match=r"^my\.jinja: the chat template is broken"):
        ApiContext(host, Config(model=ModelSettings(chat_template="my.jinja")), loader)
    with pytest.raises(ModelLoadError, match="^the model org/m: the chat template is broken"):
        ApiContext(host, Config(), loader)
    assert ApiContext(FakeModelInfo(chat_template=None), Config(), loader)
