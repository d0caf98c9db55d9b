"""Conversations with tools on a scripted engine: what the model sees, what the record has, how they end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.errors import JobError
from mlxrun.jobs.lines.job_check import make_eval_reader
from mlxrun.jobs.run.stop_signals import Interrupted
from tests.helpers.agent_bench import (
    COUNTER,
    TEMPLATE,
    AgentBench,
    agent_line,
    answer_in_turn,
    call,
    write_tools,
)
from tests.helpers.batch_fakes import by_id, chat, read, write_job
from tests.helpers.raw_clients import until
from tests.helpers.tokenizers import FakeModelInfo
from tests.jobs.agents.test_turn_journal import keep_turns

ADDS = answer_in_turn(call("add", number=2), call("add", number=3), "It is five.")


def contents(record: dict[str, Any]) -> list[str]:
    """The results of tools in a record."""
    return [each["content"] for each in record["transcript"] if each["role"] == "tool"]


def make_bench(folder: Path, *lines: Any, **options: Any) -> AgentBench:
    write_tools(folder)
    return AgentBench(write_job(folder, lines), **options)


async def test_a_conversation(tmp_path: Path) -> None:
    """The record has the last answer, the tokens of all turns, what was said, and the state."""
    bench = make_bench(tmp_path, agent_line(state={"total": 10}), script=ADDS)
    assert (await bench.run()).exit_code == 0
    record = bench.read_record()
    roles = [each["role"] for each in record["transcript"]]
    assert roles == ["assistant", "tool", "assistant", "tool", "assistant"] and contents(record) == [
        "12",
        "15",
    ]
    first, result = record["transcript"][:2]
    assert first["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"number": 2}'}
    assert result["tool_call_id"] == first["tool_calls"][0]["id"] and result["name"] == "add"
    assert first["tool_calls"][0]["id"] != record["transcript"][2]["tool_calls"][0]["id"]
    assert record["agent"] == {"ended": "answer", "turns": 3, "calls": 2, "state": {"total": 15}}
    body = record["response"]["body"]
    assert body["choices"][0]["message"]["content"] == "It is five." and "transcript" not in body
    assert body["usage"]["completion_tokens"] == bench.client.output
    assert "What is added." in bench.prompts[0] and "<|im_start|>tool\n15<|im_end|>" in bench.prompts[2]
    assert not bench.paths.turns.exists() and not bench.paths.answers.exists()


async def test_lines_without_tools_are_as_before(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, agent_line(), chat("plain", "hi"), script=answer_in_turn("hello"))
    await bench.run()
    plain = json.loads(by_id(bench.paths.out)["plain"])
    assert plain.keys() == {"id", "custom_id", "response", "error"}
    agent = json.loads(by_id(bench.paths.out)["a"])
    assert agent["agent"]["ended"] == "answer" and agent["transcript"] == [
        {"role": "assistant", "content": "hello"}
    ]


async def test_scorers_see_transcript_and_state(tmp_path: Path) -> None:
    """Also where a finished answer is scored again."""
    scorer = tmp_path / "my_scorer.py"
    scorer.write_text(
        "def check(answer, expected, state, transcript):\n"
        "    calls = [each for each in transcript if each['role'] == 'tool']\n"
        "    return {'score': state['total'] == expected, 'extracted': [answer, len(calls)]}\n"
    )
    for wanted, score in ((5, 1), (6, 0)):
        wanted_eval = {"scorer": f"{scorer}:check", "expected": wanted}
        bench = make_bench(tmp_path, agent_line(wanted=wanted_eval), script=ADDS)
        bench.evals = make_eval_reader(bench.job)
        await bench.run()
        result = bench.read_record()["eval"]
        assert (result["score"], result["extracted"]) == (score, ["It is five.", 2]), result
    assert bench.prompts == [], "the answer was scored again, and not made again"


@pytest.mark.parametrize(
    ("agent", "answers", "ended", "turns"),
    [
        ({"max_turns": 2}, [call("add", number=1)] * 3, "max_turns", 2),
        ({"max_turns": 1}, ["hello"], "answer", 1),
        ({}, [call("add", number=1) + call("add", number=2), "LONG"], "answer", 2),
    ],
)
async def test_how_it_ends(tmp_path: Path, agent: Any, answers: list[str], ended: str, turns: int) -> None:
    """The calls of the last turn are made too."""
    bench = make_bench(tmp_path, agent_line(**agent), script=answer_in_turn(*answers))
    await bench.run()
    record = bench.read_record()
    assert (record["agent"]["ended"], record["agent"]["turns"]) == (ended, turns)
    calls = sum(len(each.get("tool_calls", ())) for each in record["transcript"])
    assert len(contents(record)) == calls == record["agent"]["calls"]


async def test_a_conversation_that_fills_the_context_ends(tmp_path: Path) -> None:
    small = FakeModelInfo(chat_template=TEMPLATE, context_length=1000)
    line = agent_line(body={"max_tokens": 100})
    bench = make_bench(tmp_path, line, script=lambda prompt: call("add", number=1), model_info=small)
    await bench.run()
    record = bench.read_record()
    assert record["agent"]["ended"] == "context" and record["agent"]["turns"] > 2
    assert record["transcript"][-1]["role"] == "tool"


async def test_seconds_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer must come; later the conversation ends with what it has."""
    wait = asyncio.timeout  # of which only the first answer of line a gets its time
    monkeypatch.setattr(asyncio, "timeout", lambda limit: wait(600 if limit == 600 else 0.1))
    bench = make_bench(tmp_path, agent_line("a", seconds=600), agent_line("b", seconds=500), script=ADDS)
    bench.waits = lambda prompt: "Question b" in prompt or "<|im_start|>tool\n" in prompt
    await bench.run()
    (failed,) = read(bench.paths.errors)
    assert failed["custom_id"] == "b" and "agent.seconds: the first answer took" in failed["error"]["message"]
    (record,) = read(bench.paths.out)
    assert record["agent"]["ended"] == "seconds" and record["agent"]["state"] == {"total": 2}


