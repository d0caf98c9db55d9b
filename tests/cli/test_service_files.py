"""The files of services, as systemd and launchd read them."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import pytest

from mlxrun.cli.main import main
from mlxrun.cli.service_files import Service, find_program, make_path, make_service_file
from tests.helpers.command_processes import run_program


def test_the_path_of_a_service_is_not_that_of_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the system's folders, and before them the compiler's where that is in another one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setenv("XDG_SESSION_ID", "7")
    system = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    for folder, wanted in (("", system), ("conda", f"{tmp_path}/conda:{system}")):
        if folder:
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "g++").write_text("#!/bin/sh\n")
            (tmp_path / folder / "g++").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:{tmp_path}/{folder or 'none'}")
        assert main(["service", "install", "--print"]) == 0
        unit = capsys.readouterr().out
        assert f'Environment="PATH={wanted}"\n' in unit and "SESSION_ID" not in unit
        (start,) = (line for line in unit.splitlines() if line.startswith("ExecStart="))
        assert Path(start.partition('"')[2].partition('"')[0]).is_absolute()
    assert make_path("/usr/bin/g++") == system


def test_the_program_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no script of that name was installed beside Python."""
    monkeypatch.setattr("pathlib.Path.exists", lambda self: False)
    monkeypatch.setattr("sys.argv", ["pytest"])
    shown = run_program([*find_program(), "--version"], check=True)
    assert shown.stdout.startswith("mlxrun, version")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="has no systemd")
def test_systemd_reads_the_file(tmp_path: Path) -> None:
    """Its own checker finds nothing wrong in odd paths, and finds what is."""
    odd = tmp_path / "a %h $A 'b'"
    odd.mkdir()
    program = shutil.which("true") or "/bin/true"
    service = Service("odd", [program, "-c", "%n $B"], odd, 60, {"A": '"quoted" \\ %%'})
    file = make_service_file(service, "Linux", tmp_path, 0)
    path = tmp_path / file.path.name
    path.write_bytes(file.content)
    assert verify(path) == ""
    path.write_bytes(file.content.replace(b"ExecStart=", b"ExecStrt="))
    assert "ExecStrt" in verify(path)


def test_a_service_may_have_odd_paths_and_variables() -> None:
    """A path that is no text, and a variable of two lines, which would be two lines of the file."""
    service = Service("odd", ["/bin/mlxrun", "-c", "/caf\udce9.yaml"], Path("/"), 60, {"A": "1\nB=2"})
    content = make_service_file(service, "Linux", Path("/home/me"), 0).content
    assert b'"/caf\xe9.yaml"' in content and b'\nEnvironment="A=1\\nB=2"\n' in content


def verify(path: Path) -> str:
    command = ["systemd-analyze", "verify", "--user", str(path)]
    environ = {"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(path.parent), "HOME": str(path.parent)}
    done = run_program(command, env=environ)
    return "\n".join(line for line in done.stderr.splitlines() if path.name in line)
