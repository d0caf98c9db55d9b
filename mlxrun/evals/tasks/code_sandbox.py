"""Runs Python programs that a model wrote, in the sandbox of another program.

They have no network, none of this machine's files but Python's own, and limits of time and memory. On Linux
that is bubblewrap; elsewhere, and where there is none, a container of Docker or Podman.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys

from mlxrun.jobs.agents.tool_sandbox import BUBBLEWRAP, build_bubblewrap

SECONDS = 10  # of a program
MEMORY = 4_000_000_000  # bytes
IMAGE = "docker.io/library/python:3.13-slim"
MISSING = "no sandbox was found for programs of a model: install bubblewrap (Linux), Docker or Podman"
# Reads a program and a token; writes the token and what the program raised, once the program has ended.
RUNNER = f"""\
import os, resource, sys
token, _, program = sys.stdin.read().partition(":")
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000_000, 100_000_000))
result, nowhere = os.dup(1), os.open(os.devnull, os.O_RDWR)
for stream in range(3):
    os.dup2(nowhere, stream)
problem = ""
try:
    exec(compile(program, "answer", "exec"), {{}})
except BaseException as error:
    problem = f"{{type(error).__name__}}: {{error}}"[:200]
os.write(result, (token + problem).encode(errors="replace"))
os._exit(0)
"""


def build_command(name: str) -> list[str]:
    """Build the command line that runs RUNNER in a sandbox. `name`: bwrap, docker or podman."""
    limit = ["timeout", "-s", "KILL", str(SECONDS)]
    if name != BUBBLEWRAP:
        return [
            *(name, "run", "--rm", "-i", "--network", "none", "--read-only", "--tmpfs", "/tmp"),
            *("--memory", str(MEMORY), "--pids-limit", "64", "--cap-drop", "ALL"),
            *("--security-opt", "no-new-privileges", "--user", "65534:65534", IMAGE),
            *(*limit, "python", "-I", "-c", RUNNER),
        ]
    return [*build_bubblewrap(), *limit, sys.executable, "-I", "-c", RUNNER]


def run_program(source: str) -> str | None:
    """Run a program; return None if it came to its end, else why not. ImportError if there is no sandbox."""
    name = next(filter(shutil.which, (BUBBLEWRAP, "docker", "podman")), None)
    if name is None:
        raise ImportError(MISSING)
    token = secrets.token_hex()
    given = f"{token}:{source}".encode(errors="replace")
    try:
        done = subprocess.run(build_command(name), input=given, capture_output=True, timeout=6 * SECONDS)
    except subprocess.TimeoutExpired:
        return f"it took more than {SECONDS} s"
    found = done.stdout.decode(errors="replace")
    if found.startswith(token):
        return found.removeprefix(token) or None
    said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if done.returncode in (137, -9):
        return f"it took more than {SECONDS} s"
    return f"its process ended with exit code {done.returncode}{said and ': ' + said}"[:300]


def check_sandbox() -> None:
    """ImportError with the reason if no program can be run."""
    problem = run_program("")
    if problem is not None:
        raise ImportError(f"the sandbox for programs of a model cannot be used: {problem}")
