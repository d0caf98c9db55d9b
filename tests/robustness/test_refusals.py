"""What cannot go well is refused before anything runs: damaged weights, little memory, odd outputs, bombs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxrun.config.loading import load_config
from mlxrun.config.settings import Config, ModelSettings
from mlxrun.core.errors import ConfigError, JobError, ModelLoadError
from mlxrun.engine.build import build_engine
from mlxrun.jobs.records.run_paths import JobPaths
from mlxrun.model.load.model_info import load_model_info
from tests.helpers.model_fixtures import Zoo


@pytest.fixture
def model(zoo: Zoo, tmp_path: Path) -> Path:
    return Path(shutil.copytree(zoo.text("llama"), tmp_path / "model"))


def _remove(file: Path) -> None:
    """As the library has it for a Qwen: without the file it makes a tokenizer that knows special tokens."""
    file.unlink()
    settings = file.with_name("tokenizer_config.json")
    given = json.loads(settings.read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}
    settings.write_text(json.dumps(given))
    config = file.with_name("config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "qwen2"}))


def _empty(file: Path) -> None:
    """Special tokens alone."""
    given = json.loads(file.read_text())
    given["model"] = {"type": "BPE", "vocab": {}, "merges": []}
    file.write_text(json.dumps(given))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_remove, r"no tokenizer file in .*model \(tokenizer\.json, "),
        (_empty, r"model: tokenizer\.json is damaged: the tokenizer has no tokens but special ones"),
        (lambda file: file.write_text("{}"), r"tokenizer\.json: the file is damaged"),
        (lambda file: file.write_text("[]"), r"tokenizer\.json: the file is damaged"),
        (
            lambda file: file.write_text('{"added_tokens": [], "model": {}}'),
            r"tokenizer\.json: the file is d",
        ),
        (lambda file: file.write_bytes(b"\xff{"), r"tokenizer\.json: the file is damaged"),
    ],
    ids=["none", "empty", "{}", "[]", "no model", "no text"],
)
def test_a_tokenizer_that_is_none(model: Path, harm: Callable[[Path], object], said: str) -> None:
    """No model that reads nothing and answers nothing; the error names folder and file. The twin: the
    folder as it was loads."""
    settings = ModelSettings(path=str(model))
    assert load_model_info(settings).tokenizer.encode("a b", add_special_tokens=False)
    harm(model / "tokenizer.json")
    with pytest.raises(ModelLoadError, match=said):
        load_model_info(settings)


@pytest.mark.parametrize("kind", ["text", "vision"])
def test_a_folder_without_weights(zoo: Zoo, tmp_path: Path, kind: str) -> None:
    """In a line of our own, for a library's page of advice."""
    path = zoo.text("llama") if kind == "text" else zoo.vision("qwen3_vl")
    folder = shutil.copytree(path, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ModelLoadError) as found:
        build_engine(Config(model=ModelSettings(path=str(folder))))
    assert str(found.value) == f"no *.safetensors in {folder}: the model has no weights"


def test_an_output_that_is_no_regular_file(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="not a regular file"):
        JobPaths(tmp_path / "j.jsonl", Path("/dev/null"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: " + "[" * 5000, "nested too deeply"),
        (
            "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)),
            "too many values",
        ),
    ],
)
def test_yaml_that_is_an_attack(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_config(file, (), {})
