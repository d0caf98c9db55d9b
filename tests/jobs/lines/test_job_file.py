"""Reading job files: both forms, every kind of bad line, the index, bounded memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.core.errors import JobError
from mlxrun.jobs.lines.job_file import CHAT, BadLine, JobLine, RawLine, check_job_file, parse_line
from mlxrun.jobs.lines.line_keys import LineKeys
from mlxrun.jobs.scoring.eval_spec import EvalSpec
from tests.helpers.batch_fakes import chat

GOOD = chat("a", "hi", max_tokens=3)
NEEDED = (
    "a line needs custom_id, method, url and body, or id and one of prompt, messages, input, query, file "
)


def parse(value: Any) -> JobLine | BadLine:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return parse_line(RawLine(7, 0, data))


def test_both_forms() -> None:
    """OpenAI's form as it is; in the short form what stands beside the prompt is the body."""
    line = parse(GOOD)
    assert line == JobLine(7, "a", "/v1/chat/completions", GOOD["body"])
    short = {"id": "b", "prompt": "x", "seed": 1, "eval": {"expected": "y", "match": "regex", "group": "g"}}
    assert parse(short) == JobLine(
        7, "b", "/v1/completions", {"prompt": "x", "seed": 1}, EvalSpec("y", "regex", "g"), id_key="id"
    )
    messages = [{"role": "user", "content": "x"}]
    assert parse({"id": "c", "messages": messages, "stream": False}) == JobLine(
        7, "c", "/v1/chat/completions", {"messages": messages, "stream": False}, id_key="id"
    )
    assert parse({"id": "d", "input": "x", "instructions": "y"}) == JobLine(
        7, "d", "/v1/responses", {"input": "x", "instructions": "y"}, id_key="id"
    )
    assert parse({"id": "e", "url": "/v1/messages", "messages": messages, "max_tokens": 3}) == JobLine(
        7, "e", "/v1/messages", {"messages": messages, "max_tokens": 3}, id_key="id"
    )


