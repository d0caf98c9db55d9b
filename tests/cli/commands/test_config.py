"""`mlxrun config`: check, show, schema and init."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from mlxrun.cli.main import main
from mlxrun.config.loading import load_config
from mlxrun.config.settings import Config


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_check_of_a_good_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text("scheduler:\n  policy: fair\n")
    assert main(["config", "check", "a.yaml"]) == 0
    assert capsys.readouterr() == ("a.yaml: ok\n", "")


def test_check_finds_a_certificate_that_a_server_cannot_read(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text("server: {tls: {certificate: a.pem, key: b.pem}}\n")
    assert main(["config", "check", "a.yaml"]) == 2
    error = capsys.readouterr().err
    assert "server.tls: certificate: " in error and "a.pem: No such file or directory" in error


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"a": ', "not JSON: Expecting value"),
        ("[]", "not a JSON object"),
        ("[" * 200_000, "its values are nested too"),
    ],
)
def test_check_finds_a_model_whose_config_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, problem: str
) -> None:
    """As half a download leaves it."""
    folder = tmp_path / "half"
    folder.mkdir()
    (folder / "config.json").write_text(content)
    Path("a.yaml").write_text("model: {path: half}\n")
    assert main(["config", "check", "a.yaml"]) == 2
    assert f"a.yaml:1:15: model.path: {folder}/config.json: {problem}" in capsys.readouterr().err


def test_check_warns_of_weak_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("a.yaml").write_text("server: {api_keys: {a: '${A}', b: {key: '${B}', role: admin}}}\n")
    monkeypatch.setenv("A", "0123456789abcdef")
    monkeypatch.setenv("B", "hunter2")
    assert main(["config", "check", "a.yaml"]) == 0
    warning, ok = capsys.readouterr().out.splitlines()
    assert warning.startswith("a.yaml: warning: server.api_keys: the key of b is weak") and ok == "a.yaml: ok"
    assert "hunter2" not in warning


def test_check_shows_every_error_of_every_file(capsys: pytest.CaptureFixture[str]) -> None:
    """All are reported at once, with position and suggestion; exit code 2."""
    Path("a.yaml").write_text("scheduler:\n  policy: fcsf\n  chunck: 64\n")
    Path("b.yaml").write_text("log:\n  format: jsn\n")
    Path("c.yaml").write_text("")
    assert main(["config", "check", "a.yaml", "b.yaml", "c.yaml"]) == 2
    out, err = capsys.readouterr()
    assert out == "c.yaml: ok\n"
    assert err.splitlines() == [
        "mlxrun: a.yaml:2:11: scheduler.policy: 'fcsf' is not one of 'fcfs', 'priority', 'shortest', 'fair'"
        " (did you mean 'fcfs'?)",
        "mlxrun: a.yaml:3:3: scheduler.chunck: unknown key (did you mean 'chunk'?)",
        "mlxrun: b.yaml:2:11: log.format: 'jsn' is not one of 'text', 'json' (did you mean 'json'?)",
    ]


def test_check_without_a_file_takes_what_a_run_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check"]) == 0
    Path("mlxrun.yaml").write_text("log: {level: debug}\n")
    assert main(["config", "check"]) == 0
    assert capsys.readouterr().out == "built-in defaults: ok\nmlxrun.yaml: ok\n"


def test_show_names_the_origin_of_each_value(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("a.yaml").write_text("scheduler:\n  policy: fair\n")
    monkeypatch.setenv("MLXRUN_LOG__LEVEL", "debug")
    assert main(["config", "show", "-c", "a.yaml", "--set", "scheduler.chunk=64"]) == 0
    rows = dict(row.split("  # ") for row in capsys.readouterr().out.splitlines() if "  # " in row)
    origins = {key.strip(): origin for key, origin in rows.items()}
    assert origins["policy: fair"] == "a.yaml:2:11"
    assert origins["level: debug"] == "MLXRUN_LOG__LEVEL"
    assert origins["chunk: 64"] == "--set scheduler.chunk"
    assert origins["path: embedded"] == "default"


def test_what_show_prints_is_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text(
        "model:\n"
        "  revision: '1e3'\n"
        "  path: a/b\n"
        "  names: ['null', '#1', 'a: b', \"line\\nbreak\", '$${HOME}']\n"
        "  chat_template_args: {flag: true, text: 'no'}\n"
    )
    before = load_config(Path("a.yaml"))
    assert before.config.model.names == ("null", "#1", "a: b", "line\nbreak", "${HOME}")
    assert main(["config", "show", "-c", "a.yaml"]) == 0
    Path("b.yaml").write_text(capsys.readouterr().out)
    assert load_config(Path("b.yaml")).config == before.config


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--json", "--set", "log.level=error"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["log"] == {"level": "error", "format": "text", "prompts": False}
    assert found["origins"]["log.level"] == "--set log.level"
    assert found["config_hash"] == load_config(None, ["log.level=error"]).digest


def test_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["scheduler"]["additionalProperties"] is False


def test_init_writes_a_config_of_defaults_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "init"]) == 0
    text = Path("mlxrun.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=")
    schema = Path(text.splitlines()[0].partition("=")[2])
    assert json.loads(schema.read_text())["title"] == "mlxrun config"
    assert load_config(None).config == Config()
    assert main(["config", "init"]) == 2
    assert "mlxrun.yaml exists already; --force" in capsys.readouterr().err
    Path("mlxrun.yaml").write_text("")
    assert main(["config", "init", "mlxrun.yaml", "--force"]) == 0
    assert Path("mlxrun.yaml").read_text() == text


def test_init_writes_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "init", "--preset", "agents"]) == 0
    loaded = load_config(Path("mlxrun.yaml"))
    assert loaded.config.cache.backend == "disk" and loaded.config.scheduler.policy == "shortest"
    assert Path("mlxrun.yaml").read_text().startswith("# yaml-language-server: $schema=")
    assert main(["config", "init", "--preset", "agent", "b.yaml"]) == 2
    assert "(did you mean 'agents'?)" in capsys.readouterr().err and not Path("b.yaml").exists()


def test_init_into_a_missing_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "init", "nowhere/a.yaml"]) == 2
    assert capsys.readouterr().err.startswith("mlxrun: nowhere/a.yaml cannot be written: No such file")


def test_every_subcommand_of_config_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("check", "show", "schema", "init"):
        assert main(["config", name, "--help"]) == 0
        assert f"mlxrun config {name}" in capsys.readouterr().out


def test_set_values_are_yaml() -> None:
    loaded = load_config(
        None, ["media.roots=[., ../images]", "model.chat_template_args={enable_thinking: false}"]
    )
    assert loaded.config.media.roots == (".", "../images")
    assert loaded.config.model.chat_template_args == {"enable_thinking": False}
    assert yaml.safe_load("{enable_thinking: false}") == loaded.config.model.chat_template_args