async def test_a_simulated_user(tmp_path: Path) -> None:
    """It has the assistant's part in its own requests, and sees no tool calls."""
    user = {"prompt": "You are Ann. Say BYE at the end.", "stop": "BYE", "generation": {"max_tokens": 50}}

    def script(prompt: str) -> str:
        if "You are Ann" in prompt:
            return "BYE" if "The total is 7" in prompt else "Add seven, please."
        if "Add seven" not in prompt:
            return "What can I add?"
        return (
            "The total is 7."
            if "<|im_start|>tool" in prompt.partition("assistant")[2]
            else call("add", number=7)
        )

    bench = make_bench(tmp_path, agent_line(user=user), script=script)
    await bench.run()
    record = bench.read_record()
    assert record["agent"] == {"ended": "user", "turns": 3, "calls": 1, "state": {"total": 7}}
    said = [(each["role"], each["content"]) for each in record["transcript"]]
    assert said == [
        ("assistant", "What can I add?"),
        ("user", "Add seven, please."),
        ("assistant", None),
        ("tool", "7"),
        ("assistant", "The total is 7."),
    ]
    prompt = bench.prompts[-1]
    assert "<|im_start|>user\nThe total is 7.<|im_end|>" in prompt and "tool_call" not in prompt
    assert "<|im_start|>assistant\nQuestion a<|im_end|>" in prompt


def buy_or_ask(prompt: str) -> str:
    """The script of both parts: the user asks twice, then ends."""
    if "You are Ann" in prompt:
        return ["Add seven.", "Add one.", "BYE"][prompt.count("<|im_start|>user\n") - 2]
    last = prompt.rpartition("<|im_start|>user\n")[2]
    if "<|im_start|>tool" in last or "Question" in last:
        return "What next?"
    return call("add", number=7 if "seven" in last else 1)


ANN = {"prompt": "You are Ann.", "stop": "BYE", "generation": {"max_tokens": 50}}


async def test_a_user_with_a_model_of_its_own(tmp_path: Path) -> None:
    """Each model is asked for its own part only, and the manifest has both. With another user, nothing goes
    on."""
    bench = make_bench(tmp_path, agent_line(user=ANN, body={"model": "agent"}), script=buy_or_ask)
    bench.user = "ann-8b"
    await bench.run()
    record = bench.read_record()
    assert record["agent"] == {"ended": "user", "turns": 5, "calls": 2, "state": {"total": 8}}
    assert len(bench.user_prompts) == 3 and all("You are Ann" in each for each in bench.user_prompts)
    assert len(bench.prompts) == 5 and not any("You are Ann" in each for each in bench.prompts)
    assert record["response"]["body"]["usage"]["completion_tokens"] == bench.client.output
    manifest = json.loads(bench.paths.manifest.read_text())
    assert manifest["user_model"] | {"path": "ann-8b", "fingerprint": "ann-8b"} == manifest["user_model"]
    bench.user = "bob-8b"
    with pytest.raises(JobError, match=r"the model of the user \(batch.user_model\) has changed"):
        await bench.run()
    bench.user = "ann-8b"
    await bench.run()
    assert bench.prompts == bench.user_prompts == []


