"""Compiles kernels by clang++, once: programs are kept by the digest of all that they are made of.

They are in the user's cache (`$TESTS_CACHE_HOME`, which conftest.py sets), in mlxrun-tests/metal; what was
not used for a month is deleted. A text that does not compile is kept too, as its error.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from tests.helpers.command_processes import PATIENCE, run_program
from tests.metal.emulator.errors import EmulatorError

SOURCES = Path(__file__).parent
OLDEST = 17  # the first clang++ that computes with __bf16
KEPT_SECONDS = 30 * 24 * 3600
FLAGS = (
    *("-std=c++20", "-O1", "-ffp-contract=off", "-ftrivial-auto-var-init=pattern"),
    *("-fsanitize=undefined", "-fno-sanitize=vptr,function", "-fsanitize-trap=all"),
    *("-Wall", "-Wextra", "-Werror", "-Wuninitialized"),
    *("-Wno-unknown-attributes", "-Wno-unused-parameter", "-Wno-unused-variable", "-Wno-unknown-pragmas"),
    *("-Wno-pass-failed", "-Wno-unused-function", "-Wno-psabi"),
)


@cache
def find_compiler() -> str | None:
    """clang++ 19, or another that is new enough; None where the emulator cannot run."""
    if sys.platform != "linux":
        return None
    for name in ("clang++-19", "clang++"):
        if path := shutil.which(name):
            version = run_program([path, "-dumpversion"]).stdout
            if version.split(".")[0].isdigit() and int(version.split(".")[0]) >= OLDEST:
                return path
    return None


def find_cache() -> Path:
    return Path(os.environ["TESTS_CACHE_HOME"]) / "mlxrun-tests" / "metal"


def compile_program(text: str) -> Path:
    """The program that runs a kernel's text on machine.cpp."""
    return _make_once(text, ("-x", "c++", "-", "-x", "none", str(_compile_machine()), "-o"))


def check_spaces(text: str) -> None:
    """EmulatorError if a pointer of a kernel's text changes its address space."""
    _make_once(text, ("-DMETAL_SPACES", "-fsyntax-only", "-x", "c++", "-"))


@cache
def _compile_machine() -> Path:
    text = (SOURCES / "machine.cpp").read_text()
    return _make_once(text, ("-O2", "-fno-sanitize=all", "-c", "-x", "c++", "-", "-o"))


def _make_once(text: str, arguments: tuple[str, ...]) -> Path:
    """The output of a run of clang++, made or kept. `arguments` that end in -o are given a path."""
    headers = "".join((SOURCES / name).read_text() for name in ("machine.h", "metal_stdlib.h"))
    known = repr((text, headers, find_compiler(), FLAGS, arguments))
    kept = find_cache() / hashlib.blake2b(known.encode(), digest_size=12).hexdigest()
    failed = kept.with_suffix(".error")
    if failed.exists():
        raise EmulatorError(failed.read_text())
    if kept.exists():
        os.utime(kept)
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    _delete_old(kept.parent)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        made = Path(folder, "made")
        output = [str(made)] if arguments[-1] == "-o" else []
        command = [str(find_compiler()), *FLAGS, f"-I{SOURCES}", *arguments, *output]
        run = subprocess.run(command, input=text, capture_output=True, text=True, timeout=PATIENCE)
        if run.returncode:
            made.write_text(f"clang++ refuses the kernel:\n{run.stderr[:4000]}")
            os.replace(made, failed)
            raise EmulatorError(failed.read_text())
        made.touch()
        os.replace(made, kept)
    return kept


def _delete_old(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file() and path.stat().st_mtime < time.time() - KEPT_SECONDS:
            path.unlink(missing_ok=True)
