"""Programs of a model in a sandbox: what they may do, what ends them, and which sandbox is taken."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from mlxrun.evals.tasks import code_sandbox
from mlxrun.evals.tasks.code_sandbox import IMAGE, MISSING, build_command, check_sandbox, run_program
from tests.helpers.bubblewrap import needs_bubblewrap

FAKE = f"""#!/bin/sh
echo "$@" > "$(dirname "$0")/arguments"
while [ "$1" != "{IMAGE}" ]; do shift; done
shift
exec "$@"
"""


@needs_bubblewrap
@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("x = 1\nprint(x)", None),
        ("open('/tmp/a', 'w').write('b')", None),
        ("import numpy", None),
        ("print('a' * 10**7)", None),
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("def", "SyntaxError: "),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("import os; os._exit(0)", "its process ended with exit code 0"),
        ("bytearray(10**10)", "MemoryError"),
        (f"open({str(Path(__file__).resolve())!r})", "FileNotFoundError"),
        ("import os; os.mkdir('/usr/new')", "Read-only file system"),
        ("import os; assert os.environ['HOME']", "KeyError: 'HOME'"),
        ("import socket; socket.create_connection(('127.0.0.1', 1), 5)", "refused"),
        ("import os; assert len(os.listdir('/proc')) < 100; os.kill(1, 0); open('/etc/passwd')", "No such"),
    ],
)
def test_a_program(program: str, says: str | None) -> None:
    found = run_program(program)
    assert found is None if says is None else found is not None and says in found, found


@needs_bubblewrap
@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(1000)"])
def test_a_program_that_does_not_end(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_sandbox, "SECONDS", 1)
    assert run_program(program) == "it took more than 1 s"


@needs_bubblewrap
def test_no_server_of_this_machine_is_reached() -> None:
    """The network of the sandbox is its own, even for addresses of this machine."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = run_program(f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)")
        assert found is not None and "refused" in found


def test_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no bubblewrap; here a script that runs what is behind the image's name."""
    for name, text in (("docker", FAKE), ("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name in ("timeout", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_program("x = 1") is None
    assert run_program("1 / 0") == "ZeroDivisionError: division by zero"
    given = (tmp_path / "arguments").read_text()
    assert all(each in given for each in ("--network none", "--read-only", "--cap-drop ALL", "--user 65534"))
    check_sandbox()
    (tmp_path / "docker").write_text("#!/bin/sh\necho 'Cannot connect to the daemon' >&2; exit 125\n")
    with pytest.raises(ImportError, match="cannot be used: .* exit code 125: Cannot connect to the daemon"):
        check_sandbox()
    (tmp_path / "docker").unlink()
    with pytest.raises(ImportError, match=MISSING.partition("(")[0]):
        check_sandbox()


def test_no_sandbox_is_less_strict_than_another() -> None:
    assert build_command("podman")[1:] == build_command("docker")[1:]
    assert {"--unshare-all", "--clearenv", "--die-with-parent"} <= set(build_command("bwrap"))
