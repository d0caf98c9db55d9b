"""The results of families that `mlxrun show` reads (tools/family_results.py)."""

from __future__ import annotations

import json

from mlxrun.cli.commands.models.show import find_family_result
from tools.family_results import TARGET, render_results


def test_the_results_are_those_of_the_page() -> None:
    """`make generate` writes the file."""
    assert TARGET.read_text(encoding="utf-8") == render_results()
    found = json.loads(render_results())
    assert len(found["text"]) > 100 and len(found["vision"]) > 50


def test_a_family_has_its_result() -> None:
    assert find_family_result("qwen3", "text") == "exact"
    assert find_family_result("afm7", "text") == "exact by a slower way: one forward for each row"
    assert find_family_result("minicpmo", "vision") == "exact; audio: exact"
    assert find_family_result("gemma4", "vision").endswith(
        "audio: exact: prompts with audio beside audio are refused"
    )
    assert find_family_result("nothing", "vision").startswith("not known")
