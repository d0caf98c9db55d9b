"""Values that are nested to any depth, at each place where users, clients and models write some.

Depths just below the one that Python's parser refuses matter most: what encodes, copies or compares a value
that was read gives up earlier than the parser.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxrun.cli.main import main
from mlxrun.core import limited_json
from mlxrun.evals.exports.inspect_log import _build_call
from mlxrun.evals.suites.suite_manifest import read_suite_manifest
from mlxrun.jobs.scoring.answer_text import extract_answer
from mlxrun.jobs.scoring.answer_values import MISSING, find_json
from tests.cli.conftest import fake_engine  # noqa: F401
from tests.helpers.batch_fakes import chats, write_job
from tests.helpers.parser_driver import make_tool_call_parser, run_parser
from tests.helpers.storm_counts import count
from tests.robustness.test_server_fuzz import site

DEPTHS = (101, 330, 480, 920, 940, 980, 100_000)
ASK = '"messages": [{"role": "user", "content": "x"}]'
TOOL = '{"type": "function", "function": {"name": "f", "parameters": {"a": %s}}}'
USE = '{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {"a": %s}}]}'
LINES = {
    "prompt": '"prompt": %s',
    "messages": '"messages": %s',
    "content": '"messages": [{"role": "user", "content": %s}]',
    "arguments": f'{ASK}, "chat_template_kwargs": {{"a": %s}}',
    "tools": f'{ASK}, "tools": [{TOOL}]',
    "metadata": f'{ASK}, "metadata": {{"a": %s}}',
    "expected": f'{ASK}, "eval": {{"match": "json", "expected": %s}}',
    "judged": f'{ASK}, "eval": {{"match": "judge", "expected": %s}}',
    "const": f'{ASK}, "eval": {{"match": "json_schema", "expected": {{"const": %s}}}}',
    "properties": f'{ASK}, "eval": {{"match": "json_schema", "expected": {{"properties": {{"a": %s}}}}}}',
}
BODIES = {
    "/v1/chat/completions": f'{{{ASK}, "tools": [{TOOL}]}}',
    "/v1/completions": '{"prompt": %s}',
    "/v1/messages": f'{{"model": "claude-x", "max_tokens": 5, "messages": [{USE}]}}',
    "/v1/responses": '{"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"a": %s}}]}',
    "/v1/messages/batches": '{"requests": [{"custom_id": "a", "params": {"model": "claude-x", '
    f'"max_tokens": 5, "messages": [{USE}]}}}}]}}',
    "/v1/conversations": '{"items": %s}',
    "/tokenize": '{"prompt": %s}',
}


def nest(levels: int, kind: str = "array") -> str:
    return "[" * levels + "]" * levels if kind == "array" else '{"a":' * levels + "1" + "}" * levels


@pytest.mark.usefixtures("fake_engine")
def test_deep_lines_contain_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = [
        f'{{"id": "{name} {levels} {kind}", {text % nest(levels, kind)}}}'
        for name, text in LINES.items()
        for levels in DEPTHS
        for kind in ("array", "object")
    ]
    job, number = write_job(tmp_path, [*chats(2), *deep]), len(deep)
    assert main(["batch", str(job)]) == 1
    out, err = capsys.readouterr()
    assert f"2 of {number + 2} lines done" in out and "Traceback" not in err
    errors = [json.loads(line)["error"] for line in (tmp_path / "job.errors.jsonl").read_text().splitlines()]
    assert len(errors) == number
    assert {each["message"] for each in errors} == {
        "not JSON that can be read: nested too deeply: more than 100 levels"
    }
    count("deep lines", number)


@pytest.mark.usefixtures("fake_engine")
def test_without_the_limit_a_deep_line_ends_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation twin: whatever Python's parser takes is read."""
    monkeypatch.setattr(limited_json, "MAX_DEPTH", 10**6)
    job = write_job(tmp_path, [*chats(2), f'{{"id": "deep", {LINES["const"] % nest(480)}}}'])
    assert main(["batch", str(job)]) == 3
    assert "RecursionError" in capsys.readouterr().err


async def test_deep_bodies_are_refused(tmp_path: Path) -> None:
    async with site(tmp_path) as s:
        for path, body in BODIES.items():
            for levels in DEPTHS:
                for kind in ("array", "object"):
                    data = (body % nest(levels, kind)).encode()
                    headers = {"Content-Type": "application/json"}
                    async with s.http.post(s.url + path, data=data, headers=headers) as response:
                        text = await response.text()
                        assert response.status in (400, 413), (path, levels, text[:200])
                        if levels < 10_000:  # larger bodies may be refused for their size
                            assert "nested too deeply: more than 100 levels" in text, (path, text[:200])
                    count("deep bodies")


