"""`mlxrun fit`: the table, the verdict, the exit code, the config that it writes, and models of the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxrun.cli.main import main
from mlxrun.core.byte_sizes import format_rounded
from tests.cli.commands.models.test_pull import ID, Run, hub, run  # noqa: F401  fixtures
from tests.helpers.fake_hub import FakeHub
from tests.helpers.model_fixtures import Zoo


def fit(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["fit", *args])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_table_has_the_sizes_and_a_sentence(zoo: Zoo, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(zoo.text("llama"))
    code, text, _ = fit(capsys, path, "--rows", "2", "--tokens", "1000", "--memory", "1GB")
    assert code == 0 and f"{path}: fits: 2 rows of 1,000 tokens at a time; " in text.replace("\n", "")
    code, out, _ = fit(capsys, path, "--rows", "2", "--tokens", "1000", "--memory", "1GB", "--json")
    (found,) = json.loads(out)["models"]
    assert found["model"] == path and found["fits"] and found["limit"] == int(800_000_000 * 0.95)
    shown = [
        format_rounded(found[key]) for key in ("files", "weights", "load", "rows_bytes", "run", "needed")
    ]
    assert all(size in text for size in shown)


def test_the_exit_code_is_that_of_the_worst(zoo: Zoo, capsys: pytest.CaptureFixture[str]) -> None:
    small, other = str(zoo.text("llama")), str(zoo.text("gemma3_text"))
    assert fit(capsys, small, other, "--memory", "1GB")[0] == 0
    code, out, _ = fit(capsys, small, other, "--memory", "100kB")
    assert code == 1 and out.count("does not fit: ") == 2


def test_the_written_config_fits(zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, file = str(zoo.text("llama")), str(tmp_path / "mlxrun.yaml")
    wanted = ("--rows", "64", "--tokens", "4000", "--memory", "60MB", "--write", file)
    assert fit(capsys, path, *wanted)[0] == 1, "as many rows as that do not fit"
    assert main(["config", "check", file]) == 0
    code, out, _ = fit(capsys, "-c", file, "--json")
    (found,) = json.loads(out[out.index("{") :])["models"]
    assert code == 0 and found["tokens"] == 4000 and 1 <= found["rows"] < 64
    assert f"max_running: {found['rows']}" in Path(file).read_text()
    code, _, err = fit(capsys, path, *wanted)
    assert code == 2 and "exists already" in err
    assert fit(capsys, path, *wanted, "--force")[0] == 1


def test_what_cannot_be_written_is_said(zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mlxrun.yaml"
    code, _, err = fit(capsys, str(zoo.text("llama")), "--memory", "100kB", "--write", str(file))
    assert code == 2 and "no config fits" in err and not file.exists()
    assert fit(capsys, "a", "b", "--write", str(file))[0] == 2
    code, _, err = fit(capsys, str(zoo.text("llama")), "--memory", "much")
    assert code == 2 and "--memory: 'much' is not a byte size" in err


@pytest.mark.slow
def test_a_model_of_the_hub_is_judged_without_its_weights(run: Run, hub: FakeHub) -> None:  # noqa: F811
    hub.requests.clear()
    done = run("fit", "tiny-chat-4bit", "--rows", "2", "--tokens", "500", "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["models"]
    there = run("fit", "embedded", "--rows", "2", "--tokens", "500", "--json")
    (same,) = json.loads(there.stdout)["models"]
    sizes = ("weights", "load", "run", "token", "needed", "rows_bytes")
    assert found["model"] == ID and {k: found[k] for k in sizes} == {k: same[k] for k in sizes}
    assert not any("safetensors" in Path(name).name for name in run("list", "--json").stdout.split())
    offline = run("fit", "tiny-chat-8bit", offline=True)
    assert offline.returncode == 3 and "the hub cannot be reached" in offline.stderr