@pytest.mark.parametrize(
    "value, reason, param",
    [
        (b"{", "not JSON: Expecting property name enclosed in double quotes at column 2", None),
        (b'{"id": "a" "prompt": "b"}', "not JSON: Expecting ',' delimiter at column 12", None),
        (b'{"id": "a', "not JSON: Unterminated string starting at column 8", None),
        (b'{"id": "a", "prompt": NaN}', "not JSON: NaN is not a JSON number", None),
        (b'{"id": "a", "prompt": "", "seed": [-1e400]}', "not JSON: the number -1e400 is too large", None),
        (b'{"id": "a", "id": "b", "prompt": ""}', "not JSON: the key 'id' occurs twice", None),
        (b'{"id": "a\xff"}', "not UTF-8: byte 0xff at byte 10", None),
        (b'{"id": "a", "prompt": "\\ud800"}', "contains a lone UTF-16 surrogate", None),
        (b"[" * 100_000, "not JSON that can be read: nested too deeply", None),
        (b"9" * 5000, "not JSON that can be read: a number has thousands of digits", None),
        (b"\xff\xfe{\x00", "not UTF-8: byte 0xff at byte 1", None),
        (["a"], "a line must be a JSON object, not an array", None),
        ("a", "a line must be a JSON object, not a string", None),
        ({}, "a line needs custom_id, method, url and body, or id and one of prompt", None),
        ({"id": "a", "prompt": "x", "messages": []}, "a line needs custom_id, method", None),
        ({"prompt": "x"}, "id is missing", "id"),
        ({"id": 5, "prompt": "x"}, "id must be a string that is not empty, not 5", "id"),
        ({**GOOD, "custom_id": ""}, 'custom_id must be a string that is not empty, not ""', "custom_id"),
        ({**GOOD, "custom_id": None}, "custom_id must be a string that is not empty, not null", "custom_id"),
        ({**GOOD, "metadata": {}}, "unknown key 'metadata'; a line takes custom_id", "metadata"),
        ({"custom_id": "a", "method": "POST", "url": "/v1/completions"}, "body is missing", "body"),
        ({"custom_id": "a", "body": {}}, "url is missing", "url"),
        ({"custom_id": "a", "url": CHAT, "body": {}}, "method is missing", "method"),
        ({**GOOD, "method": "GET"}, 'method must be POST, not "GET"', "method"),
        ({**GOOD, "url": "/v1/moderations"}, "url must be one of /v1/chat/completions, /v1/compl", "url"),
        ({"id": "a", "url": "/v1/moderations", "input": "x"}, "url must be one of", "url"),
        ({"id": "a", "url": "/v1/nothing", "body": {}}, "url must be one of", "url"),
        ({"id": "a", "url": CHAT, "body": {}}, "custom_id is missing; id is for lines", "custom_id"),
        ({"url": "/v1/completions"}, NEEDED + "(none given)", None),
        ({"id": "a", "prompt": "x", "input": "y"}, NEEDED + "(prompt and input given)", None),
        ({**GOOD, "url": []}, "url must be one of", "url"),
        ({**GOOD, "body": [1]}, "body must be an object, not an array", "body"),
        ({**GOOD, "body": {"stream": True}}, "stream is not supported in a job", "stream"),
        ({**GOOD, "eval": 5}, "eval must be an object, not int", "eval"),
        ({**GOOD, "eval": {"match": "exact"}}, "eval.expected is missing", "eval"),
        ({**GOOD, "eval": {"expected": "x", "mtach": "exact"}}, "eval.mtach is not known", "eval"),
        ({**GOOD, "eval": {"expected": "x", "match": "fuzzy"}}, "eval.match must be one of exact", "eval"),
        ({**GOOD, "eval": {"expected": "x", "match": []}}, "eval.match must be one of exact", "eval"),
        ({**GOOD, "eval": {"expected": "x", "group": 3}}, "eval.group must be a string", "eval"),
        (
            {**GOOD, "eval": {"expected": 3}},
            "eval.expected must be a string, or a list of strings, because eval.match is exact",
            "eval",
        ),
        ({**GOOD, "eval": {"expected": "(", "match": "regex"}}, "eval.expected is not a regular", "eval"),
        ({**GOOD, "eval": {"expected": "x", "match": "number"}}, "eval.expected must be a number", "eval"),
    ],
)  # fmt: skip
def test_bad_lines(value: Any, reason: str, param: str | None) -> None:
    """What is wrong, and where."""
    found = parse(value)
    assert isinstance(found, BadLine)
    assert found.reason.startswith(reason)
    assert found.param == param


@pytest.mark.parametrize(
    ("value", "param", "spoils"),
    [
        ({**GOOD, "body": {"stream": True}}, "stream", False),
        ({**GOOD, "body": [1]}, "body", False),
        ({**GOOD, "method": "GET"}, "method", False),
        ({**GOOD, "metadata": {}}, "metadata", False),
        ({**GOOD, "id": "b"}, "id", False),
        ({**GOOD, "eval": 5}, "eval", False),
        ({"id": "a"}, None, False),
        ({"id": "a", "messages": [], "prompt": ""}, None, False),
        (b"{", None, True),
        (["a"], None, True),
        ({**GOOD, "custom_id": 7, "id": "b"}, "custom_id", True),
        ({**GOOD, "custom_id": "", "id": "b"}, "custom_id", True),
        ({**GOOD, "custom_id": 7, "method": "GET", "more": 1}, "custom_id", True),
        ({**GOOD, "url": "/v1/completions"}, "url", True),
        ({**GOOD, "url": "/v1/completions", "body": {"stream": True}, "method": "GET", "x": 1}, "url", True),
        ({"custom_id": "a", "method": "GET", "body": 3}, "url", True),
        ({"id": "a", "url": "/v1/completions", "messages": [], "prompt": ""}, "url", True),
        ({"id": "a", "input": "x"}, "url", True),
        ({"messages": []}, "id", True),
    ],
)
def test_what_spoils_a_whole_file(value: Any, param: str | None, spoils: bool) -> None:
    """It is found even if the line has other problems."""
    line = value if isinstance(value, bytes) else json.dumps(value).encode()
    found = parse_line(RawLine(7, 0, line), CHAT)
    assert isinstance(found, BadLine)
    assert (found.param, found.spoils_file) == (param, spoils)
    assert found.spoils_file or found.custom_id == "a"


