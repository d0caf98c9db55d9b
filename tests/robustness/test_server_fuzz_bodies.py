"""What the fuzzers send: good bodies of every surface, each broken somewhere, the same for the same seed; and
what every answer must be. `shots(seed, count)` gives the requests, `judge` looks at the answers.

A shot may happen to be right; then its answer is 200. A 4xx has its surface's own shape and says something.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.helpers.server_fakes import parse_events

CHAT, COMPLETION, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, COUNT = "/v1/responses", "/v1/messages/count_tokens"
BATCHES = "/v1/messages/batches"
OLLAMA_CHAT, GENERATE = "/api/chat", "/api/generate"
HI = [{"role": "user", "content": "hello"}]
# One white pixel.
PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4"
    "AAAAAElFTkSuQmCC"
)
FUNCTION = {"name": "f", "description": "does", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TALK = [
    {"role": "system", "content": "be brief"},
    *HI,
    {"role": "assistant", "content": "x", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "1"},
    {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "text", "text": "now?"}]},
]
TURNS = [
    *HI,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "1"}]},
]
GOOD: dict[str, tuple[dict[str, Any], ...]] = {
    CHAT: (
        {"messages": HI, "max_tokens": 4},
        {"messages": TALK, "max_tokens": 4, "tools": [{"type": "function", "function": FUNCTION}]},
        {
            "messages": HI,
            "max_completion_tokens": 4,
            "n": 2,
            "stream": True,
            "stop": ["a", "bc"],
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "seed": 1,
            "logprobs": True,
            "top_logprobs": 2,
            "logit_bias": {"65": 1.5},
            "presence_penalty": 0.1,
            "stream_options": {"include_usage": True},
            "metadata": {"a": "b"},
            "user": "u",
        },
        {
            "model": "gpt-x",
            "max_tokens": 4,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": PNG}},
                        {"type": "text", "text": "?"},
                    ],
                }
            ],
        },
    ),
    COMPLETION: (
        {"prompt": "hello", "max_tokens": 4, "echo": True},
        {"prompt": ["a", "b"], "max_tokens": 2, "n": 2, "stream": True},
        {"prompt": [[65, 66], [67]], "max_tokens": 3, "logprobs": 2, "stop": "x"},
    ),
    MESSAGES: (
        {"model": "claude-x", "max_tokens": 4, "messages": HI},
        {
            "model": "claude-x",
            "max_tokens": 4,
            "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
            "messages": TURNS,
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "stream": True,
            "stop_sequences": ["zz"],
            "temperature": 0.3,
            "metadata": {"user_id": "u"},
        },
    ),
    COUNT: ({"model": "claude-x", "messages": HI, "system": "be brief"},),
    RESPONSES: (
        {"input": "hello", "max_output_tokens": 16},
        {
            "input": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "1"},
            ],
            "instructions": "be brief",
            "max_output_tokens": 16,
            "tools": [{"type": "function", **FUNCTION, "strict": False}],
            "stream": True,
            "store": True,
            "temperature": 0.2,
        },
        {
            "input": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}],
            "max_output_tokens": 16,
            "background": True,
            "stream": True,
            "truncation": "auto",
            "reasoning": {"effort": "low", "summary": "detailed"},
            "min_tokens": 2,
            "conversation": {"id": "conv_0"},
        },
    ),
    "/v1/conversations": ({"items": [{"role": "user", "content": "hello"}], "metadata": {"a": "b"}},),
    "/v1/conversations/conv_0": ({"metadata": {"a": "b"}},),
    "/v1/conversations/conv_0/items": ({"items": [{"role": "user", "content": "hello"}], "include": []},),
    "/v1/responses/input_tokens": ({"input": "hello"},),
    "/tokenize": ({"prompt": "hello"}, {"messages": HI, "return_token_strs": True}),
    "/v1/detokenize": ({"tokens": [65, 66]},),
    BATCHES: ({"requests": [{"custom_id": "a", "params": {"model": "m", "max_tokens": 3, "messages": HI}}]},),
    OLLAMA_CHAT: (
        {"model": "m", "messages": HI, "options": {"num_predict": 4, "num_ctx": 2048}},
        {
            "model": "m:latest",
            "messages": [
                *HI,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
                },
                {"role": "tool", "tool_name": "f", "content": "1"},
                {"role": "user", "content": "?", "images": [PNG.partition(",")[2]]},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "stream": False,
            "think": "low",
            "options": {
                "num_predict": 4,
                "stop": ["a"],
                "temperature": 0.5,
                "repeat_penalty": 1.1,
                "seed": -1,
            },
        },
        {"model": "m", "messages": HI, "format": {"type": "object"}, "logprobs": True, "top_logprobs": 2},
    ),
    GENERATE: (
        {"model": "m", "prompt": "hello", "system": "be brief", "options": {"num_predict": 4, "top_k": 5}},
        {"model": "m", "prompt": "hello", "raw": True, "stream": False, "keep_alive": "5m", "context": []},
        {"model": "m", "keep_alive": 0},
    ),
    "/api/embed": ({"model": "m", "input": ["hello"], "truncate": True, "dimensions": 8},),
    "/api/embeddings": ({"model": "m", "prompt": "hello"},),
    "/api/show": ({"model": "m", "verbose": True},),
    "/v1/batches": (
        {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h", "metadata": {"a": "b"}},
    ),
}
ANTHROPIC = (MESSAGES, COUNT, BATCHES)
OLLAMA = "/api/"


def deep(levels: int) -> Any:
    """Lists in lists."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


