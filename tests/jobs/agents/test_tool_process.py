"""MCP servers: their tools, what they keep in their process, and how a conversation goes on after a kill."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mlxrun.core.errors import RequestError
from mlxrun.jobs.agents.agent_settings import parse_agent
from mlxrun.jobs.agents.tool_session import ToolSession
from tests.helpers.agent_bench import AgentBench, agent_line, answer_in_turn, call
from tests.helpers.batch_fakes import write_job
from tests.jobs.agents.test_turn_journal import keep_turns

SERVER = """
import os, sys
from pathlib import Path
from mcp.server import MCPServer

server = MCPServer("counter")
total = int(Path("start").read_text())

@server.tool()
def add(number: int) -> str:
    "Add a number to the total of this process."
    global total
    total += number
    with open("calls", "a") as file:
        file.write(f"{number}\\n")
    return str(total)

@server.tool()
def leave() -> str:
    print("x" * 100_000, flush=True)
    os._exit(4)

server.run()
"""
# The same tool in a server that starts at once.
SMALL = """
import json, sys

total = int(open("start").read())
number = {"type": "object", "properties": {"number": {"type": "integer"}}}
for line in sys.stdin:
    message = json.loads(line)
    method, given = message["method"], message.get("params", {})
    if method == "initialize":
        result = {"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "small", "version": "1"}}
    elif method == "tools/list":
        add = {"name": "add", "description": "Add a number.", "inputSchema": number}
        result = {"tools": [add, {"name": "leave", "inputSchema": {"type": "object"}}]}
    elif method == "tools/call" and given["name"] == "leave":
        sys.exit(4)
    elif method == "tools/call":
        total += given["arguments"]["number"]
        with open("calls", "a") as file:
            print(given["arguments"]["number"], file=file)
        result = {"content": [{"type": "text", "text": str(total)}]}
    elif "id" not in message:
        continue
    else:
        result = None
    reply = {"result": result} if result else {"error": {"code": -32601, "message": "Method not found"}}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **reply}), flush=True)
"""
COMMAND = f"{sys.executable} server.py"


def write_server(folder: Path, text: str) -> None:
    pytest.importorskip("mcp")
    (folder / "server.py").write_text(text)
    (folder / "start").write_text("0")


@pytest.mark.parametrize("text", [SMALL, pytest.param(SERVER, marks=pytest.mark.slow)], ids=["small", "mcp"])
def test_a_server(tmp_path: Path, text: str) -> None:
    """Its process lives as long as the conversation; one that ends is started again."""
    write_server(tmp_path, text)
    session = ToolSession(parse_agent({"mcp": COMMAND}), tmp_path)
    tools = {each["function"]["name"]: each["function"] for each in session.describe()}
    assert tools.keys() == {"add", "leave"} and tools["add"]["description"].startswith("Add a number")
    schemas = {name: each["parameters"] for name, each in tools.items()}

    def ask(name: str, **arguments: object) -> str:
        given = {"name": name, "arguments": json.dumps(arguments)}
        return str(session.call(given, schemas, {})["content"])

    assert [ask("add", number=2), ask("add", number=3)] == ["2", "5"]
    assert ask("add", number="three").startswith("error: the arguments do not fit: ")
    assert ask("leave").startswith("error: the tool was ended: ")
    assert ask("add", number=1) == "1"
    session.close()


ODD = """
import json, sys

def send(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

good = {"content": [{"type": "text", "text": "right"}]}
for line in sys.stdin:
    message = json.loads(line)
    at, method, given = message.get("id"), message.get("method"), message.get("params", {})
    if method == "initialize":
        send(id=at, result={"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}},
                            "serverInfo": {"name": "odd", "version": "1"}})
    elif method == "tools/list":
        names = ("closed", "others", "asks", "shape", "image", "nothing", "text")
        tools = [{"name": name, "inputSchema": {"type": "object"}} for name in names]
        tools[3]["outputSchema"] = {"type": "object", "required": ["a"]}
        send(id=at, result={"tools": tools})
    elif method == "tools/call":
        name = given["name"]
        if name == "closed":
            send(id=at, error={"code": -1, "message": "the shop is closed"})
        elif name == "others":
            for other in (999, "abc", at, at):
                send(id=other, result=good if other == at else {"content": []})
        elif name == "asks":
            send(id=7, method="sampling/createMessage", params={"messages": [], "maxTokens": 5})
            print("no JSON", flush=True)
            send(id=at, result=good)
        elif name == "shape":
            send(id=at, result={**good, "structuredContent": {"b": 1}})
        elif name == "text":
            send(id=at, result={"content": "a text"})
        elif name == "image":
            send(id=at, result={"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]})
        else:
            send(id=at, result={"content": []})
"""


def test_an_odd_server(tmp_path: Path) -> None:
    """Errors that say that something is closed, replies to other requests, requests of its own, and results
    of another shape: each is a result, and the server goes on."""
    write_server(tmp_path, ODD)
    session = ToolSession(parse_agent({"mcp": COMMAND, "call_seconds": 30}), tmp_path)
    names = [each["function"]["name"] for each in session.describe()]
    schemas: dict[str, dict[str, object]] = {name: {} for name in names}

    def ask(name: str) -> str:
        return str(session.call({"name": name, "arguments": "{}"}, schemas, {})["content"])

    found = {name: ask(name) for name in names}
    session.close()
    for name in ("shape", "text"):
        assert found.pop(name).startswith("error: the MCP server's reply cannot be used: ")
    assert found == {
        "closed": "error: the shop is closed",
        "others": "right",
        "asks": "right",
        "image": "[image]",
        "nothing": "",
    }
    assert "ended" not in "".join(found.values())


def test_a_server_that_does_not_start_is_named_with_its_own_error(tmp_path: Path) -> None:
    write_server(tmp_path, "import sys\nprint('y' * 100_000, file=sys.stderr)\nraise ValueError('no shop')")
    session = ToolSession(parse_agent({"mcp": COMMAND}), tmp_path)
    with pytest.raises(RequestError, match="cannot be used: .* on standard error: ValueError: no shop$"):
        session.describe()
    session.close()


async def test_a_resumed_conversation_makes_its_calls_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without being told so, as what a server keeps is in its process."""
    write_server(tmp_path, SMALL)
    script = answer_in_turn(call("add", number=2), call("add", number=3), "end")
    bench = AgentBench(write_job(tmp_path, [agent_line(tools=[], mcp=COMMAND)]), script=script)
    turns = await keep_turns(bench, monkeypatch)
    whole = bench.paths.out.read_bytes()
    for path in (bench.paths.out, bench.paths.journal):
        path.unlink()
    bench.paths.turns.write_bytes(b"".join(turns.splitlines(keepends=True)[:2]))
    await bench.run()
    assert len(bench.prompts) == 2 and bench.paths.out.read_bytes() == whole
    assert (tmp_path / "calls").read_text().split() == ["2", "3", "2", "3"]


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mcp.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RequestError, match=r"pip install 'mlxrun\[agents\]'"):
        ToolSession(parse_agent({"mcp": "python server.py"}), tmp_path).describe()
