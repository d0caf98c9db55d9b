"""/tokenize and /detokenize: vLLM's shape, the engine's tokens, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrun.server.endpoints.tokenize import _decode, _tokenize_text
from tests.helpers.bracket_formats import TOOL
from tests.helpers.examples import count_examples
from tests.helpers.server_fakes import run_server
from tests.helpers.tokenizers import CHATML, THINKING, TOOLS, FakeModelInfo, byte_tokenizer, ids_of

HI = [{"role": "user", "content": "hi"}]
BEGIN = byte_tokenizer().convert_tokens_to_ids("<|begin|>")


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_prompts(prefix: str) -> None:
    """A raw prompt gets the tokenizer's special tokens unless told otherwise; an empty one may be counted."""
    async with run_server() as s:
        reply = await s.post(f"{prefix}/tokenize", {"prompt": "hello", "model": "any"})
        tokens = [BEGIN, *ids_of("hello")]
        assert reply.json == {"count": 2, "max_model_len": 4096, "tokens": tokens}
        bare = {"prompt": "hello", "add_special_tokens": False, "return_token_strs": True}
        reply = await s.post(f"{prefix}/tokenize", bare)
        assert reply.json["tokens"] == tokens[1:] and reply.json["token_strs"] == ["hello"]
        empty = {"prompt": "", "add_special_tokens": False}
        assert (await s.post(f"{prefix}/tokenize", empty)).json["count"] == 0
        back = await s.post(f"{prefix}/detokenize", {"tokens": tokens})
        assert back.json == {"prompt": "<|begin|>hello"}
        assert (await s.post(f"{prefix}/detokenize", {"tokens": []})).json == {"prompt": ""}


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_what_a_client_needs_to_write_prompts(prefix: str) -> None:
    """The special tokens as texts, and the template that the server uses; none that there is not."""
    async with run_server() as s:
        info = (await s.get(f"{prefix}/tokenizer_info")).json
        assert info == {
            "tokenizer_class": type(byte_tokenizer()).__name__,
            "model_max_length": 4096,
            "eos_token": "<|im_end|>",
            "chat_template": CHATML,
        }
    async with run_server(model_info=FakeModelInfo(chat_template=None)) as s:
        assert "chat_template" not in (await s.get(f"{prefix}/tokenizer_info")).json


async def test_messages_are_what_the_engine_gets() -> None:
    """With tools and template variables: the same tokens as the request that the engine saw."""
    cases: list[tuple[str, dict[str, Any]]] = [
        (CHATML, {}),
        (TOOLS, {"tools": [TOOL]}),
        (TOOLS, {"tools": [TOOL], "tool_choice": "none"}),
        (THINKING, {"chat_template_kwargs": {"enable_thinking": False}}),
    ]
    for template, fields in cases:
        async with run_server(model_info=FakeModelInfo(chat_template=template)) as s:
            counted = (await s.post("/tokenize", {"messages": HI, **fields})).json
            await s.post("/v1/chat/completions", {"messages": HI, **fields})
            (request,) = s.engine.requests
            assert counted["tokens"] == list(request.prompt)
            assert len(s.engine.requests) == 1  # counting asks nothing of the engine


async def test_what_is_refused() -> None:
    cases: list[tuple[str, Any, str]] = [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"prompt": "x", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": HI, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"messages": HI, "tool_choice": "required"}, "tool_choice"),
        ("/tokenize", {"messages": [{"role": "robot"}]}, "messages[0].role"),
        ("/tokenize", {"promt": "x"}, "promt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 10**6]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, True]}, "tokens[1]"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ]
    async with run_server(model_info=FakeModelInfo(chat_template=TOOLS)) as s:
        for path, body, param in cases:
            reply = await s.post(path, body)
            assert (reply.status, reply.json["error"]["param"]) == (400, param), body
        assert "did you mean 'prompt'" in (await s.post("/tokenize", {"promt": "x"})).json["error"]["message"]


@settings(max_examples=count_examples(100))
@given(st.text(max_size=30) | st.sampled_from(["<|im_end|>", "a <think> b", " \n\t"]))
def test_there_and_back(text: str) -> None:
    """Every text comes back as it was."""
    host = FakeModelInfo()
    ids = _tokenize_text({"prompt": text, "add_special_tokens": False}, host)
    assert _decode(list(ids), host) == text
