"""Draws all images of the documentation into `docs/images`: `python -m benchmarks.plots`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.plots import cast, ragged, request_life, server
from benchmarks.plots.results import FOLDER, hash_result, read
from benchmarks.plots.theme import THEMES, save, themed

PLOTS = {  # of each picture: what draws it, and the result that it shows
    "ragged": (ragged.draw, "engine-h200"),
    "ragged-cpu": (ragged.draw, "engine-cpu"),
    "server": (server.draw, "server-cpu"),
}
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw everything into the folder that is given, or into `docs/images`; print the names of the files."""
    given = sys.argv[1:] if arguments is None else arguments
    folder = Path(given[0]) if given else IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    for theme in THEMES:
        with themed(theme):
            for name, (draw, result) in PLOTS.items():
                figure = draw(read(result), theme)
                save(figure, folder / f"{name}-{theme.name}.svg", hash_result(result))
        _write(folder / f"request-life-{theme.name}.svg", request_life.draw(theme))
    _write(folder / "resume.svg", cast.draw(FOLDER / "resume.cast"))
    for path in sorted(folder.glob("*.svg")):
        print(path.name)
    return 0


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
