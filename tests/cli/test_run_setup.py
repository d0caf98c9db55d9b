"""The model of a run is loaded with the config in its manifest, from where it is now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxrun.cli import run_setup
from mlxrun.cli.main import main
from mlxrun.core.errors import JobError
from mlxrun.evals.run_folders.run_folder import RunFolder
from tests.helpers.batch_fakes import chats, write_job
from tests.helpers.tokenizers import FakeModelInfo


def open_run(folder: Path) -> RunFolder:
    job = write_job(folder, chats(3))
    assert main(["batch", str(job), "--set", "sampling.temperature=0.5"]) == 0
    return RunFolder.open(job)


def test_the_recorded_config_is_used(
    tmp_path: Path, fake_engine: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a config file in the working directory nor a variable is read."""
    run = open_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlxrun.yaml").write_text("sampling: {temperature: 0.9}\n")
    monkeypatch.setenv("MLXRUN_SAMPLING__TOP_P", "0.1")
    setup = run_setup.make_run_setup(run, None, None, lambda config: config)
    assert (setup.config.sampling.temperature, setup.config.sampling.top_p) == (0.5, None)
    assert setup.config_hash == run.manifest["config_hash"]
    assert setup.preparer.folder == tmp_path
    moved = run_setup.make_run_setup(run, "/models/elsewhere", None, lambda config: config)
    assert moved.config.model.path == "/models/elsewhere"  # the files have the recorded digests


def test_another_model_is_refused(
    tmp_path: Path, fake_engine: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(tmp_path)
    other = FakeModelInfo(digests={"model": "x", "tokenizer": "y", "template": "z"}, vision=True)
    monkeypatch.setattr("mlxrun.model.load.model_info.load_model_info", lambda settings, **_: other)
    with pytest.raises(JobError, match="its lines cannot be run again here: model.path is embedded, was the"):
        run_setup.make_run_setup(run, None, None, lambda config: config)


def test_what_differs_is_printed(
    tmp_path: Path, fake_engine: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = open_run(tmp_path)
    capsys.readouterr()
    assert run_setup.report_machine(run) == []
    assert "versions, device and BLAS are those of the run" in capsys.readouterr().out
    manifest = json.loads(json.dumps(run.manifest))
    manifest["runs"][0]["versions"]["mlx"] = "0.1"
    assert run_setup.report_machine(RunFolder(run.paths, manifest, "x"))[0].endswith("was 0.1")
    out = capsys.readouterr().out
    assert out.startswith("x: differs here: mlx is ")
    assert out.endswith("x: bytes may therefore differ, first in the last digits of logprobs\n")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("blas_threads", 99, "the number of BLAS threads (engine.blas_threads) is "),
        ("backend", "abacus", "the backend is "),
        ("name", "another chip", "the device is "),
        ("blas_kernel", "Pentium", "the BLAS kernel (OPENBLAS_CORETYPE) is "),
        ("compile", "perhaps", "compiling (MLX_DISABLE_COMPILE, or g++ on a CPU) is "),
    ],
)
def test_why_bytes_may_differ_is_printed_before_lines_are_counted(
    tmp_path: Path,
    fake_engine: list[Any],
    capsys: pytest.CaptureFixture[str],
    key: str,
    value: Any,
    says: str,
) -> None:
    """By `verify` and by `replay`."""
    from mlxrun.model.machine.device import describe_device

    run = open_run(tmp_path)
    manifest = json.loads(run.paths.manifest.read_text())
    if key not in describe_device():
        pytest.skip(f"this machine has no {key}")
    manifest["runs"][0]["device"][key] = value
    run.paths.manifest.write_text(json.dumps(manifest))
    for command in ("verify", "replay"):
        capsys.readouterr()
        assert main([command, str(run.paths.job)]) == 0
        lines = capsys.readouterr().out.splitlines()
        found = next(number for number, line in enumerate(lines) if says in line)
        assert lines[found].endswith(f", was {value}")
        assert "bytes may therefore differ" in lines[found + 1]
        assert any(" equal" in line for line in lines[found + 2 :])


def test_the_threads_of_a_reproducible_run_are_its_own(
    tmp_path: Path, fake_engine: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Not those that this process has just now."""
    job = write_job(tmp_path, chats(3))
    flags = ("--set", "engine.reproducible=true", "--set", "engine.blas_threads=7")
    assert main(["batch", str(job), *flags]) == 0
    run = RunFolder.open(job)
    assert run.manifest["device"].get("blas_threads", 7) == 7
    capsys.readouterr()
    assert run_setup.report_machine(run) == []
