"""`mlxrun doctor`: findings about libraries, the machine and the model, and the exit code they lead to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner

from benchmarks.tiny.random_models import write_text_model
from mlxrun.cli.bench.models import PRESETS, write_model
from mlxrun.cli.commands.doctor import command
from mlxrun.cli.main import main
from mlxrun.model import doctor
from mlxrun.model.load.model_files import EMBEDDED
from mlxrun.model.machine import versions
from mlxrun.model.pooling import encoders
from tests.helpers.pooling_models import build_pooling_model


@pytest.fixture(autouse=True)
def no_config_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLXRUN_CONFIG", raising=False)
    monkeypatch.setattr(doctor, "MATMUL_SIZE", 32)
    monkeypatch.setattr(doctor, "MATMUL_SECONDS", 0.0)


def test_json_has_every_finding_and_the_verdict() -> None:
    result = CliRunner().invoke(
        command, ["--json", "--no-model"], catch_exceptions=False, standalone_mode=False
    )
    report = json.loads(result.stdout)
    assert report["format"] == 1 and report["ok"] is (result.return_value == 0)
    by_name = {row["name"]: row for row in report["findings"]}
    assert {"mlx", "backend", "memory"} <= set(by_name)
    assert set(by_name["backend"]) == {"area", "name", "level", "value", "advice", "facts"}
    assert by_name["backend"]["facts"]["backend"] in {"cpu", "metal", "cuda"}
    assert by_name["memory"]["facts"]["total"] > 0


def test_something_off_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "read_requirements", lambda: ["mlx-lm<0.1"])
    result = CliRunner().invoke(command, ["--no-model"], catch_exceptions=False, standalone_mode=False)
    assert result.return_value == 1
    assert "off" in result.stdout and "pip install 'mlx-lm<0.1'" in result.stdout


def test_a_model_is_loaded_and_probed(tmp_path: Path) -> None:
    """The full load check of a model with random weights, for which all methods agree."""
    folder = tmp_path / "model"
    folder.mkdir()
    small = PRESETS["tiny"] | {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "head_dim": 8,
    }
    write_model(folder, small, seed=1)
    args = ["--json", "--set", f"model.path={folder}", "--set", "engine.load_check=false"]
    result = CliRunner().invoke(command, args, catch_exceptions=False, standalone_mode=False)
    findings = {f["name"]: f for f in json.loads(result.stdout)["findings"]}
    assert findings[str(folder)]["facts"]["type"] == "qwen3"
    assert findings["decode ragged"]["facts"]["passed"] is True
    assert findings["in use"]["facts"]["decode"] == "ragged"


def test_the_checks_of_an_encoder_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no load check. Where texts differ in company, that is a note, and what is done instead."""
    args = ["--json", "--set", f"model.path={build_pooling_model('bert', tmp_path / 'model')}"]

    def find() -> dict[str, Any]:
        result = CliRunner().invoke(command, args, catch_exceptions=False, standalone_mode=False)
        return {f["name"]: f for f in json.loads(result.stdout)["findings"] if f["area"] == "vectors"}

    findings = find()
    assert [f["level"] for f in findings.values()] == ["ok"] * 3
    assert findings["in use"]["facts"] == {"max_rows": 256, "max_tokens": 40}
    unmasked = lambda lengths, size: mx.zeros((len(lengths), 1, 1, size))  # noqa: E731
    monkeypatch.setattr(encoders, "make_padding_mask", unmasked)
    monkeypatch.setattr(encoders, "group_lengths", lambda lengths: [list(lengths)])  # with padding
    findings = find()
    assert findings["texts together"]["level"] == "note" and findings["in use"]["facts"]["max_rows"] == 1


def test_a_model_that_cannot_be_loaded_is_off_and_the_rest_is_shown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    result = CliRunner().invoke(
        command,
        ["--json", "--set", f"model.path={tmp_path}"],
        catch_exceptions=False,
        standalone_mode=False,
    )
    assert result.return_value == 1
    findings = json.loads(result.stdout)["findings"]
    assert findings[-1]["level"] == "off" and findings[-1]["area"] == "model"
    assert any(f["name"] == "backend" for f in findings)


def test_a_folder_that_is_no_model_is_a_mistake_in_the_config(tmp_path: Path) -> None:
    """As in every command, and as the help says."""
    assert main(["doctor", "--set", f"model.path={tmp_path}"]) == 2
    said = " ".join((command.help or "").split())
    assert "mistake in the config, such as a model.path that is not the folder of a model" in said
    assert "exit code 2" in said


def test_a_broken_template_is_off(tmp_path: Path) -> None:
    """It is an error for jobs and servers too."""
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED, folder)
    (folder / "chat_template.jinja").write_text("a\n{% for m in messages %}{% endfr %}")
    args = ["--json", "--set", f"model.path={folder}"]
    result = CliRunner().invoke(command, args, catch_exceptions=False, standalone_mode=False)
    assert result.return_value == 1
    (found,) = [f for f in json.loads(result.stdout)["findings"] if f["area"] == "model"]
    assert found["level"] == "off"
    assert "chat_template.jinja: the chat template is broken: line 2: " in found["value"]


def find_rows(*sets: str) -> dict[str, Any]:
    args = ["--json", *(each for given in sets for each in ("--set", given))]
    result = CliRunner().invoke(command, args, catch_exceptions=False, standalone_mode=False)
    return {f["area"]: f for f in json.loads(result.stdout)["findings"]}


@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="has pages")
def test_what_drafts_is_shown_and_a_bad_setting_is_named() -> None:
    """The last row of an area; without speculation there is none."""
    found = find_rows("model.path=embedded", "speculation.method=auto")["speculation"]
    assert (found["level"], found["facts"]["method"]) == ("note", "off")
    assert found["value"].startswith("off: drafts need decoding by pages, which is for GPUs")
    found = find_rows("model.path=embedded", "speculation.method=ngram")["model"]
    assert (found["name"], found["level"]) == ("speculation.method", "off")
    assert found["advice"] == "see speculation.method in the config"


def test_who_drafts_is_shown() -> None:
    facts = {"method": "draft+ngram", "configured": "auto", "problem": None, "steps": 3}
    assert doctor.report_drafts(facts).value == "draft+ngram"


@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="GPUs gather in bfloat16")
def test_a_dtype_that_the_library_cannot_compute_is_named(tmp_path: Path) -> None:
    """On CPUs MLX multiplies gathered experts in float32 only."""
    write_text_model("gpt_oss", tmp_path / "model")
    found = find_rows(f"model.path={tmp_path / 'model'}", "model.dtype=bfloat16")["model"]
    assert found["level"] == "off" and "another model.dtype" in found["value"]
    assert "the library cannot compute this model here (" in found["value"]
    assert "only supports float32" in found["value"]