NASTY: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        0.5,
        -0.5,
        2.0,
        1e300,
        2**31,
        2**63,
        -(2**63),
        10**40,
        float("nan"),
        float("inf"),
    ),
    *("", " ", "x", "user", "\x00", "\ud800", "\udfff\ud83d", "\U0001f600", "\ufeff", "é" * 50, "x" * 3000),
    *("<|im_end|>", "<|image_pad|>", "{{ 7 * 7 }}", "{% raise %}", "../../etc/passwd", "file:///etc/passwd"),
    *("data:image/png;base64,%%%", "data:image/png;base64,AAAA", "data:,x", "http://127.0.0.1/x", PNG[:60]),
    *([], {}, [[]], [None], [{}], {"": None}, {"type": "text"}, {"type": "nothing"}, {"type": "image_url"}),
    *({"role": "user"}, {"type": "object", "properties": 5}, ["a"] * 50, [0] * 50, {"a": {"b": [1, "c"]}}),
    *(deep(30), deep(300)),
    *("word " * 6000, {f"k{i}": i for i in range(2000)}, ["word"] * 3000),  # more than a context, or many
)
KEYS = (
    "frequency_penalty",
    "reasoning_effort",
    "response_format",
    "thinking",
    "text",
    "include",
    "tool_choice",
)
KEYS += (
    "previous_response_id",
    "truncation",
    "priority",
    "chat_template_kwargs",
    "stop_token_ids",
    "",
    "\ud800",
)
PATHS = ("/v1/models/%FF", "/v1/responses/%00", "/v1/files/..%2f..%2fetc%2fpasswd", "/v1/requests/%0A/cancel")
PATHS += ("/v1/batches/%F0%9F", "/v1/responses/x/input_items?limit=-1", "/v1/files?limit=%00", "/v1/%2e%2e/x")
PATHS += ("/v1/conversations/%00/items/%FF", "/v1/conversations/x/items?order=up", "/v1/responses/x?stream=1")
PATHS += ("/openapi.json?x=%ED%A0%80", "/v1/files/file-0/content", "/v1/responses/x/cancel", "/", "//", "/v1")
PATHS += (
    "/v1/messages/batches/x/results",
    "/v1/messages/batches?limit=-1",
    "/api/tags?x=%FF",
    "/api/blobs/sha256:%00",
    "/api/pull",
    "/api/%2e%2e/x",
    "/v1/messages/batches/%00/cancel",
)
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE")
ODD_HEADERS: tuple[dict[str, str], ...] = (
    {"Content-Type": "text/plain"},
    {"Content-Type": "multipart/form-data"},
    {"Content-Type": "multipart/form-data; boundary="},
    {"Content-Type": 'application/json; charset="nothing-8"'},
    {"Content-Type": ";;;="},
    {"Content-Encoding": "gzip"},
    {"Content-Encoding": "deflate"},
    {"Content-Encoding": "br"},
    {"Content-Encoding": "nothing"},
    {"Authorization": "Bearer"},
    {"Authorization": "Basic \xff\xfe"},
    {"Authorization": "Bearer " + "k" * 4000},
    {"x-request-id": "a b\tc"},
    {"x-request-id": "x" * 4000},
    {"anthropic-version": "\xe9"},
    {"Accept": "application/nothing"},
    {"Origin": "null", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "\xff"},
    {"Host": "a b"},
    {"Expect": "100-continue"},
    {"Expect": "nothing"},
    {"Range": "bytes=9-1"},
    {"Cookie": "=;=;\xff"},
    {"Upgrade": "websocket", "Connection": "upgrade"},
)


