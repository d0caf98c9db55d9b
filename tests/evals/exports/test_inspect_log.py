"""Parts of Inspect's log; test_export_files.py has whole logs read by Inspect itself."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from mlxrun.evals.exports.exported_run import ExportedRun
from mlxrun.evals.exports.inspect_log import build_header, build_sample, list_samples, write_inspect_log
from mlxrun.evals.run_folders.run_line import RunLine
from mlxrun.jobs.lines.job_file import JobLine
from tests.helpers.agent_bench import AgentBench, agent_line, answer_in_turn, call, write_tools
from tests.helpers.batch_fakes import Bench, chat, write_job
from tests.helpers.export_fakes import LINES, finish_rich_job, open_export

CHAT = "/v1/chat/completions"


def make_sample(run: ExportedRun, body: dict[str, Any], *choices: dict[str, Any]) -> dict[str, Any]:
    record = {"custom_id": "a", "response": {"body": {"choices": list(choices)}}, "error": None}
    return build_sample(run, RunLine("a", 1, JobLine(1, "a", CHAT, body), record))


async def test_tool_calls_reasoning_and_images(tmp_path: Path) -> None:
    run = await finish_rich_job(tmp_path)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    body = {"messages": [{"role": "user", "content": [image, {"type": "text", "text": "Look."}]}]}
    good = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    bad = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}
    message = {"content": None, "reasoning_content": "Hm.", "tool_calls": [good, bad]}
    sample = make_sample(run, body, {"message": message, "finish_reason": "tool_calls"})
    assert sample["input"] == [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": "data:image/png;base64,AA"},
                {"type": "text", "text": "Look."},
            ],
        }
    ]
    sound = {"type": "audio_url", "audio_url": {"url": "a.mp3"}}
    (heard,) = make_sample(run, {"messages": [{"role": "user", "content": [sound]}]})["input"]
    assert heard["content"] == [{"type": "audio", "audio": "a.mp3", "format": "mp3"}]
    (choice,) = sample["output"]["choices"]
    assert choice["stop_reason"] == "tool_calls" and sample["metadata"]["group"] == "all"
    assert choice["message"]["content"] == [
        {"type": "reasoning", "reasoning": "Hm."},
        {"type": "text", "text": ""},
    ]
    first, second = choice["message"]["tool_calls"]
    assert (first["function"], first["arguments"]) == ("f", {"a": 1})
    assert second["arguments"] == {} and "no JSON" in second["parse_error"]


async def test_a_role_that_inspect_does_not_have_is_named_in_the_text(tmp_path: Path) -> None:
    run = await finish_rich_job(tmp_path)
    body = {"messages": [{"role": "developer", "content": "Be brief."}], "tools": [{"type": "function"}]}
    found = make_sample(run, body, {"message": {"content": "ok"}, "finish_reason": "stop"})["input"]
    assert [message["role"] for message in found] == ["user", "system"]
    assert found[0]["content"].startswith("[tools]\n")


async def test_shared_settings_are_in_the_plan(tmp_path: Path) -> None:
    settings = {"temperature": 0, "stop": "x", "n": 2, "max_completion_tokens": 4}
    lines = [chat(name, name, {"expected": name}, **settings) for name in ("a", "b")]
    bench = Bench(write_job(tmp_path, lines))
    await bench.run()
    config = build_header(open_export(bench.job))["plan"]["config"]
    assert config == {"temperature": 0, "stop_seqs": ["x"], "num_choices": 2, "max_tokens": 4}


async def test_the_parts_of_a_zip_file(tmp_path: Path) -> None:
    run = await finish_rich_job(tmp_path)
    write_inspect_log(run, tmp_path / "log.eval")
    with zipfile.ZipFile(tmp_path / "log.eval") as archive:
        names = archive.namelist()
        assert {"header.json", "summaries.json", "_journal/start.json"} <= set(names)
        assert sum(name.startswith("samples/") for name in names) == len(LINES)
        header = json.loads(archive.read("header.json"))
    assert "samples" not in header and header["version"] == 2
    write_inspect_log(run, tmp_path / "log.json")
    found = json.loads((tmp_path / "log.json").read_text())
    assert {key: value for key, value in found.items() if key != "samples"} == header
    assert len(found["samples"]) == len(LINES)


async def test_a_conversation_with_tools(tmp_path: Path) -> None:
    """Its messages are those of the prompt and of the transcript, its store the state."""
    write_tools(tmp_path)
    wanted = {"expected": "2", "match": "contains"}
    bench = AgentBench(write_job(tmp_path, [agent_line(wanted=wanted)]))
    bench.script = answer_in_turn(call("add", number=2), "It is 2.")
    await bench.run()
    run = open_export(bench.job)
    (sample,) = list_samples(run)
    assert [each["role"] for each in sample["messages"]] == ["user", "assistant", "tool", "assistant"]
    question, asking, result, answer = sample["messages"]
    assert asking["tool_calls"][0]["arguments"] == {"number": 2} and answer["content"] == "It is 2."
    assert result["tool_call_id"] == asking["tool_calls"][0]["id"] and result["function"] == "add"
    assert sample["store"] == {"total": 2} and sample["metadata"]["ended"] == "answer"