@pytest.mark.parametrize("known", [0, 1, 2, 4, 7])
async def test_a_conversation_of_two_models_goes_on(
    tmp_path: Path, known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill it makes no finished answer of either model again, and has the same bytes."""
    bench = make_bench(tmp_path, agent_line(user=ANN), script=buy_or_ask)
    bench.user = "ann-8b"
    turns = await keep_turns(bench, monkeypatch)
    whole, requests = bench.paths.out.read_bytes(), len(bench.prompts) + len(bench.user_prompts)
    for path in (bench.paths.out, bench.paths.journal):
        path.unlink()
    steps = [json.loads(each)["step"]["kind"] for each in turns.splitlines()]
    bench.paths.turns.write_bytes(b"".join(turns.splitlines(keepends=True)[:known]))
    await bench.run()
    assert bench.paths.out.read_bytes() == whole and len(steps) == 10
    again = len(bench.prompts) + len(bench.user_prompts)
    assert again == requests - sum(kind != "tool" for kind in steps[:known])


async def test_tries_do_not_repeat_what_is_done(tmp_path: Path) -> None:
    """A turn that fails for a while is tried again; the turns before it are not."""
    bench = make_bench(tmp_path, agent_line(), script=ADDS)
    bench.no_sleep = True
    failures = iter([True, True, False])

    def script(prompt: str) -> str:
        from mlxrun.core.errors import Overloaded

        if "<|im_start|>tool\n2" in prompt and next(failures, False):
            raise Overloaded("for a while")
        return ADDS(prompt)

    bench.script = script
    assert (await bench.run()).exit_code == 0
    assert (tmp_path / "tools.py.calls").read_text() == "2\n3\n"
    assert bench.read_record()["agent"]["state"] == {"total": 5}


async def test_an_edited_agent_is_run_again(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, agent_line(), script=ADDS)
    await bench.run()
    await bench.run()
    assert bench.prompts == []
    write_job(tmp_path, [agent_line(max_turns=1)])
    await bench.run()
    assert bench.read_record()["agent"]["ended"] == "max_turns"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (agent_line(tools=[]), "agent needs `tools`, `mcp` or `user`"),
        (agent_line(max_turn=3), "agent.max_turn is not known (did you mean 'max_turns'?)"),
        (agent_line(max_turns=0), "agent.max_turns must be an integer from 1 on, not integer"),
        (agent_line(body={"n": 2}), "use seeds instead of n"),
        (agent_line(tools=[{"name": "f"}]), "agent.tools: a tool needs `function`"),
        (agent_line(user={"prompt": ""}), "agent.user needs a `prompt`"),
        (
            {"id": "c", "prompt": "x", "agent": {"tools": ["a.py:b"]}},
            "only /v1/chat/completions has tool calls",
        ),
        ({**chat("d", "x"), "agent": 3}, "agent must be an object, not integer"),
        (agent_line(body={"messages": 3}), "agent: the body needs a list of `messages`"),
        (agent_line(body={"messages": [3]}), "messages[0]: expected object"),
        (agent_line(body={"tools": 3}), "tools: "),
        (agent_line(body={"tools": [{"type": "web_search"}]}), "tools[0]"),
        (
            agent_line(tools=["tools.py:add"], sandbox="yes"),
            "agent.sandbox must be true, false or a list of paths",
        ),
    ],
)
async def test_lines_that_are_refused(tmp_path: Path, line: Any, says: str) -> None:
    bench = make_bench(tmp_path, line)
    assert (await bench.run()).exit_code == 1
    assert says in bench.read_record()["error"]["message"]


async def test_a_stopped_job_goes_on_inside_an_answer(tmp_path: Path) -> None:
    """As after Ctrl-C: the tokens of the answer under way are kept too."""
    bench = make_bench(tmp_path, agent_line(), script=ADDS)
    await bench.run()
    whole = bench.paths.out.read_bytes()
    for path in (bench.paths.out, bench.paths.journal):
        path.unlink()
    first = len(call("add", number=2))

    def stop(prompt: str) -> bool:
        if bench.client.output > first + 10:
            bench.stop.request()
        return bench.client.output > first + 10

    bench.waits = stop
    with pytest.raises(Interrupted):
        await bench.run()
    bench.waits = lambda prompt: False
    await bench.run()
    assert bench.paths.out.read_bytes() == whole and len(bench.prompts) == 2
    (known,) = bench.client.answered.values()
    assert known > 10


async def test_a_stopped_job_kills_the_tool_that_runs(tmp_path: Path) -> None:
    write_tools(tmp_path, COUNTER.replace("    return", "    while state['total'] > 4: pass\n    return"))
    bench = AgentBench(write_job(tmp_path, [agent_line()]), script=ADDS)
    calls = tmp_path / "tools.py.calls"

    async def stop() -> None:
        await until(lambda: calls.exists() and calls.read_text() == "2\n3\n")
        bench.stop.request()

    with pytest.raises(Interrupted):
        await asyncio.gather(bench.run(), stop())
    write_tools(tmp_path)
    await bench.run()
    assert bench.read_record()["agent"]["state"] == {"total": 5} and calls.read_text() == "2\n3\n3\n"