def test_bad_lines_keep_what_can_be_read() -> None:
    wanted = {"expected": "x", "group": "g"}
    found = parse({**GOOD, "url": "/nope", "eval": wanted})
    assert isinstance(found, BadLine)
    assert (found.custom_id, found.eval) == ("a", EvalSpec("x", "exact", "g"))


def test_keys(tmp_path: Path) -> None:
    """A key follows the meaning of a line; not its number, its form, the order of keys or its eval."""
    keys = LineKeys("s", tmp_path, 10**6)

    def key(value: Any, keys: LineKeys = keys) -> bytes:
        line = parse(value)
        assert isinstance(line, JobLine)
        return keys.compute_key(line)

    base = key(GOOD)
    same = [{**GOOD, "eval": {"expected": "x"}}, dict(reversed(GOOD.items())), {"id": "a", **GOOD["body"]}]
    assert {key(value) for value in same} == {base}
    body = GOOD["body"]
    other = [
        {**GOOD, "custom_id": "b"},
        {**GOOD, "body": {**body, "seed": 1}},
        {**GOOD, "url": "/v1/completions"},
    ]
    assert base not in {key(value) for value in other}
    assert key(GOOD, LineKeys("t", tmp_path, 10**6)) != base


def test_equal_lines_of_two_batches_have_other_keys(tmp_path: Path) -> None:
    """Also lines that are not valid; the same batch has the same ones, and a command none of a batch."""
    line = parse(GOOD)
    assert isinstance(line, JobLine)

    def keys(*batch: str) -> tuple[bytes, bytes]:
        made = LineKeys("s", tmp_path, 10**6, *batch)
        return made.compute_key(line), made.compute_bad_key(b"{", "not JSON")

    assert keys("batch_1") == keys("batch_1")
    assert keys() == keys("")
    assert len({*keys(), *keys("batch_1"), *keys("batch_2")}) == 6


@pytest.mark.parametrize(
    "body",
    ['{"prompt": "a", "prompt": "b"}', '{"seed": NaN}', '{"seed": 1e400}', '{"prompt": "\\ud800"}'],
)
def test_refused_json_keeps_its_eval(body: str) -> None:
    """So that its line counts as failed in its group; an `eval` that is itself refused does not count."""
    line = '{"custom_id": "a", "eval": {"expected": EXPECTED, "group": "g"}, "body": BODY}'.replace(
        "BODY", body
    )
    found = parse(line.replace("EXPECTED", '"x"').encode())
    assert isinstance(found, BadLine) and found.eval == EvalSpec("x", "exact", "g")
    for expected in ("NaN", "1e400", '"\\ud800"', "3"):
        found = parse(line.replace("EXPECTED", expected).encode())
        assert isinstance(found, BadLine) and found.eval is None


@pytest.mark.parametrize("data", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_job_files_without_lines(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "job.jsonl"
    for says in ("cannot read the job file", "the job has no lines"):
        with pytest.raises(JobError, match=says):
            check_job_file(path)
        path.write_bytes(data)
    path.write_bytes(data + b"x")
    check_job_file(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from(
    ["custom_id", "id", "method", "url", "body", "prompt", "messages", "eval", "stream", "x"]
)
values = json_values | st.sampled_from(["POST", "/v1/completions", "a"])


@given(st.binary(max_size=60) | st.dictionaries(fields, values, max_size=6))
def test_any_line_is_a_line_or_a_bad_line(value: Any) -> None:
    """No input raises, and every reason is a sentence that fits a record."""
    found = parse(value)
    if isinstance(found, BadLine):
        assert found.reason.encode()
    else:
        assert found.custom_id and found.url.startswith("/v1/") and isinstance(found.body, dict)
