"""The sizes of agents' prompts in benchmarks/results are those of the bodies that the tests build."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.plots.results import FOLDER
from benchmarks.tables import PROMPT_SIZES
from tests.clients.agents.continue_dev import Continue
from tests.clients.prompt_sizes import AGENTS, command, make_context, make_first_body, measure_body


def read_agents() -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads((FOLDER / f"{PROMPT_SIZES}.json").read_text())["agents"]
    return found


def test_the_kept_sizes_are_those_of_the_bodies() -> None:
    """All that does not depend on the tokenizer. `python -m tests.clients.prompt_sizes` measures anew."""
    context, kept = make_context(), read_agents()
    assert list(kept) == list(AGENTS)
    for name, make in AGENTS.items():
        sizes, _, _ = asyncio.run(measure_body(make_first_body(make), context))
        assert sizes == {key: kept[name][key] for key in sizes}, name


def test_another_body_has_another_size() -> None:
    """The counterpart."""
    body = make_first_body(Continue)
    body["messages"][0]["content"] += " One more rule."
    sizes, prompt, shared = asyncio.run(measure_body(body, make_context()))
    assert sizes["prefix_characters"] == read_agents()["Continue"]["prefix_characters"] + 15  # type: ignore[operator]
    assert "One more rule." in shared and prompt.startswith(shared) and prompt != shared


def test_the_command_counts_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    out = tmp_path / "sizes.json"
    done = CliRunner().invoke(
        command, ["--tokenizer", str(tmp_path / "tokenizer.json"), "--json", str(out)], standalone_mode=False
    )
    assert done.exit_code == 0 and "Claude Code: " in done.output, done.output
    found = json.loads(out.read_text())
    assert found["tokenizer"] == {"file": "tokenizer.json", "vocabulary": 1}
    assert all(100 < each["prefix_tokens"] < each["prompt_tokens"] for each in found["agents"].values())
