"""Tools in bubblewrap: no network, no files but their own and those that are named, and no environment."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.errors import RequestError
from mlxrun.jobs.agents.agent_settings import LineAgent, parse_agent
from mlxrun.jobs.agents.tool_sandbox import build_sandbox
from mlxrun.jobs.agents.tool_session import ToolSession
from tests.helpers.agent_bench import AgentBench, agent_line, answer_in_turn, call, write_tools
from tests.helpers.batch_fakes import write_job

needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="`make system-packages` installs bubblewrap"
)
RUN = '''
import os, socket, subprocess

def run(command: str) -> str:
    """Run a command of the shell."""
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    return (done.stdout + done.stderr).strip()

def connect(port: int) -> str:
    """Connect to a port of this machine."""
    socket.create_connection(("127.0.0.1", port), 5)
    return "connected"
'''


def call_tools(folder: Path, agent: LineAgent, *calls: tuple[str, dict[str, Any]]) -> list[str]:
    """The results of calls in one session."""
    session = ToolSession(agent, folder)
    texts = [({"name": name, "arguments": json.dumps(arguments)}, {name: {}}) for name, arguments in calls]
    found = [session.call(each, schemas, {})["content"] for each, schemas in texts]
    session.close()
    return found


@needs_bubblewrap
def test_what_tools_may_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tools(tmp_path, RUN)
    (tmp_path / "answers.csv").write_text("secret")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").write_text("readable")
    monkeypatch.setenv("MY_TOKEN", "secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        agent = parse_agent({"tools": ["tools.py:run", "tools.py:connect"], "sandbox": ["data"]})
        commands = [
            f"cat {tmp_path}/answers.csv",
            f"cat {tmp_path}/data/a.txt",
            f"echo x > {tmp_path}/data/a.txt",
            f"echo x > {tmp_path}/tools.py",
            "env",
            "echo kept > /tmp/note; cat /tmp/note",
            "cat /tmp/note",
        ]
        calls = [("run", {"command": each}) for each in commands]
        found = call_tools(tmp_path, agent, *calls, ("connect", {"port": port}))
    assert "No such file" in found[0] and found[1] == "readable"
    assert "Read-only" in found[2] and "Read-only" in found[3]
    assert "secret" not in found[4] and found[5:7] == ["kept", "kept"]
    assert found[7].startswith("error: ConnectionRefusedError")
    assert call_tools(tmp_path, agent, calls[6]) == ["cat: /tmp/note: No such file or directory"]


@needs_bubblewrap
async def test_a_conversation_in_a_sandbox(tmp_path: Path) -> None:
    """A file that one call writes is there for the next, and for no other conversation."""
    write_tools(tmp_path, RUN)
    lines = [agent_line(name, tools=["tools.py:run"], sandbox=True) for name in ("a", "b")]
    script = answer_in_turn(*[call("run", command="echo x >> /tmp/log; wc -l < /tmp/log")] * 2, "end")
    bench = AgentBench(write_job(tmp_path, lines), script=script)
    assert (await bench.run()).exit_code == 0
    for record in map(json.loads, bench.paths.out.read_text().splitlines()):
        assert [each["content"] for each in record["transcript"] if each["role"] == "tool"] == ["1", "2"]


def test_without_bubblewrap_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RequestError, match=r"agent.sandbox: tools run in bubblewrap, which was not found"):
        build_sandbox(tmp_path, [], True)


def test_a_sandbox_that_does_not_start_fails_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no result of a tool."""
    write_tools(tmp_path, RUN)
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'no namespaces' >&2; exit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(
        RequestError, match="the process of its tools cannot be used: at its start its process ended"
    ):
        call_tools(
            tmp_path, parse_agent({"tools": ["tools.py:run"], "sandbox": True}), ("run", {"command": "ls"})
        )