YAML = {
    "config": "model: {chat_template_args: {x: %s}}\n",
    "unknown key": "a: %s\n",
    "suite": "models: {a: {model: {path: x}}}\ntasks: {t: {data: d.jsonl, eval: {expected: %s}}}\n",
}


@pytest.mark.parametrize("name", YAML)
def test_deep_yaml_is_refused_where_it_is_too_deep(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for levels in (101, 330, 480):
        for text in ("[" * levels + "]" * levels, "{a: " * levels + "1" + "}" * levels):
            path = tmp_path / "c.yaml"
            path.write_text(YAML[name] % text)
            command = ["eval", str(path), "--dry-run"] if name == "suite" else ["config", "check", str(path)]
            assert main(command) == 2
            err = capsys.readouterr().err
            assert "nested too deeply: more than 100 levels" in err and "Traceback" not in err, err[:500]
            count("deep configs")


def test_deep_values_of_a_table_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for levels in (*DEPTHS, 900):
        for column in (json.dumps(nest(levels)), nest(levels)):
            table = tmp_path / "t.jsonl"
            table.write_text(f'{{"q": "x", "e": {column}}}\n')
            command = ["job", "make", str(table), "--prompt", "{{ q }}", "--expected", "e", "--match", "json"]
            assert main([*command, "-o", str(tmp_path / "job.jsonl")]) == 2
            err = capsys.readouterr().err
            assert "nested too deeply: more than 100 levels" in err and "Traceback" not in err, err[:500]
            assert not (tmp_path / "job.jsonl").exists()
            count("deep tables")


@pytest.mark.parametrize("arguments", [*map(nest, DEPTHS), "9" * 10_000, '{"a": ' + "9" * 10_000 + "}"])
def test_arguments_that_cannot_be_read_stay_text(arguments: str) -> None:
    """What a model wrote as arguments is scored, and exported, as it is."""
    call: dict[str, Any] = {"id": "a", "function": {"name": "f", "arguments": arguments}}
    body = {"choices": [{"message": {"content": None, "tool_calls": [call]}}]}
    assert json.loads(extract_answer(body)) == {"name": "f", "arguments": arguments}
    assert _build_call(call)["parse_error"].startswith("the arguments are no JSON")


@pytest.mark.parametrize("levels", DEPTHS)
def test_a_deep_answer_is_no_json(levels: int) -> None:
    assert find_json(f"It is {nest(levels)}.", containers_only=True) is MISSING
    assert find_json(f"It is {nest(levels, 'object')}.", containers_only=True) is MISSING
    assert find_json("It is [[1]].", containers_only=True) == [[1]]


@pytest.mark.parametrize(
    "value",
    [
        *("0x" + "f" * 10_000, "[0x" + "f" * 10_000 + "]", "9" * 10_000, nest(195), nest(5_000)),
        *('{"nights": "' + "9" * 10_000 + '"}', "'" + "9" * 10_000 + "'"),
    ],
)
@pytest.mark.parametrize("family", ["pythonic", "ui_tars", "minicpm5", "hermes", "qwen3_coder"])
def test_values_that_a_model_writes_do_not_end_its_request(family: str, value: str) -> None:
    texts = {
        "pythonic": f"[book(nights={value}, free={value})]",
        "ui_tars": f"Action: book(nights={value}, free={value})",
        "minicpm5": f'<function name="book"><param name="where">{value}</param></function>',
        "hermes": f'<tool_call>{{"name": "book", "arguments": {{"free": {value}}}}}</tool_call>',
        "qwen3_coder": f"<tool_call><function=book><parameter=free>{value}</parameter></function>"
        "</tool_call>",
    }
    try:
        run_parser(lambda: make_tool_call_parser(family), [texts[family]])
    except ValueError as error:  # only of the check of the items: Python cannot read a number of JSON
        assert error.__traceback__ is not None and "4300 digits" in str(error)
        last = error.__traceback__
        frames = [last.tb_frame.f_code.co_name]
        while last.tb_next is not None:
            last = last.tb_next
            frames.append(last.tb_frame.f_code.co_name)
        assert "_make_item" in frames
    count("odd values of tool calls")


def test_the_history_of_a_suite_is_lost_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "suite.json").write_text("[" * 100_000)
    assert read_suite_manifest(tmp_path / "suite.json") is None
    assert "cannot be read" in caplog.text
