"""Tool loops as a key of a suite's task, with a scripted engine: the example of the documentation, and what
is found before a model is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlxrun.cli.main import main
from mlxrun.evals.replay import rebuild_config
from mlxrun.evals.run_folders.run_folder import RunFolder
from tests.helpers.agent_bench import COUNTER, AgentSuiteBench, answer_in_turn, call
from tests.helpers.batch_fakes import read
from tests.helpers.suite_files import find_problems, write_suite

JOBS = Path(__file__).parents[3] / "jobs"
SHORT = """\
models: {tiny: }
tasks:
  sums:
    rows: [{numbers: "2 and 3", sum: 5}, {numbers: "1 and 1", sum: 3}]
    prompt: "Add {{ numbers }}."
    expected: sum
    match: number
    agent:
      tools: [tools.py:add]
      state: {total: 0}
"""
FIVE = answer_in_turn(call("add", number=2), call("add", number=3), "It is 5.")


def read_records(bench: AgentSuiteBench, cell: str) -> list[dict[str, Any]]:
    return read(bench.folder / cell / "job.out.jsonl")


async def test_a_task_with_tools_has_ten_lines(tmp_path: Path) -> None:
    """Fifteen are enough."""
    assert len(SHORT.splitlines()) <= 15
    bench = AgentSuiteBench(write_suite(tmp_path, SHORT, tools_py=COUNTER), script=FIVE)
    assert await bench.run() == 0
    first, second = read_records(bench, "tiny/sums/seed-0")
    assert [first["eval"]["score"], second["eval"]["score"]] == [1, 0]
    assert first["agent"] == {"ended": "answer", "turns": 3, "calls": 2, "state": {"total": 5}}
    line = json.loads((bench.folder / "tiny/sums/seed-0/job.jsonl").read_text().splitlines()[0])
    assert line["agent"]["folder"] == "../../../.." and line["agent"]["digests"].keys() == {"tools.py"}
    assert line["tools"][0]["function"]["description"] == "Add a number to the total."


async def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    """It has at most forty lines, and does what its page says."""
    for name in ("shop.yaml", "shop.py"):
        shutil.copy(JOBS / name, tmp_path)
    assert sum(len((JOBS / name).read_text().splitlines()) for name in ("shop.yaml", "shop.py")) <= 40

    def script(prompt: str) -> str:
        first = [call("find_price", fruit="kiwi"), call("buy", fruit="apple", count=9)]
        last = [call("buy", fruit="apple", count=2), call("buy", fruit="pear", count=1), "Done."]
        return answer_in_turn(*first, *last)(prompt)

    bench = AgentSuiteBench(tmp_path / "shop.yaml", script=script)
    assert await bench.run() == 0
    found = {each["custom_id"]: each for each in read_records(bench, "qwen/shop/seed-0")}
    results = [each["content"] for each in found["row-1"]["transcript"] if each["role"] == "tool"]
    assert results == ["There are only apple, pear.", "There are only 5.", "bought", "bought"]
    assert [found[name]["eval"]["score"] for name in ("row-1", "row-2")] == [1, 0]
    assert found["row-1"]["agent"]["state"]["stock"] == {"apple": 3, "pear": 2}
    assert main(["report", str(bench.folder)]) == 0
    assert "There are only apple, pear." in (bench.folder / "report.html").read_text()


async def test_edited_tools_run_their_lines_again(tmp_path: Path) -> None:
    path = write_suite(tmp_path, SHORT, tools_py=COUNTER)
    bench = AgentSuiteBench(path, script=FIVE)
    await bench.run()
    bench.prompts.clear()
    await bench.run()
    assert bench.prompts == []
    write_suite(tmp_path, SHORT, tools_py=COUNTER.replace("+ number", "+ 10 * number"))
    await bench.run()
    assert read_records(bench, "tiny/sums/seed-0")[0]["agent"]["state"] == {"total": 50}


async def test_templates_fill_state_and_user(tmp_path: Path) -> None:
    text = SHORT.replace("{total: 0}", '{total: "{{ sum }}", name: "n{{ sum }}"}')
    text += '      user: {prompt: "You are {{ numbers }}.", stop: BYE}\n'
    path = write_suite(tmp_path, text, tools_py=COUNTER)
    bench = AgentSuiteBench(path, script=lambda prompt: "BYE" if "You are" in prompt else "What?")
    assert await bench.run() == 0
    record = read_records(bench, "tiny/sums/seed-0")[0]
    assert record["agent"] == {"ended": "user", "turns": 1, "calls": 0, "state": {"total": 5, "name": "n5"}}
    assert any("You are 2 and 3." in prompt for prompt in bench.prompts)


async def test_a_user_with_a_model_of_its_own(tmp_path: Path) -> None:
    """It is loaded beside the cell's, and only for tasks that have it. Its place is relative to the suite."""
    (tmp_path / "ann").mkdir()
    (tmp_path / "ann/config.json").write_text("{}")
    text = SHORT + '      user: {prompt: "You are Ann.", stop: BYE, model: ./ann}\n'
    text += '  plain: {rows: [{a: b}], prompt: "{{ a }}", expected: a}\n'
    bench = AgentSuiteBench(
        write_suite(tmp_path, text, tools_py=COUNTER),
        script=lambda prompt: "BYE" if "You are" in prompt else "What?",
    )
    assert await bench.run() == 0
    ann = str(tmp_path / "ann")
    assert bench.loads == {"embedded": 2, ann: 1}
    assert len(bench.model_prompts[ann]) == 2 and all(
        "You are Ann" in each for each in bench.model_prompts[ann]
    )
    assert not any("You are Ann" in each for each in bench.model_prompts["embedded"])
    assert "model" not in read_records(bench, "tiny/sums/seed-0")[0]["agent"]
    run = RunFolder.open(bench.folder / "tiny/sums/seed-0/job.out.jsonl")
    assert run.manifest["user_model"]["path"] == rebuild_config(run).batch.user_model == ann
    assert "user_model" not in RunFolder.open(bench.folder / "tiny/plain/seed-0/job.out.jsonl").manifest
    bench.model_prompts.clear()
    assert await bench.run() == 0 and bench.model_prompts == {}


