"""`mlxrun service`: what systemd and launchd are asked to do, and whether the server answers."""

from __future__ import annotations

import itertools
import os
import platform
import plistlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxrun.cli.commands import service as commands
from mlxrun.cli.main import main
from mlxrun.server.running_servers import ServerNote

FAKE = (
    '#!/bin/sh\necho "$(basename $0) $*" >> {log}\n[ "$1 $2" != "--user {fails}" ] && [ "$1" != "{fails}" ]\n'
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with fakes of the system's programs, which write what they are told to `log`. Whenever somebody
    looks, another server runs."""
    make_fakes(tmp_path, "nothing")
    run_servers(monkeypatch, itertools.count())
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_servers(monkeypatch: pytest.MonkeyPatch, pids: Iterator[int], state: str = "ok") -> None:
    def list_servers(folder: Path) -> list[ServerNote]:
        return [ServerNote(next(pids), "http://127.0.0.1:9", "m", 0.0)]

    monkeypatch.setattr("mlxrun.server.running_servers.list_servers", list_servers)
    monkeypatch.setattr(commands, "read_state", lambda url, certificate: state)


def make_fakes(home: Path, fails: str) -> None:
    (home / "bin").mkdir(exist_ok=True)
    for name in ("systemctl", "launchctl"):
        (home / "bin" / name).write_text(FAKE.format(log=home / "log", fails=fails))
        (home / "bin" / name).chmod(0o755)


def read_log(home: Path) -> list[str]:
    return (home / "log").read_text().splitlines()


def test_a_service_of_systemd(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the config's whole path and the hub's variables, and no secret."""
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setenv("HF_HOME", "/a 100% $place")
    monkeypatch.setenv("HF_TOKEN", "secret")
    (place / "prod.yaml").write_text("server: {port: 9000, drain_timeout: 90}\n")
    assert main(["service", "install", "-c", "prod.yaml", "--name", "prod", "--set", "log.level=debug"]) == 0
    unit = (place / ".config/systemd/user/mlxrun-prod.service").read_text()
    assert f'"serve" "-c" "{place}/prod.yaml" "--set" "log.level=debug"\n' in unit
    assert "TimeoutStopSec=120\n" in unit and f"WorkingDirectory={place}\n" in unit
    assert 'Environment="HF_HOME=/a 100%% $place"\n' in unit and "secret" not in unit
    unit_name = "mlxrun-prod.service"
    calls = [
        f"systemctl --user {each}"
        for each in ("daemon-reload", f"enable {unit_name}", f"restart {unit_name}")
    ]
    assert read_log(place) == calls
    assert f"its log: journalctl --user -u {unit_name} -f\n" in capsys.readouterr().err
    assert main(["service", "restart", "--name", "prod"]) == 0
    assert read_log(place) == [*calls, *calls]
    assert (place / ".config/systemd/user/mlxrun-prod.service").read_text() == unit
    assert main(["service", "uninstall", "--name", "prod"]) == 0
    assert read_log(place)[-1] == f"systemctl --user disable --now {unit_name}"
    assert not list((place / ".config/systemd/user").iterdir())


def test_a_service_of_launchd(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert main(["service", "install", "embedded"]) == 0
    path = place / "Library/LaunchAgents/mlxrun.server.plist"
    found = plistlib.loads(path.read_bytes())
    assert found["ProgramArguments"][-2:] == ["serve", "embedded"]
    assert Path(found["ProgramArguments"][0]).is_absolute()
    assert found["RunAtLoad"] is True and found["KeepAlive"] == {"SuccessfulExit": False}
    assert Path(found["StandardErrorPath"]).parent.is_dir()
    domain = f"gui/{os.getuid()}"
    calls = [f"launchctl bootout {domain}/mlxrun.server", f"launchctl bootstrap {domain} {path}"]
    assert read_log(place) == calls
    assert main(["service", "restart"]) == 0
    assert read_log(place) == [*calls, *calls]


def test_a_wrong_config_is_not_installed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["service", "install", "--set", "server.prt=1"]) == 2
    assert main(["service", "install", "--name", "../a"]) == 2
    assert main(["service", "uninstall", "--name", "absent"]) == 2
    assert main(["service", "restart", "--name", "absent"]) == 2
    said = capsys.readouterr().err
    assert "server.prt: unknown key" in said and "--name ../a" in said and "there is no such service" in said
    assert not (place / "log").exists() and not (place / ".config").exists()


@pytest.mark.parametrize(
    ("config", "variable", "said"),
    [
        ("server: {api_keys: {team: '${TEAM_KEY}'}}", "TEAM_KEY", "api_keys.team: the environment variable"),
        ("model: {path: '${PLACE}'}", "PLACE", "model.path: the environment variable PLACE is not set"),
        ("", "MLXRUN_SERVER__API_KEYS__TEAM", "the config needs variables"),
    ],
    ids=["key", "other", "of mlxrun"],
)
def test_variables_that_a_service_lacks(
    config: str,
    variable: str,
    said: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The shell has them, so that only the service would fail, or have no keys."""
    (place / "mlxrun.yaml").write_text(config)
    monkeypatch.setenv(variable, "a/0123456789abcdef")
    assert main(["config", "check"]) == 0 and main(["service", "install"]) == 2
    shown = capsys.readouterr().err
    assert said in shown and "${file:/PATH}" in shown and not (place / "log").exists()
    (place / "key").write_text("sesame-0123456789abcdef")
    (place / "mlxrun.yaml").write_text(f"server: {{api_keys: {{team: '${{file:{place}/key}}'}}}}")
    monkeypatch.delenv(variable)
    assert main(["service", "install"]) == 0


@pytest.mark.parametrize(
    ("state", "code", "said"),
    [
        ("ok", 0, "it answers at http://127.0.0.1:9\n"),
        ("loading", 0, "it answers at http://127.0.0.1:9, and loads its model"),
        ("no answer", 1, "no server has answered within 0 s; its log says why: journalctl --user -u"),
        ("dead", 1, "no server has answered within 0 s; its log says why: journalctl --user -u"),
    ],
)
def test_whether_the_server_answers(
    place: Path,
    state: str,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(commands, "ANSWER_SECONDS", 0.0)
    run_servers(monkeypatch, itertools.count(), state)
    for command in ("install", "restart"):
        assert main(["service", command]) == code
        assert said in capsys.readouterr().err
    assert len(list(place.rglob("*.service"))) == 1


def test_a_server_that_ran_before_is_no_answer(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "ANSWER_SECONDS", 0.0)
    run_servers(monkeypatch, itertools.repeat(7))
    assert main(["service", "install"]) == 1


def test_a_service_is_removed_whatever_the_config_here_is(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert main(["service", "install"]) == 0
    (place / "mlxrun.yaml").write_text("server: {prt: 1}\n")
    assert main(["service", "install"]) == 2
    assert main(["service", "status"]) == 0 and main(["service", "uninstall"]) == 0
    assert not list((place / ".config/systemd/user").iterdir())


@pytest.mark.parametrize("system", ["Linux", "Darwin"])
def test_what_the_system_refuses_is_said(
    place: Path, system: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    make_fakes(place, "enable" if system == "Linux" else "bootstrap")
    assert main(["service", "install"]) == 1
    assert "failed with exit code 1" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    assert main(["service", "install"]) == 1
    assert "is not there: this system has no services of it" in capsys.readouterr().err


def test_a_missing_bus_is_said_in_words(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    (place / "bin" / "systemctl").write_text(
        "#!/bin/sh\necho 'Failed to connect to bus: No medium' >&2\nexit 1\n"
    )
    for command in ("status", "install"):
        assert main(["service", command]) == 1
        assert "systemd runs no services for this user here" in capsys.readouterr().err
    assert not list(place.rglob("*.service")), "a later login would start it"
