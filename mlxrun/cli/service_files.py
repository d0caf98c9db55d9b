"""The files of services: what systemd and launchd read of a server that they run.

systemd.service(5) and launchd.plist(5) say what their keys mean. A server that ends by itself, as after an
engine failure, is started again; one that is stopped is not.
"""

from __future__ import annotations

import os
import platform
import plistlib
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlxrun.cli.options import load_command_config, name_model
from mlxrun.core.cache_home import find_home
from mlxrun.core.errors import ConfigError

if TYPE_CHECKING:
    from mlxrun.config.loading import LoadedConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_STOP_SECONDS = 30  # beside server.drain_timeout: to flush the prefix cache
# Variables of the shell that a server needs as well.
_KEPT = re.compile(
    r"(HF|MLXRUN|MLX|OPENBLAS)_\w+|XDG_(CACHE|DATA)_HOME|HTTPS?_PROXY|https?_proxy|NO_PROXY|no_proxy"
)
COMPILER = "g++"  # the one program that a server starts by its name: MLX compiles for the CPU with it
_SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")

RESTART_SECONDS = 10
_LABEL = "mlxrun."  # of launchd's jobs, before the service's name
# systemd replaces specifiers such as %h everywhere, and $A in command lines only.
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "%": "%%", "\n": "\\n"})


@dataclass(frozen=True, slots=True)
class Service:
    """A server that the system runs. `command`: the program and its arguments, with whole paths.
    `stop_seconds`: that it may take to end. `environment`: variables of the shell that it needs."""

    name: str
    command: Sequence[str]
    folder: Path
    stop_seconds: int
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ServiceFile:
    """Where the system reads a service, what stands there, and the commands that load, unload and show it.
    `logs`: how to read its log."""

    path: Path
    content: bytes
    load: Sequence[Sequence[str]]
    unload: Sequence[Sequence[str]]
    status: Sequence[str]
    logs: str


def make_service(model: str | None, name: str, config_path: Path | None, sets: tuple[str, ...]) -> Service:
    """A service with this config. ConfigError if that is wrong, or would be with the variables of a
    service."""
    loaded = load_command_config(config_path, sets, name_model(model), several=True)
    arguments = [model] if model is not None else []
    if loaded.path is not None:
        arguments += ["-c", str(Path(loaded.path).resolve())]
    arguments += [part for each in sets for part in ("--set", each)]
    kept = {
        key: value
        for key, value in sorted(os.environ.items())
        if _KEPT.fullmatch(key) and not _SECRET.search(key)
    }
    check_variables(loaded, kept)
    kept["PATH"] = make_path(shutil.which(COMPILER))
    stop = int(loaded.config.server.drain_timeout) + _STOP_SECONDS
    return Service(name, [*find_program(), "serve", *arguments], Path.cwd(), stop, kept)


def check_variables(loaded: LoadedConfig, kept: Mapping[str, str]) -> None:
    """ConfigError if the config is wrong, or another one, with the variables that the service has: `kept`."""
    from mlxrun.config.loading import load_config

    lacks = "which the shell has and a service has not; a config reads a key from a file, as ${file:/PATH}"
    try:
        again = load_config(loaded.path, loaded.sets, kept, options=loaded.options)
    except ConfigError as error:
        raise ConfigError.from_problems(f"{each}, {lacks}" for each in error.problems) from error
    if again.config != loaded.config:
        raise ConfigError(f"the config needs variables {lacks}")


def make_path(compiler: str | None) -> str:
    """The PATH of a service: the folders of the system, and before them that of the compiler, where it is in
    another one. What else a shell has in it may be gone at the next start, or be written by others."""
    folder = "" if compiler is None else str(Path(compiler).absolute().parent)
    return ":".join(_SYSTEM_PATH if folder in ("", *_SYSTEM_PATH) else (folder, *_SYSTEM_PATH))


def find_service_file(name: str) -> ServiceFile:
    """The file of the service of this name: its place, and the commands that unload and show it."""
    return make_own_file(Service(name, (), Path.cwd(), 0, {}))