async def test_a_judge_sees_transcript_and_state(tmp_path: Path) -> None:
    prompt = "Judge {{ transcript | length }} messages, {{ state.total }}."
    judge = f'{{prompt: "{prompt}", verdict: {{choices: {{A: 1, B: 0}}}}}}'
    text = SHORT.replace("    expected: sum\n    match: number\n", f"    judge: {judge}\n")
    path = write_suite(tmp_path, text, tools_py=COUNTER)
    bench = AgentSuiteBench(path, script=lambda prompt: "A" if "Judge" in prompt else FIVE(prompt))
    assert await bench.run() == 0
    assert "<|im_start|>user\nJudge 5 messages, 5.<|im_end|>" in bench.prompts[-1]
    assert read_records(bench, "tiny/sums/seed-0")[0]["eval"]["score"] == 1


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[tools.py:add]", "[]", "tasks.sums.agent: agent needs `tools`, `mcp` or `user`"),
        (
            "tools.py:add",
            "tools.py:gone",
            "tasks.sums.agent: tool '{folder}/tools.py:gone': {folder}/tools.py has",
        ),
        ("tools.py:add", "gone.py:add", "cannot be imported: there is no such file"),
        ("[tools.py:add]", "[{name: add}]", "tasks.sums.agent: agent.tools: a tool needs `function`"),
        (
            "state:",
            "user: {prompt: P, generation: {top: 3}}\n      state:",
            "agent.user.generation.top: unknown",
        ),
        (
            "state:",
            "user: {prompt: P, model: ./gone}\n      state:",
            "suite.yaml:10:32: batch.user_model: {folder}/gone is neither a folder",
        ),
        ("state:", "max_turns: 0\n      state:", "agent.max_turns: "),
        (
            "state:",
            "files: [gone]\n      state:",
            "tasks.sums.agent: agent.files: {folder}/gone: there is no",
        ),
        (
            "state:",
            "files: [.]\n      state:",
            "agent.files: '.' is the folder of the suite, or one above it",
        ),
        ("state:", "files: [/a]\n      state:", "agent.files: '/a' is an absolute path; name what the tools"),
        ("state:", "mcp: '\"a'\n      state:", "the MCP server '\"a' cannot be used: ValueError: No closing"),
        ("state:", "turns: 3\n      state:", "tasks.sums.agent.turns: unknown key"),
        ("    match: number\n", "    choices: [a, b]\n", "tasks.sums.agent: only chats have tool calls"),
        (
            "    match: number\n",
            "    generation: {n: 2}\n",
            "generation.n: for several conversations, use `seeds`",
        ),
        ("{total: 0}", '{total: "{{ gone }}"}', "rows has no column 'gone'"),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = write_suite(tmp_path, SHORT.replace(old, new), tools_py=COUNTER)
    found = "\n".join(find_problems(path))
    assert says.replace("{folder}/", "") in found, found


def test_the_page_shows_the_example() -> None:
    page = (JOBS.parent / "docs/agent-evals.md").read_text()
    assert all((JOBS / name).read_text() in page for name in ("shop.yaml", "shop.py"))
