"""The files by which systemd (Linux) and launchd (macOS) run `mlxrun serve` for a user, and the commands that
load them.

systemd.service(5) and launchd.plist(5) say what the keys mean. A server that ends by itself, as after an
engine failure, is started again; one that is stopped is not.
"""

from __future__ import annotations

import plistlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RESTART_SECONDS = 10
_LABEL = "mlxrun."  # of launchd's jobs, before the service's name
# systemd replaces specifiers such as %h everywhere, and $A in command lines only.
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "%": "%%"})


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
        "\n".join(lines).encode(),
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
