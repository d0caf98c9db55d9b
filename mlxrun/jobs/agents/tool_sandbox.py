"""The arguments of bubblewrap, for programs of a model and for the tools that it calls."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import mlxrun
from mlxrun.core.errors import RequestError

BUBBLEWRAP = "bwrap"


def build_bubblewrap(files: Iterable[str] = (), variables: Sequence[tuple[str, str]] = ()) -> list[str]:
    """Build the command that runs a command in bubblewrap. It has no network and a `/tmp` of its own, and
    sees the files of Python, which it cannot change. `files`: further paths that it may read; `variables`:
    its environment besides PATH."""
    python = [["--ro-bind", path, path] for path in sorted({sys.prefix, sys.base_prefix})]
    system = [["--ro-bind-try", path, path] for path in ("/usr", "/bin", "/lib", "/lib64")]
    more = [["--ro-bind", path, path] for path in files]
    given = [
        ["--setenv", *each] for each in (("PATH", "/usr/bin:/bin"), ("OPENBLAS_NUM_THREADS", "1"), *variables)
    ]
    return [
        *(
            BUBBLEWRAP,
            "--unshare-all",
            "--die-with-parent",
            "--new-session",
            "--cap-drop",
            "ALL",
            "--clearenv",
        ),
        *(word for words in given for word in words),
        *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
        *(word for words in system + python + more for word in words),
        *("--chdir", "/tmp"),
    ]


def build_sandbox(folder: Path, files: Sequence[str], wanted: bool | tuple[str, ...]) -> list[str]:
    """Build the sandbox of tools. `files`: those of the tools, in `folder`; `wanted`: `agent.sandbox`.
    RequestError without bubblewrap, or without a file."""
    if shutil.which(BUBBLEWRAP) is None:
        raise RequestError(
            "agent.sandbox: tools run in bubblewrap, which was not found (Linux: apt install bubblewrap)",
            param="agent",
        )
    paths = [folder / name for name in (*files, *(wanted if isinstance(wanted, tuple) else ()))]
    missing = next((path for path in paths if not path.exists()), None)
    if missing is not None:
        raise RequestError(f"agent.sandbox: {missing}: there is no such file or folder", param="agent")
    package = Path(mlxrun.__file__).parent
    variables = [("PYTHONPATH", str(package.parent))]
    return build_bubblewrap([str(package), *map(str, paths)], variables)
