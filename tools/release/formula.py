"""`python -m tools.release.formula dist URL`: writes the Homebrew formula for the sdist in `dist`, which
will be found below URL."""

from __future__ import annotations

import hashlib
import sys
import tomllib
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from mlxrun import __version__
from mlxrun.core.terminal import print_line

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "packaging" / "mlxrun.rb.jinja"
PYTHON = "3.12"  # that Homebrew installs beside it


def render_formula(sdist: Path, base: str) -> str:
    """The formula that installs this sdist from below the URL `base`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    description = project["description"].removeprefix("A ")  # as Homebrew wants it
    template = Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    return template.render(
        description=description[0].upper() + description[1:],
        homepage=base.partition("/releases/")[0],
        url=f"{base}/{sdist.name}",
        sha256=hashlib.sha256(sdist.read_bytes()).hexdigest(),
        license=project["license"],
        python=PYTHON,
        version=__version__,
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    path = folder / "mlxrun.rb"
    path.write_text(render_formula(folder / f"mlxrun-{__version__}.tar.gz", sys.argv[2]), encoding="utf-8")
    print_line(f"{path}: written")
