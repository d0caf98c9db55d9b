"""The records of a job: OpenAI's batch format for every API, the same bytes in every run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import Message
from openai.types.responses import Response

from mlxrun.core.errors import Draining, MlxrunError, RequestError
from mlxrun.jobs.lines.job_file import CHAT, MESSAGE, RESPONSE, URLS, BadLine, JobLine
from mlxrun.jobs.lines.line_index import IndexedLine
from mlxrun.jobs.records import output_records
from tests.helpers.batch_fakes import MIXED, Bench, by_id, chat, chats, read, write_job


def normal(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what its key decides."""
    text = re.sub(r"(batch_req_|req_)[0-9a-f]+", r"\1KEY", json.dumps(record))
    found: dict[str, Any] = json.loads(text)
    return found


async def test_output_shape(tmp_path: Path) -> None:
    """OpenAI's batch output, the short form too; seeds, ids and times are those of every run."""
    bench = Bench(write_job(tmp_path, [MIXED[0], MIXED[5]]))
    outcome = await bench.run()
    assert outcome.exit_code == 0
    first, second = (normal(record) for record in sorted(read(bench.paths.out), key=lambda r: r["custom_id"]))
    assert first == {
        "id": "batch_req_KEY",
        "custom_id": "good",
        "response": {
            "status_code": 200,
            "request_id": "req_KEY",
            "body": {
                "id": "chatcmpl-req_KEY",
                "object": "chat.completion",
                "created": 0,
                "model": "fake",
                "system_fingerprint": None,
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "hellozz", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {
                    "prompt_tokens": 20,
                    "completion_tokens": 3,
                    "total_tokens": 23,
                    "completion_tokens_details": {"reasoning_tokens": 0},
                },
                "mlxrun": {"seed": 1344898677},
            },
        },
        "error": None,
        "eval": {
            "score": 1,
            "match": "contains",
            "group": "a",
            "expected": "hello",
            "extracted": "hello",
        },
    }
    body = second["response"]["body"]
    assert (body["object"], body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (
        "text_completion",
        "onc",
        "length",
    )
    assert not bench.paths.errors.exists()


async def test_cached_tokens_are_not_in_records(tmp_path: Path) -> None:
    """What a cache saved differs from run to run, so it is in the manifest, not in the output."""
    bench = Bench(write_job(tmp_path, chats(1)))
    await bench.run()
    assert "prompt_tokens_details" not in read(bench.paths.out)[0]["response"]["body"]["usage"]


def test_a_bad_line_has_no_response() -> None:
    from mlxrun.jobs.lines.line_index import IndexedLine

    record = output_records.build_bad_line_record(IndexedLine(0, "k" * 32, BadLine(3, None, "why", "p")))
    assert record["response"] is None
    assert record["error"] == {"code": "invalid_line", "message": "why", "line": 3, "param": "p"}


MESSAGES = [{"role": "user", "content": "hello"}]
LINES = [
    chat("chat", "hello"),
    {"id": "completion", "prompt": "hello"},
    {"id": "response", "input": "hello"},
    {"id": "message", "url": MESSAGE, "model": "m", "max_tokens": 99, "messages": MESSAGES},
]


async def test_a_record_for_every_api(tmp_path: Path) -> None:
    """The body is the API's own, which its clients read; its tokens count; two runs write the same bytes."""
    bench = Bench(write_job(tmp_path, LINES))
    outcome = await bench.run()
    assert outcome.exit_code == 0
    records = {record["custom_id"]: record for record in read(bench.paths.out)}
    assert all(record["response"]["status_code"] == 200 for record in records.values())
    message = Message.model_validate(records["message"]["response"]["body"])
    assert (message.stop_reason, message.usage.cache_read_input_tokens) == ("end_turn", 0)
    response = Response.model_validate(records["response"]["response"]["body"])
    assert (response.status, response.created_at) == ("completed", 0)
    assert response.output_text.startswith("hello") and response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 0
    usage = [output_records.read_usage(record) for record in records.values()]
    assert all(prompt > 0 and output > 0 for prompt, output in usage)
    assert outcome.meter.total_output == sum(output for _, output in usage)
    first = by_id(bench.paths.out)
    await bench.run(fresh=True)
    assert by_id(bench.paths.out) == first
    assert all(output_records.parse_record(data) is not None for data in first.values())


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    "error",
    [RequestError("a: is wrong", param="a"), Draining("later"), MlxrunError("broken"), KeyError("bug")],
)
def test_the_error_of_every_api(url: str, error: Exception) -> None:
    """`response` is what the endpoint answers; `error` has the same fields for all."""
    line = JobLine(3, "x", url, {})
    record = output_records.build_error_record(IndexedLine(0, "a" * 32, line), error)
    found = record["error"]
    assert (found["line"], found["param"]) == (3, getattr(error, "param", None))
    assert found["code"] == getattr(error, "code", "internal_error") and "bug" not in found["message"]
    response = record["response"]
    if url == MESSAGE:
        assert response["body"]["type"] == "error"
        assert response["body"]["request_id"] == response["request_id"]
        assert response["status_code"] == (529 if isinstance(error, Draining) else found_status(error))
    else:
        assert response["body"]["error"]["code"] == found["code"]
        assert response["status_code"] == found_status(error)
    assert output_records.parse_record(output_records.dump_record(record)) == record


def found_status(error: Exception) -> int:
    return error.http_status if isinstance(error, MlxrunError) else 500


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"choices": []},
        {"choices": [3]},
        {"object": "response", "output": 3},
        {"object": "response", "output": [{"type": "message"}]},
        {"type": "message", "content": [3]},
    ],
)
def test_records_that_are_none(body: Any) -> None:
    """An edited output: a body without an answer is no record."""
    indexed = IndexedLine(0, "0" * 32, JobLine(1, "a", RESPONSE, {}))
    record = output_records.build_answer_record(indexed, body)
    assert output_records.parse_record(output_records.dump_record(record)) is None


def test_urls_are_those_of_the_endpoints() -> None:
    from mlxrun.server.app import list_surfaces

    paths = {endpoint.path for surface in list_surfaces() for endpoint in surface.endpoints}
    assert set(URLS) <= paths and CHAT in URLS
