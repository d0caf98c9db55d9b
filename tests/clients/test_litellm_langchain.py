"""LiteLLM and LangChain against the embedded model, as docs/clients.md says. Each in a process of its own:
they change global state, and warn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.served_model import ModelServer

pytestmark = pytest.mark.slow

HEAD = """
import json, sys
url = sys.argv[1]
messages = [{"role": "user", "content": "What is 12 + 30?"}]
dublin = [{"role": "user", "content": "How is the weather in Dublin?"}]
parameters = {"type": "object", "properties": {"place": {"type": "string"}}}
function = {"name": "fetch_weather", "description": "Get the weather in a city.", "parameters": parameters}
tools = [{"type": "function", "function": function}]
found = {}
"""

LITELLM = """
import litellm
litellm.telemetry = False
asked = {"model": "openai/gpt-x", "api_base": f"{url}/v1", "api_key": "none"}
answer = litellm.completion(messages=messages, **asked)
found["whole"] = answer.choices[0].message.content
parts = list(litellm.completion(messages=messages, stream=True, **asked))
found["stream"] = "".join(part.choices[0].delta.content or "" for part in parts)
(call,) = litellm.completion(messages=dublin, tools=tools, **asked).choices[0].message.tool_calls
found["call"] = [call.function.name, json.loads(call.function.arguments)]
parts = list(litellm.completion(messages=dublin, tools=tools, stream=True, **asked))
(call,) = litellm.stream_chunk_builder(parts).choices[0].message.tool_calls
found["stream_call"] = [call.function.name, json.loads(call.function.arguments)]
text = litellm.text_completion(prompt="a", max_tokens=2, model="text-completion-openai/x",
                               api_base=f"{url}/v1", api_key="none")
found["usage"] = [answer.usage.completion_tokens > 0, text.usage.completion_tokens]
"""

LANGCHAIN = """
from langchain_openai import ChatOpenAI
model = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="gpt-x", stream_usage=True)
answer = model.invoke("What is 12 + 30?")
found["whole"] = answer.content
found["stream"] = "".join(part.content for part in model.stream("What is 12 + 30?"))
bound = model.bind_tools(tools)
(call,) = bound.invoke("How is the weather in Dublin?").tool_calls
found["call"] = [call["name"], call["args"]]
whole = None
for part in bound.stream("How is the weather in Dublin?"):
    whole = part if whole is None else whole + part
(call,) = whole.tool_calls
found["stream_call"] = [call["name"], call["args"]]
limited = model.bind(max_tokens=2).invoke("Hello")
found["usage"] = [answer.usage_metadata["output_tokens"] > 0, limited.usage_metadata["output_tokens"]]
"""


def run(script: str, url: str, home: Path) -> Any:
    """What a script found; it prints that as its last line."""
    own = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", f"{HEAD}{script}\nprint(json.dumps(found))", url],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("script", [LITELLM, LANGCHAIN], ids=["litellm", "langchain"])
def test_client_libraries(served: ModelServer, tmp_path: Path, script: str) -> None:
    """Text, streams and calls come through them."""
    call = ["fetch_weather", {"place": "Dublin"}]
    assert run(script, served.url, tmp_path) == {
        "whole": "42",
        "stream": "42",
        "call": call,
        "stream_call": call,
        "usage": [True, 2],
    }
