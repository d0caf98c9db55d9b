"""Measures `mlxrun serve` beside its peers: starts all servers, runs `mlxrun bench serve`, writes the JSON.

    python -m benchmarks.serve_peers --out benchmarks/results/server-cpu.json --preload libopenblas.so.0 \\
        --mlx-lm-python PYTHON --mlx-vlm-python PYTHON --vllm-mlx-python PYTHON

Each peer runs in the environment of an interpreter that is given (`--mlx-lm-python`, ...), so that every peer
can have the versions that it asks for. `--preload` measures every peer a second time, as a server of its own,
with a library loaded before all others: for example OpenBLAS, which mlxrun loads by itself. The versions of
every peer are added to the JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 180.0
PRELOADED = " + preload"  # behind the name of a peer that runs with the library
LIBRARIES = ("mlx", "mlx-lm", "mlx-vlm", "vllm-mlx", "transformers")
VERSIONS = f"""
import json, platform
from importlib import metadata
found = {{"python": platform.python_version()}}
for name in {LIBRARIES!r}:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Server:
    """A server to measure: its name, the interpreter of its environment and its arguments.

    `shown` is the command as a reader would type it, without paths of this machine.
    """

    name: str
    python: str
    arguments: tuple[str, ...]
    shown: str
    port: int
    preload: str | None = None

    def environment(self, home: Path) -> dict[str, str]:
        """The variables; HOME is a fresh folder, so no prefix cache of an earlier run is used."""
        variables = dict(os.environ) | {"HOME": str(home), "HF_HUB_OFFLINE": "1"}
        if self.preload is not None:
            variables["LD_PRELOAD"] = self.preload
        return variables


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the servers, measure them in turns, and write the report."""
    options = _options(arguments)
    with tempfile.TemporaryDirectory(prefix="mlxrun-peers-") as folder:
        model = Path(folder) / "model"
        _mlxrun("bench", "model", str(model))
        servers = _servers(options, model)
        with contextlib.ExitStack() as running:
            for server in servers:
                home = Path(folder) / server.name
                home.mkdir()
                running.enter_context(_run(server, home))
            report = _measure(options, servers, model, Path(folder) / "report.json")
    report["command"] = _shown_command(options)
    preloads = {s.name: Path(s.preload).name if s.preload else None for s in servers}
    report["targets"] = {s.name: {"command": s.shown, "preload": preloads[s.name]} for s in servers}
    report["variables"] = {key: value for key, value in os.environ.items() if key.startswith("OPENBLAS_")}
    report["peer_versions"] = {s.name: read_versions(s.python) for s in servers}
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve_peers", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    for peer in ("mlx-lm", "mlx-vlm", "vllm-mlx"):
        parser.add_argument(
            f"--{peer}-python",
            type=os.path.abspath,  # servers start in a folder of their own
            help="interpreter with this peer; without it the peer is left out",
        )
    parser.add_argument("--preload", help="measure the peers with this library preloaded, too")
    parser.add_argument("--first-port", type=int, default=8100)
    parser.add_argument("--requests", type=int, default=64, help="requests of one round")
    parser.add_argument("--repeat", type=int, default=3, help="rounds")
    return parser.parse_args(arguments)


def _servers(options: argparse.Namespace, model: Path) -> list[Server]:
    """Our server first: ratios are relative to it."""
    port = options.first_port
    path = str(model)
    found = [
        Server(
            "mlxrun",
            sys.executable,
            (
                "-c",
                "import sys; from mlxrun.cli.main import main; sys.exit(main())",
                "serve",
                "--set",
                f"model.path={path}",
                "--port",
                str(port),
            ),
            "mlxrun serve --set model.path=MODEL",
            port,
        )
    ]
    peers = {
        "mlx_lm.server": (
            options.mlx_lm_python,
            ("-m", "mlx_lm", "server", "--model", path),
            "python -m mlx_lm server --model MODEL",
        ),
        "mlx_vlm.server": (
            options.mlx_vlm_python,
            ("-m", "mlx_vlm.server", "--model", path),
            "python -m mlx_vlm.server --model MODEL",
        ),
        "vllm-mlx": (
            options.vllm_mlx_python,
            ("-m", "vllm_mlx.cli", "serve", path, "--continuous-batching"),
            "vllm-mlx serve MODEL --continuous-batching",
        ),
    }
    for at, (name, (python, command, shown)) in enumerate(peers.items(), start=1):
        if python is not None:
            for step, preload in enumerate([None, options.preload] if options.preload else [None]):
                own = port + 10 * step + at
                full = name if preload is None else f"{name}{PRELOADED}"
                found.append(Server(full, python, (*command, "--port", str(own)), shown, own, preload))
    return found


@contextlib.contextmanager
def _run(server: Server, home: Path) -> Iterator[None]:
    """The server, from the moment it listens until the end of the block."""
    log = home / "log.txt"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [server.python, *server.arguments],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=server.environment(home),
            cwd=home,
        )
        try:
            _wait(server, process, log)
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the port is open and the server lists its models."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", server.port), 1).close()
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/v1/models", timeout=5).close()
            print(f"{server.name}: listening", file=sys.stderr)
            return
        time.sleep(0.5)
    tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
    raise SystemExit(f"{server.name} did not start:\n{tail}")


def _measure(
    options: argparse.Namespace, servers: Sequence[Server], model: Path, out: Path
) -> dict[str, object]:
    urls = [part for s in servers for part in ("--url", f"{s.name}=http://127.0.0.1:{s.port}/v1")]
    workloads = ("--workload", "chat", "--workload", "shared")
    rounds = ("--requests", str(options.requests), "--repeat", str(options.repeat))
    _mlxrun("bench", "serve", *urls, "--model", str(model), *workloads, *rounds, "--json", str(out))
    return dict(json.loads(out.read_text(encoding="utf-8")))


def _mlxrun(*arguments: str) -> None:
    code = "import sys; from mlxrun.cli.main import main; sys.exit(main())"
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)


def read_versions(python: str) -> dict[str, str]:
    found = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True)
    return dict(json.loads(found.stdout))


def _shown_command(options: argparse.Namespace) -> str:
    """The command of this script, without paths of this machine."""
    parts = ["python", "-m", "benchmarks.serve_peers", "--out", str(options.out)]
    for peer in ("mlx-lm", "mlx-vlm", "vllm-mlx"):
        if getattr(options, f"{peer.replace('-', '_')}_python"):
            parts += [f"--{peer}-python", "PYTHON"]
    if options.preload:
        parts += ["--preload", Path(options.preload).name]
    parts += ["--requests", str(options.requests), "--repeat", str(options.repeat)]
    return shlex.join(parts)


if __name__ == "__main__":
    raise SystemExit(main())
