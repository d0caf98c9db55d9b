"""Reading job files: both forms, every kind of bad line, the index, bounded memory."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.batch.job_file import BadLine, JobLine, RawLine, parse_line
from mlxrun.batch.line_index import LineIndex
from mlxrun.batch.line_keys import LineKeys
from mlxrun.batch.run_paths import JobPaths
from mlxrun.batch.scoring import EvalSpec
from mlxrun.errors import JobError
from tests.helpers.batch_fakes import chat

GOOD = chat("a", "hi", max_tokens=3)


def parse(value: Any) -> JobLine | BadLine:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return parse_line(RawLine(7, 0, data))


def index_of(path: Path, data: bytes) -> LineIndex:
    path.write_bytes(data)
    index = LineIndex(path, LineKeys("settings", path.parent, 10**6))
    index.scan()
    return index


def entries(index: LineIndex) -> Iterator[JobLine | BadLine]:
    yield from (index.load(position).line for position in range(len(index)))
    index.close()


def test_both_forms() -> None:
    """OpenAI's form as it is; in the short form what stands beside the prompt is the body."""
    line = parse(GOOD)
    assert line == JobLine(7, "a", "/v1/chat/completions", GOOD["body"])
    short = {"id": "b", "prompt": "x", "seed": 1, "eval": {"expected": "y", "match": "regex", "group": "g"}}
    assert parse(short) == JobLine(
        7, "b", "/v1/completions", {"prompt": "x", "seed": 1}, EvalSpec("y", "regex", "g")
    )
    messages = [{"role": "user", "content": "x"}]
    assert parse({"id": "c", "messages": messages, "stream": False}) == JobLine(
        7, "c", "/v1/chat/completions", {"messages": messages, "stream": False}
    )


@pytest.mark.parametrize(
    "value, reason, param",
    [
        (b"{", "not JSON: Expecting property name enclosed in double quotes at column 2", None),
        (b'{"id": "a" "prompt": "b"}', "not JSON: Expecting ',' delimiter at column 12", None),
        (b'{"id": "a', "not JSON: Unterminated string starting at column 8", None),
        (b'{"id": "a", "prompt": NaN}', "not JSON: NaN is not a JSON value", None),
        (b'{"id": "a", "id": "b", "prompt": ""}', "not JSON: the key 'id' is given twice", None),
        (b'{"id": "a\xff"}', "not UTF-8: byte 0xff at byte 10", None),
        (b'{"id": "a", "prompt": "\\ud800"}', "contains a lone UTF-16 surrogate", None),
        (b"[" * 100_000, "not JSON that can be read: nested too deeply", None),
        (b"9" * 5000, "not JSON: Exceeds the limit", None),
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
        ({"custom_id": "a", "body": {}}, "method is missing", "method"),
        ({**GOOD, "method": "GET"}, 'method must be POST, not "GET"', "method"),
        ({**GOOD, "url": "/v1/responses"}, "url must be one of /v1/chat/completions and", "url"),
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
            "eval.expected must be a string because eval.match is exact",
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


def test_bad_lines_keep_what_can_be_read() -> None:
    wanted = {"expected": "x", "group": "g"}
    found = parse({**GOOD, "url": "/nope", "eval": wanted})
    assert isinstance(found, BadLine)
    assert (found.custom_id, found.eval) == ("a", EvalSpec("x", "exact", "g"))


def test_the_file(tmp_path: Path) -> None:
    """BOM, CRLF, empty lines, no end of line at the end; numbers count every line."""
    good = json.dumps(GOOD).encode()
    second = good.replace(b'"a"', b'"b"')
    data = b"\xef\xbb\xbf" + good + b"\r\n\r\n  \n" + second + b"\n\n" + b"\xef\xbb\xbf" + good + b"\n" + good
    index = index_of(tmp_path / "x.jsonl", data)
    assert index.sha256 == hashlib.sha256(data).hexdigest()
    lines = list(entries(index))
    assert [line.number for line in lines] == [1, 4, 6, 7]
    assert [type(line) for line in lines] == [JobLine, JobLine, BadLine, BadLine]
    assert isinstance(lines[3], BadLine)
    assert lines[3].reason == "custom_id 'a' is already used by line 1"


def test_a_line_of_no_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxrun.batch.job_file.MAX_LINE", 1000)
    good = json.dumps(GOOD).encode()
    index = index_of(tmp_path / "x.jsonl", b"x" * 4500 + b"\n" + good + b"\n" + b"y" * 999)
    lines = list(entries(index))
    assert [line.number for line in lines] == [1, 2, 3]
    assert isinstance(lines[0], BadLine)
    assert lines[0].reason.startswith("longer than")
    assert isinstance(lines[1], JobLine)


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


def test_many_lines_in_little_memory(tmp_path: Path) -> None:
    """20,000 lines of 1 kB cost less than 100 bytes each, and each is found again."""
    count = 20_000
    path = tmp_path / "big.jsonl"
    with path.open("w") as file:
        for i in range(count):
            file.write(json.dumps({"id": f"line {i}", "prompt": "x" * 1000}) + "\n")
    tracemalloc.start()
    index = LineIndex(path, LineKeys("s", tmp_path, 0))
    index.scan()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(index) == count
    assert peak < 100 * count
    for position in (0, 1023, 12_345, count - 1):
        assert index.find(f"line {position}") == position
        assert index.load(position).line.custom_id == f"line {position}"
    assert index.find("line x") is None
    index.close()


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


@given(st.lists(st.binary(max_size=12).filter(lambda data: b"\n" not in data), max_size=12))
def test_any_file_is_read_line_by_line(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    """Every line that is not empty is there once, under its own number, also when read again."""
    path = tmp_path_factory.mktemp("any") / "x.jsonl"
    stripped = [data.removeprefix(b"\xef\xbb\xbf") if not at else data for at, data in enumerate(lines)]
    wanted = [at for at, data in enumerate(stripped, 1) if data.strip(b" \t\r")]
    if not wanted:
        return
    assert [line.number for line in entries(index_of(path, b"\n".join(lines)))] == wanted


def test_paths(tmp_path: Path) -> None:
    """Outputs stand beside the job, or where -o says; never over the job."""
    job = tmp_path / "eval.jsonl"
    paths = JobPaths(job)
    names = [path.name for path in (paths.out, paths.errors, paths.folder)]
    assert names == ["eval.out.jsonl", "eval.errors.jsonl", "eval.out.jsonl.run"]
    other = JobPaths(job, tmp_path / "answers.jsonl")
    assert (other.errors.name, other.folder.name) == ("answers.errors.jsonl", "answers.jsonl.run")
    assert JobPaths(tmp_path / "eval.txt").out.name == "eval.txt.out.jsonl"
    for out in (job, tmp_path, tmp_path / "no" / "x.jsonl"):
        with pytest.raises(JobError):
            JobPaths(job, out)
