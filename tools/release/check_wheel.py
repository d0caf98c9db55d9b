"""`python -m tools.release.check_wheel dist`: the wheel has the files of the package and nothing else.

A file that is missing from a wheel is missed only by those who install it. So the wheel is compared with the
source byte by byte, its name and metadata with pyproject.toml and the tag, and its command is run from a
folder of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from email.parser import Parser
from pathlib import Path

from mlxrun import __version__
from mlxrun.core.terminal import print_error, print_line

ROOT = Path(__file__).parents[2]
PACKAGE = "mlxrun"
MOST_BYTES = 20_000_000  # a wheel of more has something that belongs elsewhere
SDIST_FILES = ("pyproject.toml", "README.md", "LICENSE", "Makefile", "packaging/Containerfile")


def main(folder: Path, tag: str | None) -> int:
    """Print what is wrong in the release files of `folder`; 1 if anything is. `tag`: of the release."""
    wheel = folder / f"{PACKAGE}-{__version__}-py3-none-any.whl"
    problems = list(find_problems(wheel, folder / f"{PACKAGE}-{__version__}.tar.gz", tag))
    for problem in problems:
        print_error(f"check-wheel: {problem}")
    if not problems:
        print_line(f"{wheel}: complete, and its command runs")
    return int(bool(problems))


def find_problems(wheel: Path, sdist: Path, tag: str | None) -> Iterator[str]:
    """What is wrong with a wheel and an sdist."""
    if tag is not None and tag != f"v{__version__}":
        yield f"the tag is {tag}, and the version {__version__}"
    missing = [path for path in (wheel, sdist) if not path.is_file()]
    yield from (f"{path}: there is no such file" for path in missing)
    if missing:
        return
    with zipfile.ZipFile(wheel) as archive:
        found = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    contents = list(compare_files(found, read_source()))
    yield from contents
    yield from check_metadata(found)
    if wheel.stat().st_size > MOST_BYTES:
        yield f"{wheel}: {wheel.stat().st_size} bytes, at most {MOST_BYTES} were expected"
    with tarfile.open(sdist) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    yield from (f"{sdist}: lacks {name}" for name in SDIST_FILES if name not in names)
    if not contents:
        yield from run_command(wheel)


def read_source() -> dict[str, bytes]:
    """The files of the package by their names in a wheel."""
    paths = (path for path in (ROOT / PACKAGE).rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in paths}


def compare_files(wheel: Mapping[str, bytes], source: Mapping[str, bytes]) -> Iterator[str]:
    """Files that a wheel lacks, that differ, and that are not of the package."""
    own = {name for name in wheel if not name.startswith(f"{PACKAGE}-{__version__}.dist-info/")}
    yield from (f"the wheel lacks {name}" for name in sorted(source.keys() - own))
    yield from (f"the wheel has {name}, which is not in the source" for name in sorted(own - source.keys()))
    same = sorted(own & source.keys())
    yield from (f"{name} differs from the source" for name in same if wheel[name] != source[name])


def check_metadata(wheel: Mapping[str, bytes]) -> Iterator[str]:
    """Name, version, license, commands, and the packages that MLX needs on each system."""
    folder = f"{PACKAGE}-{__version__}.dist-info"
    metadata = Parser().parsestr(wheel.get(f"{folder}/METADATA", b"").decode())
    for key, expected in (("Name", PACKAGE), ("Version", __version__), ("License-Expression", "MIT")):
        if metadata[key] != expected:
            yield f"METADATA: {key} is {metadata[key]}, not {expected}"
    needed = " ".join(metadata.get_all("Requires-Dist", []))
    for system in ("Darwin", "Linux"):
        if not re.search(rf"mlx[^;]*; platform_system == '{system}'", needed):
            yield f"METADATA: no mlx for {system}"
    if f"{folder}/licenses/LICENSE" not in wheel:
        yield "the wheel lacks its license"
    if f"{PACKAGE} = {PACKAGE}.cli.entry:main" not in wheel.get(f"{folder}/entry_points.txt", b"").decode():
        yield "entry_points.txt: no command mlxrun"


def run_command(wheel: Path) -> Iterator[str]:
    """What is wrong when the command runs from the wheel's files, with the libraries of this environment."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        code = (
            "import mlxrun, sys; print(mlxrun.__file__); from mlxrun.cli.entry import main; sys.exit(main())"
        )
        for arguments in (["--version"], ["config", "show"]):
            done = subprocess.run(
                [sys.executable, "-P", "-c", code, *arguments],
                env={**os.environ, "PYTHONPATH": folder},
                cwd=folder,
                capture_output=True,
                text=True,
            )
            if done.returncode != 0 or not done.stdout.startswith(folder):
                yield f"mlxrun {arguments[0]}: exit code {done.returncode}: {done.stderr or done.stdout}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), os.environ.get("TAG")))