@dataclass(frozen=True)
class Shot:
    """One request. `kind` says how it was made."""

    kind: str
    method: str
    path: str
    body: bytes | None
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind}: {self.method} {self.path} {self.headers} {(self.body or b'')[:2000]!r}"


def shots(seed: int, count: int) -> Iterator[Shot]:
    """So many requests."""
    rng = random.Random(seed)
    makers = (_mutated, _mutated, _mutated, _mutated, _mutated, _garbled, _odd, _elsewhere, _form)
    for _ in range(count):
        yield rng.choice(makers)(rng)


def _pick(rng: random.Random) -> tuple[str, dict[str, Any]]:
    path = rng.choice(list(GOOD))
    return path, copy.deepcopy(rng.choice(GOOD[path]))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """All (container, key) below a value."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        found += _places(inner)
    return found


def _mutated(rng: random.Random) -> Shot:
    """One to three values replaced, removed, repeated, wrapped, renamed or added."""
    path, body = _pick(rng)
    return Shot("mutated", "POST", path, mutate_body(rng, body))


def mutate_body(rng: random.Random, body: dict[str, Any]) -> bytes:
    """A body, which is changed, with one to three of its values broken."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = _places(body)
        if not places:
            break
        _mutate(rng, body, *rng.choice(places))
    return json.dumps(body, ensure_ascii=rng.random() < 0.9).encode("utf-8", "replace")


def _mutate(rng: random.Random, body: Any, at: Any, key: Any) -> None:
    how = rng.randrange(8)
    if how <= 3:
        at[key] = copy.deepcopy(rng.choice(NASTY))
    elif how == 4:
        del at[key]
    elif how == 5 and isinstance(at, list):
        at[key:key] = [copy.deepcopy(at[key])] * rng.choice((1, 20))
    elif how == 6 and isinstance(at, dict):
        at[f"{key}{rng.choice(('_', 's', chr(0), ' '))}"] = at.pop(key)
    else:
        body[rng.choice(KEYS)] = copy.deepcopy(rng.choice(NASTY))


def _garbled(rng: random.Random) -> Shot:
    """The bytes of a good body, cut, flipped, doubled or with something inserted."""
    path, body = _pick(rng)
    raw = bytearray(json.dumps(body).encode())
    how, at = rng.randrange(6), rng.randrange(len(raw))
    if how == 0:
        del raw[at:]
    elif how == 1:
        raw[at] = rng.randrange(256)
    elif how == 2:
        raw[at:at] = rng.choice(
            (b"\xff", b"\x00", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"NaN", b"1" * 5000, b"[" * 3000)
        )
    elif how == 3:
        raw = raw * 2
    elif how == 4:
        raw[:1] = b'{"max_tokens":1,"max_tokens":2,'
    else:
        raw = bytearray(rng.randbytes(rng.randrange(200)))
    return Shot("garbled", "POST", path, bytes(raw))


def _odd(rng: random.Random) -> Shot:
    """A good body with a header that does not fit it."""
    path, body = _pick(rng)
    return Shot("odd", "POST", path, json.dumps(body).encode(), dict(rng.choice(ODD_HEADERS)))


def _elsewhere(rng: random.Random) -> Shot:
    """Odd paths, and methods that a path does not have."""
    path = rng.choice((*GOOD, *PATHS, "/v1/files", "/v1/cache", "/health", "/metrics", "/v1/status"))
    method = rng.choice(METHODS)
    body = b"{}" if method in ("POST", "PUT", "PATCH") else None
    headers = rng.choice(({}, {}, *ODD_HEADERS))
    if method == "HEAD":
        headers = {}  # what aiohttp refuses by itself is answered with a body even then
    return Shot("elsewhere", method, path, body, dict(headers))


def _form(rng: random.Random) -> Shot:
    """Uploads that are no forms, or of odd parts."""
    mark = rng.choice((b"b", b"b", b"c"))
    parts = [
        rng.choice(
            (b'name="purpose"', b'name="file"; filename="\xff\x00"', b"name=", b'name="x"', b"", b"\xff")
        )
        + rng.choice((b"", b"\r\nContent-Encoding: gzip", b"\r\nContent-Transfer-Encoding: base64", b"\r\n:"))
        for _ in range(rng.randrange(4))
    ]
    body = b"".join(
        b"--%s\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n"
        % (mark, part, rng.choice((b"batch", b"\xff", b"")))
        for part in parts
    )
    body += rng.choice((b"--b--\r\n", b"--b--", b"--b", b""))
    return Shot("form", "POST", "/v1/files", body, {"Content-Type": "multipart/form-data; boundary=b"})


