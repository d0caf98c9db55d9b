"""Connects to Ray, and places a job's workers on its nodes. Every problem is a ConfigError that says what to
do.

`--ray auto` finds the Ray of `ray start`. It never finds a Ray that an mlxrun command has started for itself,
which ends with that command; Ray's own search would take any. Both know a Ray by the command line of its
raylet, the process of a node.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from mlxrun.cluster.ray.ray_client import find_unreachable
from mlxrun.config.settings import WorkersSettings
from mlxrun.core.errors import ConfigError
from mlxrun.core.processes import read_output

log = logging.getLogger(__name__)
INSTALL = "pip install 'mlxrun[ray]'"
LOCAL = "local"  # the address of `--ray` without one
TRIES = 4  # a second each, of Ray to be taken in by a cluster
CONNECT_SECONDS = 60.0  # until Ray must have taken us in, or started here
SIGNAL_SECONDS = 0.05  # that a signal may meet Ray's own function for it, while Ray connects
STORE_BYTES = 256_000_000  # of a local Ray: lines and answers are small, and not kept there
PRIVATE = "mlxrun_private"  # a resource that marks the Ray of one command
_RAYLET = re.compile(r"^\S*/raylet(\.exe)? -")
_ADDRESS = re.compile(r"--gcs-address=(\S+)")


def import_ray() -> Any:
    """Import and return Ray. ConfigError if the extra is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # actors without GPUs see what there is
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(f"--ray needs Ray, which is not installed: {INSTALL}") from error


def connect(address: str) -> Any:
    """Connect to Ray, and return its module. ConfigError if there is no Ray. `address`: the cluster at
    HOST:PORT, the Ray of this machine (`auto`), or a new one on this machine (LOCAL)."""
    if address != LOCAL:
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", str(TRIES))
    ray = import_ray()
    if address.startswith("ray://"):
        raise ConfigError(
            f"--ray {address}: Ray Client is not supported; run the command on a machine of the cluster, "
            "with the address HOST:PORT that `ray start --head` has printed, or `auto`"
        )
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address == LOCAL:
        options |= {"address": "local", "include_dashboard": False, "object_store_memory": STORE_BYTES}
        options["resources"] = {PRIVATE: 1}
    else:
        options["address"] = found = find_own_address(ray) if address == "auto" else address
        _check_reachable(address, found)
    _divert_messages(ray)
    _init(ray, address, options)
    return ray


