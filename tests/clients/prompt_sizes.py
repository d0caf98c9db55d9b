"""`python -m tests.clients.prompt_sizes --tokenizer FILE --json FILE`: the tokens of the first request of
each agent in tests/clients/agents. docs/agents.md has the table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from mlxrun.api.prepared import ApiContext
from mlxrun.api.prompt_prefix import guess_url, prepare_prefix
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.cli.bench.report import write_report
from mlxrun.config.settings import Config, ModelSettings
from mlxrun.core.terminal import print_line
from mlxrun.model.load.model_info import load_model_info
from tests.clients.agents.ai_sdk import Cline, OpenCode
from tests.clients.agents.claude_code import ClaudeCode
from tests.clients.agents.codex import Codex
from tests.clients.agents.continue_dev import Continue
from tests.clients.agents.open_webui import OpenWebUi
from tests.clients.agents.session import TURNS, Agent
from tests.clients.agents.zed import Zed

AGENTS: dict[str, type[Agent]] = {
    "Claude Code": ClaudeCode,
    "Codex CLI": Codex,
    "OpenCode": OpenCode,
    "Cline": Cline,
    "Continue": Continue,
    "Zed": Zed,
    "Open WebUI": OpenWebUi,
}
CONFIG = Config(model=ModelSettings(context_length=65536))  # agents ask for up to 32,000 tokens of answer


def make_first_body(make: type[Agent]) -> dict[str, Any]:
    """The body of an agent's first request."""
    agent = make()
    agent.ask(TURNS[0].text)
    return agent.make_body()


def make_context() -> ApiContext:
    """What turns bodies into prompts, with the chat template of the built-in model."""
    return ApiContext(load_model_info(CONFIG.model), CONFIG, MediaLoader(CONFIG.media, None))


async def measure_body(body: Mapping[str, Any], context: ApiContext) -> tuple[dict[str, Any], str, str]:
    """Measure a body. Returns its sizes, its prompt, and the part of that which other questions share."""
    url = guess_url(body)
    prefix = await prepare_prefix(url, body, context, "0" * 24)
    prompt = prefix.prepared.prompts[0]
    shared = context.model_info.tokenizer.decode(list(prefix.request.prompt[: prefix.tokens]))
    assert prompt.startswith(shared)
    sizes = {"url": url, "tools": len(body.get("tools", ())), "body_bytes": len(json.dumps(body))}
    return {**sizes, "prefix_characters": len(shared), "prompt_characters": len(prompt)}, prompt, shared


async def measure_agents(tokenizer: Any) -> dict[str, Any]:
    """Measure the first request of each agent, in characters and in tokens of a tokenizer."""
    context, found = make_context(), {}
    for name, make in AGENTS.items():
        sizes, prompt, shared = await measure_body(make_first_body(make), context)
        tokens = {
            "prefix_tokens": len(tokenizer.encode(shared).ids),
            "prompt_tokens": len(tokenizer.encode(prompt).ids),
        }
        found[name] = {**sizes, **tokens}
    return found


def print_sizes(report: Mapping[str, Any]) -> None:
    """Print a line for each agent."""
    for name, sizes in report["agents"].items():
        print_line(f"{name}: {sizes['prefix_tokens']:,} tokens shared, {sizes['prompt_tokens']:,} in all")


@click.command()
@click.option("--tokenizer", "path", required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def command(path: Path, json_path: Path | None) -> int:
    """Measure the first request of each agent. The tokenizer is a tokenizer.json."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    agents = asyncio.run(measure_agents(tokenizer))
    report = {
        "command": f"python -m tests.clients.prompt_sizes --tokenizer {path.name} --json FILE",
        "tokenizer": {"file": path.name, "vocabulary": tokenizer.get_vocab_size()},
        "agents": agents,
    }
    return write_report(report, json_path, print_sizes)


if __name__ == "__main__":
    command()