# -- what an answer must be -----------------------------------------------------------------------------

ENDS = ("[DONE]", "message_stop", "error", "response.completed", "response.incomplete", "response.failed")


def judge(shot: Shot, status: int, headers: Any, raw: bytes) -> None:
    """AssertionError unless the answer is right, or a refusal that its surface's clients can read."""
    assert 200 <= status < 500, f"{status} {raw[:500]!r} for {shot}"
    if shot.method == "HEAD":
        return
    if status >= 400:
        _refusal(shot, json.loads(raw), status)
    elif "event-stream" in headers.get("Content-Type", ""):
        _stream(shot, parse_events(raw.decode()))
    elif "ndjson" in headers.get("Content-Type", ""):
        last = json.loads(raw.splitlines()[-1])
        assert last.keys() == {"error"} or last["done"] is True, f"a stream that ends with {last} for {shot}"


def _stream(shot: Shot, events: list[tuple[str | None, Any]]) -> None:
    """A stream has an end: the last event of its API, or an error."""
    assert events, f"a stream of nothing for {shot}"
    name, data = events[-1]
    kind = name or (data if isinstance(data, str) else "error" if "error" in data else "")
    assert kind in ENDS, f"a stream that ends with {events[-1]} for {shot}"


def _refusal(shot: Shot, found: Any, status: int) -> None:
    error = found["error"]
    text = error if isinstance(error, str) else error["message"]
    assert isinstance(text, str) and len(text) > 8, f"{status} says {text!r} for {shot}"
    for leak in ("Traceback", "object at 0x", "site-packages", "Error("):
        assert leak not in text, f"{text!r} for {shot}"
    assert len(text) < 3000, f"{len(text)} characters are said of {shot}"
    unread = text.startswith("the HTTP request cannot be read")  # refused before there is a surface
    is_anthropic = shot.path in ANTHROPIC or shot.path.startswith(BATCHES)
    if (is_anthropic or "anthropic-version" in shot.headers) and not unread:
        assert set(found) == {"type", "error", "request_id"} and found["type"] == "error", (found, str(shot))
    elif isinstance(error, str) or (shot.path in GOOD and shot.path.startswith(OLLAMA) and not unread):
        assert shot.path == "/" or shot.path.startswith(OLLAMA), (found, str(shot))
        assert set(found) == {"error"} and isinstance(error, str), (found, str(shot))
    else:
        assert set(error) == {"message", "type", "param", "code"}, (found, str(shot))


# -- the fuzzer itself ----------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_requests() -> None:
    one, other = list(shots(1, 300)), list(shots(1, 300))
    assert one == other != list(shots(2, 300))
    assert set(Counter(shot.kind for shot in one)) == {"mutated", "garbled", "odd", "elsewhere", "form"}


@pytest.mark.parametrize(
    ("path", "status", "raw"),
    [
        (CHAT, 500, b'{"error": {"message": "internal error", "type": "x", "param": null, "code": "x"}}'),
        (CHAT, 400, b'{"error": {"message": "", "type": "x", "param": null, "code": "x"}}'),
        (
            CHAT,
            400,
            b'{"type": "error", "error": {"message": "no such thing", "type": "x"}, "request_id": "x"}',
        ),
        (MESSAGES, 400, b'{"error": {"message": "no such thing", "type": "x", "param": null, "code": "x"}}'),
        (MESSAGES, 400, b"bad request, in plain text"),
        (CHAT, 200, b'data: {"choices": []}\n\n'),
        (GENERATE, 400, b'{"error": {"message": "no such thing", "type": "x", "param": null, "code": "x"}}'),
        (GENERATE, 200, b'{"response": "x", "done": false}\n'),
        (MESSAGES, 200, b'event: message_start\ndata: {"type": "message_start"}\n\n'),
    ],
)
def test_the_judge_sees_a_bad_answer(path: str, status: int, raw: bytes) -> None:
    """Mutation: a 5xx, a refusal that says nothing, another surface's shape, and a stream without an end."""
    kind = "application/x-ndjson" if path == GENERATE else "text/event-stream"
    headers = {"Content-Type": kind} if status == 200 else {}
    with pytest.raises((AssertionError, ValueError)):
        judge(Shot("x", "POST", path, b"{}"), status, headers, raw)