def _divert_messages(ray: Any) -> None:
    """Have the log take what Ray prints of its processes, in colours and several lines."""

    def take(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
        log.debug("Ray: %s", " ".join(" ".join(data["lines"]).split()))

    with suppress(Exception):
        importlib.import_module(f"{ray.__name__}._private.worker").print_to_stdstream = take  # type: ignore[attr-defined]


def _check_reachable(given: str, address: str) -> None:
    """ConfigError unless a server of Ray's kind listens there; `given`: what the user has typed. Ray itself
    tries for minutes, and then ends the process."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--ray {address}: it is neither HOST:PORT nor `auto`")
    if not 0 < int(port) < 65536:
        raise ConfigError(f"--ray {address}: a port is a number from 1 to 65535")
    reason = find_unreachable(host, int(port))
    if reason is None:
        return
    shown = given if given == address else f"{given} ({address})"
    raise ConfigError(
        f"--ray {shown}: cannot be reached: {reason}. `ray start --head` starts Ray and prints its "
        "address; --ray without an address starts one on this machine for this job"
    )


def _init(ray: Any, address: str, options: Mapping[str, Any]) -> None:
    """Call `ray.init` on a thread of its own: on the main one it takes over signals, and may not return. The
    thread stays, as Linux ends the processes of a local Ray with the thread that has started them."""
    problems: list[BaseException] = []
    done = threading.Event()

    def init() -> None:
        try:
            ray.init(**options)
        except BaseException as error:
            problems.append(error)
        done.set()
        if not problems:
            threading.Event().wait()

    threading.Thread(target=init, name="ray-init", daemon=True).start()
    if _wait_connected(done) and not problems:
        return
    reason = f"no answer in {CONNECT_SECONDS:.0f} s" if not problems else str(problems[0]).strip()
    where = "Ray could not be started on this machine" if address == LOCAL else f"--ray {address}"
    more = "; all machines need the same versions of Ray and Python" if "mismatch" in reason else ""
    if "Failed to connect" in reason and address != LOCAL:
        more = (
            ". It listens there, but does not take this machine in. If the cluster asks for a token, set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to what `ray get-auth-token` prints on its head"
        )
    if address == LOCAL and (not problems or "timed out" in reason or "Failed to connect" in reason):
        more = "; it is too busy: try again, or `ray start --head` once and then --ray auto"
    raise ConfigError(f"{where}: {' '.join(reason.split())}{more}")


def _wait_connected(done: threading.Event) -> bool:
    """Wait CONNECT_SECONDS at most; returns whether it is done. An interrupt waits too: a process that ends
    while Ray starts leaves processes behind."""
    until, interrupt = time.monotonic() + CONNECT_SECONDS, None
    while not done.is_set() and time.monotonic() < until:
        try:
            done.wait(SIGNAL_SECONDS)
            _restore_signals()
        except KeyboardInterrupt as error:
            interrupt = error
    _restore_signals()
    if interrupt is not None:
        raise interrupt
    return done.is_set()


def _restore_signals() -> None:
    """Give signals back to the functions of Python that had them: Ray's own would print a stack of C++."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if (handler := signal.getsignal(number)) is not None:
                signal.signal(number, handler)


def place_workers(ray: Any, settings: WorkersSettings) -> list[Mapping[str, Any]]:
    """Choose where the workers go: Ray's options for the actor of each. ConfigError if the cluster has no
    room for them, even if nothing else ran."""
    nodes = [node["Resources"] | {"node": node["NodeID"]} for node in ray.nodes() if node["Alive"]]
    wanted = {name: float(amount) for name, amount in settings.resources.items()}
    if not wanted and any(node.get("GPU") for node in nodes):
        wanted = {"GPU": 1.0}
    if not wanted:
        return _place_by_machine(nodes, settings.count)
    fits = sum(_count_fitting(node, wanted) for node in nodes)
    count = settings.count or fits
    if count > fits or not count:
        has = "; ".join(_describe_resources(node) for node in nodes)
        raise ConfigError(
            f"workers: {max(1, count)} of {_describe_resources(wanted)} each were requested, but the cluster "
            f"has room for {fits} ({len(nodes)} nodes: {has}). Lower workers.count or workers.resources, or "
            "add machines with `ray start --address`"
        )
    special = {"num_cpus": wanted.pop("CPU", 1.0), "num_gpus": wanted.pop("GPU", 0.0)}
    return [{**special, "resources": wanted, "scheduling_strategy": "SPREAD"}] * count


def _place_by_machine(nodes: Sequence[Mapping[str, Any]], count: int | None) -> list[Mapping[str, Any]]:
    """A worker on each machine, with all its processors; `count` of them, in turn, if it is given."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    usable = [node for node in nodes if node.get("CPU", 0) >= 1]
    if not usable:
        raise ConfigError(
            "workers: no machine of the cluster offers a GPU or a processor; see `ray status`, or set "
            "workers.resources to what they offer"
        )
    count = count or len(usable)
    processors = sum(node["CPU"] for node in usable)
    if count > processors:
        text = "%d workers share %g processors: each will be slow, and has a model of its own in memory"
        log.warning(text, count, processors)
    found: list[Mapping[str, Any]] = []
    for number in range(count):
        node = usable[number % len(usable)]
        beside = math.ceil((count - number % len(usable)) / len(usable))  # workers on this node
        cpus = node["CPU"] // beside if node["CPU"] >= beside else node["CPU"] / beside
        strategy = strategies.NodeAffinitySchedulingStrategy(node["node"], soft=True)
        found.append({"num_cpus": cpus, "scheduling_strategy": strategy})
    return found


def _count_fitting(node: Mapping[str, Any], wanted: Mapping[str, float]) -> int:
    """How many workers fit on a node; what is wanted 0 of does not count."""
    return min((int(node.get(name, 0) / each) for name, each in wanted.items() if each > 0), default=0)


def _describe_resources(found: Mapping[str, Any]) -> str:
    shown = (name for name in found if name not in ("node", PRIVATE) and ":" not in name)
    names = (name for name in shown if "memory" not in name)
    return ", ".join(f"{found[name]:g} {name}" for name in sorted(names)) or "nothing"


def find_own_address(ray: Any) -> str:
    """Find the HOST:PORT of the Ray that `auto` means. ConfigError if there is none, or if there are
    several."""
    given = os.environ.get("RAY_ADDRESS", "")
    if given not in ("", "auto", "local"):
        return given
    public, private = sort_raylets(list_commands())
    noted = read_noted_address(ray)
    if noted in public or (noted and not public):
        return noted
    if len(public) > 1:
        raise ConfigError(
            f"--ray auto: several Rays run on this machine ({', '.join(sorted(public))}); give the address "
            "of one"
        )
    if not public:
        passed = " (those that other mlxrun commands started for themselves are not used)" if private else ""
        raise ConfigError(
            f"--ray auto: no Ray runs on this machine{passed}: `ray start --head` starts one; --ray without "
            "an address starts one for this command"
        )
    return public.pop()


def sort_raylets(commands: Iterable[str]) -> tuple[set[str], set[str]]:
    """Sort the cluster addresses of the raylets among the command lines: public ones, and those that mlxrun
    commands started for themselves."""
    public: set[str] = set()
    private: set[str] = set()
    for command in commands:
        if _RAYLET.match(command) and (found := _ADDRESS.search(command)):
            (private if PRIVATE in command else public).add(found[1])
    return public, private


def list_commands() -> list[str]:
    """The command lines of all processes that can be seen."""
    return read_output("ps", "-axww", "-o", "args=", seconds=60.0).splitlines()


def read_noted_address(ray: Any) -> str:
    """What `ray start` has noted as the address of its last cluster; it may have ended since."""
    with suppress(Exception):
        found: str | None = importlib.import_module(f"{ray.__name__}._private.utils").read_ray_address()
        return found or ""
    return ""
