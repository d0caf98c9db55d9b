"""The families of models that most people use, checked in tiny form for `mlxrun bench report`.

The tiny models and their checks are those of `python -m benchmarks sweep`, which a checkout has and the wheel
has not. Without them the report says that nothing was checked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlxrun

ROOT = Path(mlxrun.__file__).parents[1]
FAMILIES = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next"),
    *("gemma3_text", "mistral3", "phi3", "gpt_oss", "deepseek_v3"),
)
SKIPPED = "benchmarks/ is not here: it is in the repository, not in the wheel"


def check_families(
    say: Callable[[str], None], families: Sequence[str] = FAMILIES, root: Path = ROOT
) -> dict[str, Any]:
    """`results`, one record for each family; `skipped`, why there are none or fewer."""
    if not (root / "benchmarks" / "sweep" / "command.py").is_file():
        say(f"families are not checked: {SKIPPED}")
        return {"results": [], "skipped": SKIPPED}
    command = [sys.executable, "-m", "benchmarks", "sweep", "--json", *families]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True)  # progress is on stderr
    try:
        return {"results": json.loads(done.stdout)["families"], "skipped": None}
    except ValueError:
        return {"results": [], "skipped": f"`{' '.join(command[1:])}` ended with exit code {done.returncode}"}


def describe_families(found: dict[str, Any]) -> str:
    """One line: how many are as the library, and those that are not."""
    if found["skipped"] is not None:
        return f"families: not checked: {found['skipped']}"
    good = [each["family"] for each in found["results"] if each["status"] in ("exact", "slower")]
    bad = [f"{each['family']} {each['status']}" for each in found["results"] if each["family"] not in good]
    rest = f"; {', '.join(bad)}" if bad else ""
    return f"families: {len(good)} of {len(found['results'])} answer as the library does{rest}"
