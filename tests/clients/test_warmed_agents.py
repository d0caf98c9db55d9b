"""docs/agents.md as it is written: its config, its program that saves a body, and a server that is warmed
with it, so that the first question of an agent finds its instructions and tools in the prefix cache."""

from __future__ import annotations

import copy
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from mlxrun.api.prompt_prefix import guess_url
from mlxrun.cli.main import main
from mlxrun.cli.server_client import ServerClient
from mlxrun.config.loading import load_config
from tests.clients.agents.claude_code import ClaudeCode
from tests.clients.agents.codex import Codex
from tests.clients.agents.continue_dev import Continue
from tests.clients.agents.session import Agent
from tests.clients.prompt_sizes import AGENTS, CONFIG, make_first_body
from tests.helpers.command_processes import start_program, wait_until
from tests.helpers.served_model import ModelServer, run_model_server

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
STREAMED = ("stream", "stream_options")
MIN_HIT = 1000  # tokens: every agent's instructions and tools have more
Json = dict[str, Any]


def find_block(language: str) -> str:
    """The only code block of a language on the page."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)
    return str(found)


@pytest.fixture
def server() -> Iterator[ModelServer]:
    """A server with an empty cache, whose answers are short."""
    with run_model_server(replace(CONFIG, sampling=replace(CONFIG.sampling, max_tokens=4))) as served:
        yield served


def ask_again(body: Json) -> Json:
    """The body of an agent's first request with another question, and a short answer."""
    made = copy.deepcopy(body)
    limit = "max_output_tokens" if "input" in made else "max_tokens"
    limit = "max_completion_tokens" if "max_completion_tokens" in made else limit
    made = {key: value for key, value in made.items() if key not in STREAMED} | {limit: 4}
    last = [item for item in made.get("input", made.get("messages")) if item.get("role") == "user"][-1]
    if isinstance(last["content"], str):
        last["content"] = "Is there a plot of the timings?"
    else:
        last["content"][-1]["text"] = "Is there a plot of the timings?"
    return made


def read_cached(usage: Mapping[str, Any]) -> int:
    """The tokens of a prompt that were in the cache, by the usage of any API."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0)


@pytest.mark.parametrize("name", AGENTS)
def test_the_first_question_of_an_agent_hits(server: ModelServer, name: str) -> None:
    """Every agent's body on its own API. Before the warming nothing is in the cache."""
    body = make_first_body(AGENTS[name])
    client, url = ServerClient(server.url), guess_url(body)
    made = client.call("POST", "/v1/cache/warm", {"body": body, "name": name})
    tokens = made["pinned"]["tokens"]
    assert made["cached_tokens"] == 0 and tokens == made["prefix_tokens"] > MIN_HIT
    answer = client.call("POST", url, ask_again(body))
    assert read_cached(answer["usage"]) == tokens


def test_without_warming_it_computes_everything(server: ModelServer) -> None:
    """The twin. What was pinned for another agent does not help either."""
    client = ServerClient(server.url)
    client.call("POST", "/v1/cache/warm", {"body": make_first_body(Codex)})
    body = make_first_body(Continue)
    assert read_cached(client.call("POST", guess_url(body), ask_again(body))["usage"]) < 100


# -- the page -------------------------------------------------------------------------------------------


def test_the_config_of_the_page_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "mlxrun.yaml"
    path.write_text(find_block("yaml"))
    config = load_config(path).config
    assert (config.cache.backend, config.model.context_length, config.scheduler.max_running) == (
        "disk",
        65536,
        2,
    )


@contextmanager
def run_save_body(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The page's program on a free port: its URL, and the file that it writes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script, saved = tmp_path / "save_body.py", tmp_path / "agent.json"
    script.write_text(find_block("python").replace("8001", str(port)))

    def listens() -> bool:
        assert process.poll() is None, "the program ended"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    with start_program([sys.executable, script, saved], stderr=subprocess.DEVNULL) as process:
        wait_until(listens)
        yield f"http://127.0.0.1:{port}", saved


def send_by_anthropic(url: str, body: Json) -> Mapping[str, Any]:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)
    known = {"model", "max_tokens", "messages", "system", "tools"}
    extra = {key: value for key, value in body.items() if key not in {*known, *STREAMED}}
    fields = {key: value for key, value in body.items() if key in known}
    return client.messages.create(**fields, extra_body=extra).usage.model_dump()


def send_by_openai_responses(url: str, body: Json) -> Mapping[str, Any]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    extra = {key: value for key, value in body.items() if key not in STREAMED}
    made = client.responses.create(model=body["model"], extra_body=extra)
    assert made.usage is not None
    return made.usage.model_dump()


def send_by_openai_chat(url: str, body: Json) -> Mapping[str, Any]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    extra = {key: value for key, value in body.items() if key not in ("messages", "model", *STREAMED)}
    made = client.chat.completions.create(model=body["model"], messages=body["messages"], extra_body=extra)
    assert made.usage is not None
    return made.usage.model_dump()


SENDERS = [
    (ClaudeCode, send_by_anthropic),
    (Codex, send_by_openai_responses),
    (Continue, send_by_openai_chat),
]


@pytest.mark.parametrize(("make", "send"), SENDERS, ids=lambda each: each.__name__)
def test_a_saved_body_is_warmed_and_the_sdk_hits(
    server: ModelServer,
    tmp_path: Path,
    make: type[Agent],
    send: Callable[[str, Json], Mapping[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As the page tells it: the SDK sends to the program, the command warms, and the SDK asks the server."""
    body = make_first_body(make)
    with run_save_body(tmp_path) as (url, saved):
        for each in ({**body, "tools": []}, body, {**body, "tools": []}):
            with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)):
                send(url, each)
    sent = {key: value for key, value in body.items() if key not in STREAMED}
    assert json.loads(saved.read_bytes()) == sent
    options = ["--body", str(saved), "--name", "agent", "--url", server.url, "--json"]
    assert main(["cache", "warm", *options]) == 0
    tokens = json.loads(capsys.readouterr().out)["pinned"]["tokens"]
    assert tokens > MIN_HIT
    assert read_cached(send(server.url, ask_again(body))) == tokens
