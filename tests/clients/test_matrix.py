"""Client libraries as users have them, each in an environment of its own, against the embedded model: a chat,
a stream, a loop of three tool calls, structured output and images. docs/clients.md has the table."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.matrix import (
    CASES,
    CLIENTS,
    ENVIRONMENTS,
    HERE,
    Client,
    answer_prompt,
    run_matrix_server,
    write_table,
)
from tests.clients.scripts import common
from tests.helpers.command_processes import run_program
from tests.helpers.served_model import make_image_part

pytestmark = pytest.mark.slow

# They take seconds to be imported, for requests that others send too: the sweep has them.
SWEPT = {"dspy", "inspect-ai", "instructor", "llama-index-llms-openai-like", "llm", "pydantic-ai-slim"}
SWEPT |= {"smolagents"}
RUNS = [
    pytest.param(
        client,
        variant,
        id=f"{client.environment}-{client.package}-{variant}".replace("/", "-"),
        marks=pytest.mark.sweep if client.package in SWEPT else (),
    )
    for client in CLIENTS
    for variant in client.variants
]
EXPECTED: dict[str, Any] = {
    "chat": "42",
    "tools": {"calls": common.CALLS, "answer": common.ANSWER},
    "structured": common.FORECAST,
    "images": ["red", "blue"],
}


class Results:
    """What each script has found; it runs when it is first asked for, with a home folder of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.given = folder / "given.json"
        pictures = {colour: make_image_part(colour)["image_url"]["url"] for colour in ("red", "blue")}
        received = {
            "chat": common.CHAT,
            "question": common.QUESTION,
            "structured": common.STRUCTURED,
            "look": common.LOOK,
            "results": common.RESULTS,
            "functions": common.FUNCTIONS,
        }
        self.given.write_text(json.dumps({"url": url, "pictures": pictures, "asked": received}))
        self.found: dict[tuple[str, str], Any] = {}

    def get(self, client: Client) -> Any:
        key = (client.environment, client.script)
        if key not in self.found:
            self.found[key] = self._run(client)
        return self.found[key]

    def _run(self, client: Client) -> Any:
        keep = {
            name: value for name, value in os.environ.items() if not name.startswith(("OPENAI", "ANTHROPIC"))
        }
        own = {"HOME": str(self.folder), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
        done = run_program([*client.command, str(self.given)], seconds=400.0, env={**keep, **own})
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    with run_matrix_server() as served:
        yield Results(tmp_path_factory.mktemp("clients"), served.url)


def require_installed(client: Client) -> None:
    if client.environment == "node":
        for program in ("node", "npm"):
            if shutil.which(program) is None:
                pytest.skip(f"there is no {program} here")
        assert (HERE / "node/node_modules").is_dir(), "`make clients` installs the packages"
    else:
        assert (ENVIRONMENTS / client.environment).is_dir(), "`make clients` installs the libraries"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("client", "variant"), RUNS)
def test_a_library_works_unchanged(results: Results, client: Client, variant: str, case: str) -> None:
    """Every case gives what is expected; a limit of the library is still one, or its line is out of date."""
    require_installed(client)
    found = results.get(client)[variant].get(case) or {}
    if case in client.missing:
        assert not found, "the library can do it: remove the line"
        return
    if (variant, case) in client.limits:
        assert "error" in found, "the library can do it: remove the line"
        return
    assert "error" not in found, found["error"]
    if case == "stream":
        assert "".join(map(str, found["found"])) == "42" or found["found"] == [common.FORECAST]
    else:
        assert found["found"] == EXPECTED[case]


def test_the_documentation_has_the_table() -> None:
    """`python -m tests.clients.matrix` writes it."""
    assert write_table() in (HERE.parents[1] / "docs/clients.md").read_text()


def test_the_model_cannot_answer_without_its_tools() -> None:
    """The twin: the script of the model sees the tools in the prompt, or it calls nothing."""
    assert answer_prompt(common.QUESTION) == "There is no tool get_weather."
    assert answer_prompt(f"{common.QUESTION} get_weather").startswith("<think>")
    assert answer_prompt(common.CHAT) is None
