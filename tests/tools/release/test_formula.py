"""The formula and the container file name what there is: the version, the files, Python."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

from mlxrun import __version__
from tools.release.formula import PYTHON, render_formula

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BASE = f"https://example.org/o/mlxrun/releases/download/v{__version__}"


def parse_python(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def test_the_formula(tmp_path: Path) -> None:
    sdist = tmp_path / f"mlxrun-{__version__}.tar.gz"
    sdist.write_bytes(b"files")
    text = render_formula(sdist, BASE)
    assert f'url "{BASE}/mlxrun-{__version__}.tar.gz"' in text
    assert f'sha256 "{hashlib.sha256(b"files").hexdigest()}"' in text
    assert 'homepage "https://example.org/o/mlxrun"' in text
    assert f'license "{PROJECT["license"]}"' in text and f'assert_match "{__version__}"' in text
    description = re.findall(r'desc "(.*)"', text)[0]
    assert description.lower() in PROJECT["description"].lower() and len(description) < 80
    assert text.count(f"python@{PYTHON}") == 1 and f'"python{PYTHON}", "-m", "venv"' in text
    assert text.count("\nend\n") == 1 and len(re.findall(r"\b(?:class|do|def)\b", text)) == text.count(
        "end\n"
    )


def test_python_is_new_enough() -> None:
    least = parse_python(PROJECT["requires-python"].removeprefix(">="))
    container = re.findall(r"^ARG PYTHON=(.*)$", read_container_file(), re.MULTILINE)[0]
    assert parse_python(PYTHON) >= least <= parse_python(container)


def read_container_file() -> str:
    return (ROOT / "packaging" / "Containerfile").read_text(encoding="utf-8")


def test_the_container_file() -> None:
    """What it copies is what `make wheel` names, and its argument installs an extra that there is."""
    text = read_container_file()
    assert "COPY mlxrun-*.whl " in text and Path(f"mlxrun-{__version__}-py3-none-any.whl").match(
        "mlxrun-*.whl"
    )
    extras = {"cuda", "vision"}
    assert text.count("ARG BACKEND=cpu") == 1 and set(re.findall(r"\[([a-z]+)\]\"", text)) == extras
    assert extras <= PROJECT["optional-dependencies"].keys() and 'ENTRYPOINT ["mlxrun"]' in text
    assert "mlxrun" in PROJECT["scripts"]
