"""Tools that are missing, raise, hang, print, kill themselves, or get what they cannot use: each is an entry
of its own conversation, and harms no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.agent_bench import (
    TEMPLATE,
    AgentBench,
    agent_line,
    answer_in_turn,
    call,
    count_turns,
    write_tools,
)
from tests.helpers.batch_fakes import read, write_job
from tests.helpers.tokenizers import FakeModelInfo
from tests.jobs.agents.test_turn_journal import keep_turns

TOOLS = """
import os, sys, time

def good(text: str) -> str:
    return text.upper()

def raises() -> None:
    raise KeyError("no such key")

def leaves() -> None:
    sys.exit(3)

def hangs() -> None:
    time.sleep(600)

def prints() -> str:
    print("x" * 5_000_000)
    sys.stderr.write("y" * 5_000_000)
    return "done"

def talks() -> str:
    return "begin" + "z" * 5_000_000 + "end"

def dies() -> None:
    os.kill(os.getpid(), 9)

def breaks(state: dict) -> str:
    state["file"] = sys.stdin
    return "never"

def grows(state: dict) -> str:
    state["text"] = "x" * 2_000_000
    return "never"

def half(text: str) -> str:
    return "a\\ud800b"

def gives() -> object:
    return {"list": [1, None]}

def opens() -> object:
    return open

def forges(text: str) -> str:
    data = len(text).to_bytes(8, "little") + text.encode()
    for number in range(3, 64):
        try:
            os.write(number, data)
        except OSError:
            pass
    return "never"
"""
CASES = [
    (call("good", text="hi"), "HI"),
    (call("gives"), r'\{"list": \[1, null\]\}'),
    (call("raises"), "error: KeyError: 'no such key'"),
    (call("leaves"), "error: SystemExit: 3"),
    (call("hangs"), "error: the tool was ended: it took more than 4 s"),
    (call("prints"), "done"),
    (call("talks"), r"begin(?s:.*)\[4,980,008 characters left out\](?s:.*)end"),
    (call("dies"), "error: the tool was ended: its process ended by SIGKILL"),
    (call("breaks"), "error: TypeError: Object of type TextIOWrapper is not JSON serializable"),
    (call("grows"), "error: the state would have more than 1,000,000 characters"),
    (call("half", text=""), r"a\?b"),
    (call("opens"), "error: TypeError: Object of type builtin_function_or_method"),
    (call("forges", text="hello"), "error: the tool was ended: its process sent what is no result"),
    (call("forges", text="[1]"), "error: the tool was ended: its process sent what is no result"),
    (call("forges", text='{"content": 7}'), "error: the tool was ended: its process sent what is no result"),
    (call("good", wrong=1), "error: the arguments do not fit: "),
    (call("good"), "error: the arguments do not fit: .*'text' is a required property"),
]
NAMES = re.findall(r"^def (\w+)", TOOLS, re.M)


async def test_bad_calls_are_entries_of_their_conversation(tmp_path: Path) -> None:
    write_tools(tmp_path, TOOLS)
    plan = {"tools": [f"tools.py:{name}" for name in NAMES], "call_seconds": 4, "state": {"kept": 1}}
    lines = [agent_line(f"l{at:02}", **plan) for at in range(len(CASES))]

    def script(prompt: str) -> str:
        at = re.findall(r"Question l(\d\d)", prompt)[0]
        # After the bad call the same tools still work.
        return [CASES[int(at)][0], call("good", text="still here"), "end"][count_turns(prompt)]

    large = FakeModelInfo(chat_template=TEMPLATE, context_length=100_000)
    bench = AgentBench(write_job(tmp_path, lines), script=script, model_info=large)
    assert (await bench.run()).exit_code == 0
    records = {each["custom_id"]: each for each in read(bench.paths.out)}
    for at, (_, wanted) in enumerate(CASES):
        record = records[f"l{at:02}"]
        assert len(record["transcript"]) == 5, record
        first, second = [each["content"] for each in record["transcript"] if each["role"] == "tool"]
        assert re.match(wanted, first), (wanted, first[:200])
        assert second == "STILL HERE" and record["agent"]["state"] == {"kept": 1} and len(first) < 21_000


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("good", '{"text": ', "error: the arguments are not JSON: "),
        ("good", "[1]", "error: the arguments are no JSON object"),
        ("good", '"text"', "error: the arguments are no JSON object"),
        ("good", "{}", "error: the arguments do not fit: "),
        ("missing", "{}", "error: there is no tool 'missing'; there are good"),
    ],
)
def test_calls_that_parsers_of_some_families_let_pass(
    tmp_path: Path, name: str, text: str, content: str
) -> None:
    """Others leave such a call in the content, which then is the answer."""
    from mlxrun.jobs.agents.agent_settings import parse_agent
    from mlxrun.jobs.agents.tool_session import ToolSession

    write_tools(tmp_path, TOOLS)
    session = ToolSession(parse_agent({"tools": ["tools.py:good"]}), tmp_path)
    (tool,) = session.describe()
    found = session.call({"name": name, "arguments": text}, {"good": tool["function"]["parameters"]}, {})
    session.close()
    assert found["content"].startswith(content)


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ({"tools": ["gone.py:f"]}, "gone.py:f': cannot be imported: there is no such file"),
        ({"tools": ["tools.py:gone"]}, "has no function 'gone'"),
        ({"tools": ["tools.py:good", "tools.py:good"]}, "there are two tools with the name 'good'"),
        (
            {"tools": [{"function": "tools.py:good", "parameters": {"type": "text"}}]},
            "the parameters of the tool 'good': ",
        ),
        ({"digests": {"tools.py": "0" * 64}}, "tools.py has changed since the job was made"),
        ({"sandbox": ["no/such/folder"]}, "no/such/folder: there is no such file or folder"),
        ({"files": ["tools.py", 7]}, "agent.files must be a list of paths"),
        ({"mcp": "no-such-program"}, "the MCP server 'no-such-program' cannot be used"),
    ],
)
async def test_tools_that_cannot_be_used_fail_their_line_alone(
    tmp_path: Path, agent: dict, says: str
) -> None:  # type: ignore[type-arg]
    write_tools(tmp_path, TOOLS)
    lines = [
        agent_line("bad", **{"tools": ["tools.py:good"], **agent}),
        agent_line("good", tools=["tools.py:good"]),
    ]
    bench = AgentBench(write_job(tmp_path, lines), script=answer_in_turn(call("good", text="a"), "end"))
    assert (await bench.run()).exit_code == 1
    (failed,) = read(bench.paths.errors)
    assert failed["custom_id"] == "bad" and says in failed["error"]["message"]
    assert [each["custom_id"] for each in read(bench.paths.out)] == ["good"]


KEEPER = """
from pathlib import Path

