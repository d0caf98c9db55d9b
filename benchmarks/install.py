"""Measures what `pip install` of this checkout brings, and how long it takes until a first answer.

Each kind is installed into a virtual environment of its own, from a wheel of the checkout and the package
index that pip uses, without pip's cache. Then the built-in model answers a question twice, with an empty
cache folder: the first time it is compared with its library.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.server_process import start_server
from benchmarks.tables import format_figure
from mlxrun.cli.bench.report import make_console, make_table
from mlxrun.core.errors import MlxrunError

ROOT = Path(__file__).resolve().parents[1]
KINDS: Mapping[str, str] = {"text": "", "vision": "[vision]"}  # extras by the name of the kind
MESSAGE = {"role": "user", "content": "What is 12 + 30?"}
QUESTION = ("chat", "embedded", "-p", MESSAGE["content"])
TIMES = ("install_s", "install_cpu_s", "first_answer_s", "next_answer_s", "served_answer_s")


def run_install_bench(kinds: Iterable[str], say: Callable[[str], None]) -> dict[str, Any]:
    """The report of these kinds. MlxrunError with the end of what a command said if it fails."""
    found, load = {}, os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="mlxrun-install-") as name:
        folder = Path(name)
        wheel = build_wheel(ROOT, folder)
        for kind in kinds:
            say(kind)
            found[kind] = measure_install(f"{wheel}{KINDS[kind]}", folder / kind)
    return {"format": 1, "command": _show_command(found), "load": round(load, 2), "kinds": found}


def build_wheel(source: Path, folder: Path) -> Path:
    """Build the wheel of a checkout in `folder`."""
    options = ("--no-deps", "--quiet", "-w", str(folder))
    run_program([sys.executable, "-m", "pip", "wheel", *options, str(source)], folder)
    return next(folder.glob("*.whl"))


def measure_install(requirement: str, folder: Path) -> dict[str, Any]:
    """Install a requirement into a new environment at `folder`, and ask the built-in model there. `bytes`: of
    all files that came; `install_cpu_s`: of the processors; `packages`: their versions by name."""
    run_program([sys.executable, "-m", "venv", str(folder)], folder.parent)
    python = str(folder / "bin" / "python")
    size, names = count_bytes(folder), set(list_packages(python, folder))
    before = os.times()
    seconds = run_program([python, "-m", "pip", "install", "--no-cache-dir", "--quiet", requirement], folder)
    after = os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    packages = {name: text for name, text in list_packages(python, folder).items() if name not in names}
    size = count_bytes(folder) - size
    program = str(folder / "bin" / "mlxrun")
    first, later = (run_program([program, *QUESTION], folder) for _ in range(2))
    served = asyncio.run(measure_server(program, folder))
    times = {"install_s": seconds, "install_cpu_s": cpu}
    times |= {"first_answer_s": first, "next_answer_s": later, "served_answer_s": served}
    rounded = {name: round(value, 2) for name, value in times.items()}
    return {"bytes": size, **rounded, "packages": packages}


async def measure_server(program: str, folder: Path) -> float:
    """Return the seconds from `mlxrun serve` to an answer over HTTP."""
    config = folder / "mlxrun.yaml"
    config.write_text("")
    start = time.perf_counter()
    async with (
        start_server(config, folder, _make_environ(folder), (program,)) as server,
        aiohttp.ClientSession(server.url) as http,
        http.post("/v1/chat/completions", json={"messages": [MESSAGE]}) as response,
    ):
        response.raise_for_status()
        await response.read()
        return time.perf_counter() - start


def count_bytes(folder: Path) -> int:
    """The bytes of all files below a folder, without what links lead to."""
    paths = (Path(base, name) for base, _, names in os.walk(folder) for name in names)
    return sum(path.lstat().st_size for path in paths)


def list_packages(python: str, folder: Path) -> dict[str, str]:
    """List the packages of an environment, with their versions by name."""
    command = [python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
    found = subprocess.run(command, env=_make_environ(folder), cwd=folder, **options)
    return {each["name"].lower().replace("_", "-"): each["version"] for each in json.loads(found.stdout)}


def run_program(command: Sequence[str], folder: Path) -> float:
    """Run a command in `folder`, whose caches are empty there; the seconds it takes."""
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    start = time.perf_counter()
    done = subprocess.run(command, env=_make_environ(folder), cwd=folder, **options)
    if done.returncode:
        raise MlxrunError(f"`{Path(command[0]).name} {' '.join(command[1:3])}` failed: {done.stderr[-2000:]}")
    return time.perf_counter() - start


def _make_environ(folder: Path) -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "MLXRUN_"))}
    return environ | {"XDG_CACHE_HOME": str(folder / "cache"), "XDG_DATA_HOME": str(folder / "data")}


def _show_command(kinds: Iterable[str]) -> str:
    chosen = [] if list(kinds) == list(KINDS) else [f"--kind {kind}" for kind in kinds]
    return " ".join(["python -m benchmarks install", *chosen, "--json FILE"])


def print_install_report(report: Mapping[str, Any]) -> None:
    """Print a line for each kind."""
    console = make_console(None)
    titles = ("kind", "size", "packages", *(name.removesuffix("_s").replace("_", " ") for name in TIMES))
    cells = [
        (
            kind,
            format_figure(found["bytes"], "install_bytes"),
            str(len(found["packages"])),
            *(format_figure(found[key], key) for key in TIMES),
        )
        for kind, found in report["kinds"].items()
    ]
    console.print(make_table(titles, 1, cells, console.is_terminal))
