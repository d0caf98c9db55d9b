"""`mlxrun service`: a server that systemd (Linux) or launchd (macOS) starts at login and after a failure.

The commands write the service's file (`cli/service_files.py`), have the system load it, and wait until the
server answers.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxrun.cli.options import (
    add_config_options,
    add_model_argument,
    say,
)
from mlxrun.cli.server_client import list_running_servers, read_state
from mlxrun.cli.service_files import (
    ServiceFile,
    find_installed_file,
    find_service_file,
    make_own_file,
    make_service,
)
from mlxrun.core.errors import MlxrunError
from mlxrun.core.terminal import print_text

if TYPE_CHECKING:
    from mlxrun.server.running_servers import ServerNote

ANSWER_SECONDS = 20.0  # in which a server that was started answers, if only that it loads its model
_POLL_SECONDS = 0.1
_NO_BUS = re.compile("Failed to connect to .*bus")  # of systemd's services of a user


class ServiceError(MlxrunError):
    """The system did not take the service."""

    code = "service_failed"
    exit_code = 1


def add_name(function: click.decorators.FC) -> click.decorators.FC:
    """Add `--name`."""
    text = "Of the service; several may run with different ports."
    return click.option("--name", default="server", show_default=True, metavar="NAME", help=text)(function)


@click.group()
def command() -> None:
    """Run a server as a service of systemd or launchd."""


@command.command(
    epilog="""\b
Examples:
  mlxrun service install qwen3-8b-4bit      the server of this model, now and after each login
  mlxrun service install -c prod.yaml --name prod
  mlxrun service install --print            show the file, and install nothing

\b
The config is checked first, and its path is kept: the service reads the file as it is at each start. It runs
this mlxrun, by its whole path. It gets the variables of the model hub, of mlxrun and of MLX as they are now,
but none that has a key or a token in its name; a config reads such from a file, as ${file:/PATH}. Its PATH
has the folders of the system and that of g++, with which MLX compiles. Without a login, Linux runs services
of a user after `loginctl enable-linger`.

\b
After an upgrade, `mlxrun service restart` starts the new version. `mlxrun stop` stops the server until then,
or until the next login.
"""
)
@add_model_argument
@add_name
@click.option("--print", "only_print", is_flag=True, help="Show the file, and install nothing.")
@add_config_options
def install(
    model: str | None, name: str, only_print: bool, config_path: Path | None, sets: tuple[str, ...]
) -> None:
    """Install a server as a service, and start it."""
    file = make_own_file(make_service(model, name, config_path, sets))
    if only_print:
        print_text(file.content.decode(errors="replace"))
        return
    is_new, before = not file.path.exists(), list_running_servers()
    file.path.parent.mkdir(parents=True, exist_ok=True)
    file.path.write_bytes(file.content)
    try:
        _start(file)
    except ServiceError:
        if is_new:
            file.path.unlink()  # a later login would start it
        raise
    say(f"wrote {file.path}")
    say(f"started; `mlxrun service status --name {name}` shows it")
    say(f"its log: {file.logs}")
    _wait_for_answer(file, before)


@command.command()
@add_name
def restart(name: str) -> None:
    """Start it again, as after an upgrade or `mlxrun stop`."""
    file, before = find_installed_file(name), list_running_servers()
    _start(file)
    say(f"started again; its log: {file.logs}")
    _wait_for_answer(file, before)


@command.command()
@add_name
def status(name: str) -> int:
    """Show what the system says of the service."""
    return _call(find_service_file(name).status, check=False, shows=True)


@command.command()
@add_name
def uninstall(name: str) -> None:
    """Stop the service and remove its file. Its data stays."""
    file = find_installed_file(name)
    for each in file.unload:
        _call(each, check=False)
    file.path.unlink()
    say(f"removed {file.path}")


def _start(file: ServiceFile) -> None:
    """Have the system read the file and start the server, anew if it runs. ServiceError if that fails."""
    *before, last = file.load
    for each in before:
        _call(each, check="bootout" not in each)
    _call(last)


def _wait_for_answer(file: ServiceFile, before: Sequence[ServerNote]) -> None:
    """Wait until a server answers that did not run `before`, and say at which URL. ServiceError if none does
    within ANSWER_SECONDS."""
    end, state = time.monotonic() + ANSWER_SECONDS, ""
    while state != "ok" and (not state or time.monotonic() < end):
        time.sleep(_POLL_SECONDS)
        new = [note for note in list_running_servers() if note not in before]
        state = read_state(new[-1].url, new[-1].certificate) if new else "no answer"
    if state not in ("ok", "loading"):
        text = f"no server has answered within {ANSWER_SECONDS:g} s"
        raise ServiceError(f"the service was started, but {text}; its log says why: {file.logs}")
    loading = "" if state == "ok" else ", and loads its model; `mlxrun ps` shows when it is ready"
    say(f"it answers at {new[-1].url}{loading}")


def _call(program: Sequence[str], check: bool = True, shows: bool = False) -> int:
    """Run a program of the system; its exit code. ServiceError with its words if it fails. `shows`: what it
    prints is for the user."""
    try:
        done = subprocess.run(
            program, stdout=None if shows else subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False
        )
    except FileNotFoundError as error:
        raise ServiceError(f"{program[0]} is not there: this system has no services of it") from error
    if done.returncode and _NO_BUS.search(done.stderr):
        text = "systemd runs no services for this user here, as in a container or without a login"
        raise ServiceError(f"{text}; start the server with `mlxrun serve` ({done.stderr.strip()})")
    if shows and done.stderr:
        say(done.stderr.rstrip())
    if check and done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise ServiceError(f"`{' '.join(program)}` failed with exit code {done.returncode}: {said}")
    return done.returncode