def find_installed_file(name: str) -> ServiceFile:
    """As `find_service_file`. ConfigError if the service is not installed."""
    file = find_service_file(name)
    if not file.path.exists():
        raise ConfigError(f"{file.path}: there is no such service")
    return file


def make_own_file(service: Service) -> ServiceFile:
    """The file of the service for this user and system. ConfigError if the name cannot be that of a file."""
    if not _NAME.fullmatch(service.name):
        text = "it has other characters than letters, digits, '.', '_' and '-'"
        raise ConfigError(f"--name {service.name}: {text}")
    return make_service_file(service, platform.system(), find_home(), os.getuid())


def find_program() -> list[str]:
    """The command line of mlxrun, with whole paths."""
    program = shutil.which(sys.argv[0]) if Path(sys.argv[0]).name == "mlxrun" else None
    beside = Path(sys.executable).with_name("mlxrun")
    if program is not None:
        return [str(Path(program).absolute())]
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "mlxrun"]


def make_service_file(service: Service, system: str, home: Path, user: int) -> ServiceFile:
    """The file of the service for `system`, as `platform.system` names it. `user`: the number of the user."""
    if system == "Darwin":
        return _make_launchd(service, home, user)
    return _make_systemd(service, home)


def _make_systemd(service: Service, home: Path) -> ServiceFile:
    unit = f"mlxrun-{service.name}.service"
    lines = [
        "[Unit]",
        f"Description=mlxrun serve ({service.name})",
        "After=network.target",
        "",
        "[Service]",
        f"ExecStart={' '.join(quote_systemd(each).replace('$', '$$') for each in service.command)}",
        f"WorkingDirectory={str(service.folder).replace('%', '%%')}",
        *(f"Environment={quote_systemd(f'{key}={value}')}" for key, value in service.environment.items()),
        "Restart=on-failure",
        f"RestartSec={RESTART_SECONDS}",
        "RestartPreventExitStatus=2",  # a mistake in the config, which a new start does not mend
        f"TimeoutStopSec={service.stop_seconds}",
        "",
        "[Install]",
        "WantedBy=default.target",
        "",
    ]
    control = ["systemctl", "--user"]
    return ServiceFile(
        home / ".config" / "systemd" / "user" / unit,
        "\n".join(lines).encode(errors="surrogateescape"),  # paths may be no text
        ([*control, "daemon-reload"], [*control, "enable", unit], [*control, "restart", unit]),
        ([*control, "disable", "--now", unit],),
        [*control, "--no-pager", "status", unit],
        f"journalctl --user -u {unit} -f",
    )


def quote_systemd(text: str) -> str:
    """A text as systemd reads it: in quotes, with no specifier in it."""
    return f'"{text.translate(_ESCAPES)}"'


def _make_launchd(service: Service, home: Path, user: int) -> ServiceFile:
    label = f"{_LABEL}{service.name}"
    log = home / "Library" / "Logs" / "mlxrun" / f"{service.name}.log"
    path = home / "Library" / "LaunchAgents" / f"{label}.plist"
    content = {
        "Label": label,
        "ProgramArguments": list(service.command),
        "WorkingDirectory": str(service.folder),
        "EnvironmentVariables": dict(service.environment),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RESTART_SECONDS,
        "ExitTimeOut": service.stop_seconds,
        "ProcessType": "Interactive",  # else the system slows it down as work of the background
        "StandardOutPath": str(log),
        "StandardErrorPath": str(log),
    }
    domain = f"gui/{user}"
    return ServiceFile(
        path,
        plistlib.dumps(content),
        (
            ["mkdir", "-p", str(log.parent)],
            ["launchctl", "bootout", f"{domain}/{label}"],
            ["launchctl", "bootstrap", domain, str(path)],
        ),
        (["launchctl", "bootout", f"{domain}/{label}"],),
        ["launchctl", "print", f"{domain}/{label}"],
        f"tail -f {log}",
    )
