"""`mlxrun doctor`: findings about libraries, the machine and the model, and the exit code they lead to."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlxrun.bench.models import PRESETS, write_model
from mlxrun.cli.doctor import command
from mlxrun.model import doctor
from mlxrun.model.chunk_grouping import PrefillSharing
from mlxrun.model.compute_methods import ComputeMethods
from mlxrun.model.machine import blas, versions
from mlxrun.model.machine.versions import check_versions, read_requirements
from mlxrun.model.model_files import EMBEDDED
from mlxrun.model.probe import ProbeCheck, ProbeReport


@pytest.fixture(autouse=True)
def no_config_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLXRUN_CONFIG", raising=False)
    monkeypatch.setattr(doctor, "MATMUL_SIZE", 32)
    monkeypatch.setattr(doctor, "MATMUL_SECONDS", 0.0)


def test_the_tested_ranges_are_the_packages_own_dependencies() -> None:
    names = {finding.name for finding in check_versions(read_requirements())}
    assert {"mlx", "mlx-lm", "mlx-vlm", "transformers"} <= names
    assert "pytest" not in names


@pytest.mark.parametrize(
    ("version", "level"),
    [("0.32.4", "ok"), ("0.32.9", "ok"), ("0.33.0", "off"), ("0.31.0", "off"), (None, "off")],
)
def test_a_version_outside_the_tested_range_is_off(
    version: str | None, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that moved is found by name, with the range that works."""
    monkeypatch.setattr(versions, "find_version", lambda name: version)
    (finding,) = check_versions(["mlx-lm>=0.32.2,<0.33"])
    assert finding.level == level
    assert finding.facts == {"installed": version, "tested": "<0.33,>=0.32.2"}
    assert ("pip install" in finding.advice) == (level == "off")


def test_requirements_of_other_platforms_and_extras_do_not_count() -> None:
    lines = ["click; platform_system == 'Nowhere'", "click; extra == 'dev'"]
    assert check_versions(lines) == []


def test_the_reference_blas_is_noted_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    slow, fast = doctor.check_blas(None, 7.5), doctor.check_blas("/lib/libopenblas.so.0", 240.0)
    assert slow.level == "note" and "libopenblas0-pthread" in slow.advice and "8 GFLOP/s" in slow.value
    assert fast.level == "ok" and not fast.advice and fast.facts["gflops"] == 240.0
    monkeypatch.setattr(sys, "platform", "darwin")
    assert doctor.check_blas(None, 900.0).level == "ok"


def test_openblas_is_loaded_before_mlx_and_never_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing the model package loads a library and nothing else."""
    code = (
        "import sys; import mlxrun.model; from mlxrun.model.machine.blas import load_blas, find_loaded_blas\n"
        "assert 'mlx.core' not in sys.modules; before = find_loaded_blas(); import mlx.core\n"
        "assert load_blas() is None; assert find_loaded_blas() == before; print(before is not None)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    monkeypatch.delitem(sys.modules, "mlx.core")
    assert out.stdout.strip() == str(blas.load_blas() is not None)


def test_a_copy_that_belongs_to_another_package_is_not_taken_for_openblas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = "7f0000-7f1000 r-xp 00000000 08:01 12   {}\n"
    maps = tmp_path / "maps"
    monkeypatch.setattr(blas, "Path", lambda _: maps)
    maps.write_text(row.format("/venv/numpy.libs/libscipy_openblas64_-ff.so") + row.format("/lib/libc.so.6"))
    assert blas.find_loaded_blas() is None
    maps.write_text(row.format("/usr/lib/openblas-pthread/libopenblasp-r0.3.so"))
    assert blas.find_loaded_blas() == "/usr/lib/openblas-pthread/libopenblasp-r0.3.so"


def test_the_parity_table_says_what_passed_and_what_is_used() -> None:
    """What fails the probe is not used, and doctor says so."""
    checks = (
        ProbeCheck("decode ragged", False, error="TypeError: no array offset"),
        ProbeCheck("decode grouped", True, 1.5e-6),
        ProbeCheck("prefill padded", False, 5.5),
    )
    found = list(doctor.report_probe(ProbeReport(ComputeMethods("grouped", PrefillSharing(8, 0)), checks)))
    assert [f.level for f in found] == ["note", "ok", "note", "ok"]
    assert "TypeError" in found[0].value and "1.5e-06" in found[1].value and "not used" in found[2].advice
    assert found[-1].facts == {"decode": "grouped", "prefill_rows": 8, "padded": 0}
    (alone,) = doctor.report_probe(ProbeReport(ComputeMethods("row_by_row"), ()))
    assert alone.level == "note" and "one by one" in alone.advice


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
    """The full probe of a model with random weights, for which all methods agree."""
    folder = tmp_path / "model"
    folder.mkdir()
    small = PRESETS["tiny"] | {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "head_dim": 8,
    }
    write_model(folder, small, seed=1)
    args = ["--json", "--set", f"model.path={folder}", "--set", "engine.probe=false"]
    result = CliRunner().invoke(command, args, catch_exceptions=False, standalone_mode=False)
    findings = {f["name"]: f for f in json.loads(result.stdout)["findings"]}
    assert findings[str(folder)]["facts"]["type"] == "qwen3"
    assert findings["decode ragged"]["facts"]["passed"] is True
    assert findings["in use"]["facts"]["decode"] == "ragged"


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