total = int(Path(__file__).with_name("start").read_text())

def add(number: int) -> int:
    global total
    with open(__file__ + ".calls", "a") as file:
        file.write(f"{number}\\n")
    total += number
    return total
"""


@pytest.mark.parametrize(("start", "prompts", "total"), [("0", 2, "5"), ("7", 4, "12")])
async def test_earlier_calls_are_made_again(
    tmp_path: Path, start: str, prompts: int, total: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `replay`, a resumed conversation brings the new process to where the old one was. If a call has
    another result than before, the conversation begins anew."""
    write_tools(tmp_path, KEEPER)
    (tmp_path / "start").write_text("0")
    script = answer_in_turn(call("add", number=2), call("add", number=3), "end")
    bench = AgentBench(write_job(tmp_path, [agent_line(replay=True)]), script=script)
    turns = await keep_turns(bench, monkeypatch)
    whole = bench.paths.out.read_bytes()
    for path in (bench.paths.out, bench.paths.journal):
        path.unlink()
    bench.paths.turns.write_bytes(b"".join(turns.splitlines(keepends=True)[:2]))
    (tmp_path / "start").write_text(start)
    await bench.run()
    assert len(bench.prompts) == prompts
    results = [each["content"] for each in bench.read_record()["transcript"] if each["role"] == "tool"]
    assert results[-1] == total and (start != "0" or bench.paths.out.read_bytes() == whole)
    calls = (tmp_path / "tools.py.calls").read_text().split()
    assert calls == (["2", "3", "2", "3"] if start == "0" else ["2", "3", "2", "2", "3"])
