"""`python -m tools.family_results` writes the results of docs/models.md where `mlxrun show` reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
TARGET = ROOT / "mlxrun" / "model" / "families.json"
_KINDS = {"## Text families": "text", "## Vision-language families": "vision"}
_ROW = re.compile(r"^\| `(?P<family>[^`]+)` \| (?P<cells>.*) \|$")


def render_results() -> str:
    """JSON: for each kind of family its families, and for each family its result. Audio, a column of those
    that see, is a kind too."""
    found: dict[str, dict[str, str]] = {kind: {} for kind in (*_KINDS.values(), "audio")}
    current: dict[str, str] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        for title, kind in _KINDS.items():
            if line.startswith(title):
                current = found[kind]
        if row := _ROW.match(line):
            result, note, *audio = (cell.strip() for cell in row["cells"].split(" | "))
            current[row["family"]] = ": ".join(filter(None, (result, note)))
            if any(audio):
                found["audio"][row["family"]] = audio[0]
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render_results(), encoding="utf-8")
