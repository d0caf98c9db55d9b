"""The body of a message batch, parsed as it arrives: in any chunks the same lines, in little memory."""

from __future__ import annotations

import codecs
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrun.core.errors import BodyTooLarge, RequestError
from mlxrun.jobs.lines.job_file import JobLine, RawLine, parse_line
from mlxrun.server.batches.request_lines import RequestLines

MOST = 10**6


def feed(data: bytes, size: int, most: int = MOST) -> tuple[bytes, int]:
    """The lines of a body that arrives `size` bytes at a time, and how many there are."""
    reader = RequestLines(most)
    lines = [reader.feed(data[at : at + size], end=False) for at in range(0, len(data), size)]
    return b"".join(lines) + reader.feed(b"", end=True), reader.count


def make_body(requests: Any, **more: Any) -> bytes:
    return json.dumps({"requests": requests, **more}).encode()


def make_request(custom_id: str, **params: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "params": params}


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(
    st.lists(st.dictionaries(texts, values, max_size=3), min_size=1, max_size=4),
    st.integers(1, 40),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_any_chunks_give_the_same_lines(
    bodies: list[dict[str, Any]], size: int, indent: int | None, escape: bool
) -> None:
    requests = [make_request(f"id-{i}", **{"p": body}) for i, body in enumerate(bodies)]
    data = json.dumps({"requests": requests}, indent=indent, ensure_ascii=escape).encode()
    lines, count = feed(data, size)
    assert count == len(bodies)
    for number, (line, request) in enumerate(zip(lines.splitlines(), requests, strict=True), 1):
        parsed = parse_line(RawLine(number, 0, line))
        assert isinstance(parsed, JobLine)
        assert (parsed.custom_id, parsed.url) == (request["custom_id"], "/v1/messages")
        assert parsed.body == request["params"]


ONE = make_request("a", x=1)


@pytest.mark.parametrize("size", [1, 10**6])
def test_a_byte_order_mark_is_no_part_of_the_body(size: int) -> None:
    data = make_body([ONE])
    assert feed(codecs.BOM_UTF8 + data, size) == feed(data, size)


@pytest.mark.parametrize("size", [1, 7, 10**6])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the body is empty"),
        (b"[]", "body: expected object, got array"),
        (b"{}", "requests: Field required"),
        (b'{"requests": null}', "requests: Field required"),
        (b'{"requests": {}}', "requests: expected array, got object"),
        (b'{"requests": []}', "requests: is empty"),
        (b'{"model": "m"}', "model: Extra inputs are not permitted"),
        (make_body([ONE], model="m"), "the body has more than `requests`"),
        (make_body([ONE])[:-1], "the body has more than `requests`"),
        (make_body([ONE])[:-2], "the body is not JSON from requests.1 on"),
        (make_body([ONE])[:-5], "the body is not JSON from requests.0 on"),
        (make_body([ONE]) + b"x", "the body has more than `requests`"),
        (b'{"requests": [{"custom_id": "a", "params": {}} {}]}', "the body is not JSON from requests.1 on"),
        (b'{"requests": [nonsense]}', "the body is not JSON from requests.0 on"),
        (b'{"requests": [{"custom_id": "a", "params": {"b": NaN}}]}', "NaN is not a JSON number"),
        (
            b'{"requests": [{"custom_id": "a", "params": {"b": ' + b"1" * 5000 + b"}}]}",
            "a number in the body has thousands of digits",
        ),
        (
            b'{"requests": [{"custom_id": "a", "custom_id": "b", "params": {}}]}',
            "the key 'custom_id' occurs twice",
        ),
        (b'{"requests": [{"custom_id": "a\xff"}]}', "the body is not UTF-8"),
        (b'{"requests": [' + b"[" * 200_000 + b"]", "the body"),
        (make_body([ONE, ONE]), "requests.1.custom_id: 'a' occurs twice"),
        (make_body([ONE, 3]), "requests.1: expected object, got integer"),
        (make_body([{"custom_id": "a"}]), "requests.0.params: Field required"),
    ],
)
def test_bodies_that_are_refused(data: bytes, message: str, size: int) -> None:
    """The same in any chunks."""
    if size == 1 and len(data) > 10_000:
        return
    with pytest.raises(RequestError) as caught:
        feed(data, size)
    assert str(caught.value).startswith(message)


def test_the_number_of_requests_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxrun.server.batches.request_lines.MAX_REQUESTS", 3)
    assert feed(make_body([make_request(f"{i}") for i in range(3)]), 50)[1] == 3
    with pytest.raises(RequestError, match="more than 3 entries"):
        feed(make_body([make_request(f"{i}") for i in range(4)]), 50)


def test_one_request_has_the_limits_of_a_body() -> None:
    """All together may be far larger."""
    small = [make_request(f"{i}", text="x" * 1000) for i in range(100)]
    assert feed(make_body(small), 4096, most=8000)[1] == 100
    with pytest.raises(BodyTooLarge, match="requests.100: has more than 8000 characters"):
        feed(make_body([*small, make_request("long", text="x" * 20_000)]), 4096, most=8000)
    many = make_request("many", keys=dict.fromkeys(map(str, range(300_000)), 1))
    with pytest.raises(RequestError, match="keys and containers"):
        feed(make_body([many]), 1 << 20, most=10**9)


def test_memory_and_time_do_not_grow_with_the_body() -> None:
    """20 MB of requests in less than 4 MB; a large request is not parsed again for every chunk."""
    request = json.dumps(make_request("ID", text="x" * 1900)).encode()
    reader, count = RequestLines(MOST), 10_000
    reader.feed(b'{"requests": [', end=False)
    tracemalloc.start()
    for start in range(0, count, 100):
        chunk = b",".join(request.replace(b"ID", b"%d" % i) for i in range(start, start + 100))
        reader.feed(chunk + (b"," if start + 100 < count else b""), end=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    reader.feed(b"]}", end=True)
    assert reader.count == count and peak < 4_000_000


def test_a_large_request_is_parsed_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxrun.server.batches import request_lines

    calls: list[int] = []

    class Counting:
        def raw_decode(self, text: str, at: int) -> Any:
            calls.append(len(text))
            return json.JSONDecoder().raw_decode(text, at)

    monkeypatch.setattr(request_lines, "DECODER", Counting())
    data = make_body([make_request("a", text="x" * 1_000_000)])
    assert feed(data, 1000, most=10**7)[1] == 1
    assert len(calls) < 15
