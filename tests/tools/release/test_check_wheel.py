"""A wheel that lacks a file, has one too many, or says something else than pyproject.toml is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxrun import __version__
from tools.release.check_wheel import check_metadata, compare_files, find_problems, main, read_source

INFO = f"mlxrun-{__version__}.dist-info"
METADATA = f"""Metadata-Version: 2.4
Name: mlxrun
Version: {__version__}
License-Expression: MIT
Requires-Dist: mlx<0.33,>=0.32.4; platform_system == 'Darwin'
Requires-Dist: mlx[cpu]<0.33,>=0.32.4; platform_system == 'Linux'
"""


def make_wheel() -> dict[str, bytes]:
    """The files of a wheel that is as it should be."""
    commands = b"[console_scripts]\nmlxrun = mlxrun.cli.entry:main\n"
    names = {"METADATA": METADATA.encode(), "entry_points.txt": commands, "licenses/LICENSE": b"MIT"}
    return read_source() | {f"{INFO}/{name}": data for name, data in names.items()}


def list_problems(wheel: dict[str, bytes]) -> list[str]:
    return [*compare_files(wheel, read_source()), *check_metadata(wheel)]


def test_the_source_has_what_a_user_needs() -> None:
    source = read_source()
    for name in ("py.typed", "config/schema.json", "model/embedded/model/model.safetensors"):
        assert f"mlxrun/{name}" in source
    assert list_problems(make_wheel()) == []


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("mlxrun/config/schema.json", None, "the wheel lacks mlxrun/config/schema.json"),
        ("mlxrun/config/schema.json", b"{}", "mlxrun/config/schema.json differs from the source"),
        ("tests/x.py", b"", "the wheel has tests/x.py, which is not in the source"),
        (f"{INFO}/licenses/LICENSE", None, "the wheel lacks its license"),
        (f"{INFO}/entry_points.txt", b"", "entry_points.txt: no command mlxrun"),
        (
            f"{INFO}/METADATA",
            METADATA.replace(f"Version: {__version__}", "Version: 9").encode(),
            f"METADATA: Version is 9, not {__version__}",
        ),
        (
            f"{INFO}/METADATA",
            METADATA.replace("Darwin", "Windows").encode(),
            "METADATA: no mlx for Darwin",
        ),
    ],
)
def test_a_wheel_that_is_wrong(name: str, data: bytes | None, problem: str) -> None:
    wheel = make_wheel()
    if data is None:
        del wheel[name]
    else:
        wheel[name] = data
    assert list_problems(wheel) == [problem]


def test_another_tag_and_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel, sdist = (
        tmp_path / f"mlxrun-{__version__}-py3-none-any.whl",
        tmp_path / f"mlxrun-{__version__}.tar.gz",
    )
    assert list(find_problems(wheel, sdist, "v9")) == [
        f"the tag is v9, and the version {__version__}",
        f"{wheel}: there is no such file",
        f"{sdist}: there is no such file",
    ]
    assert main(tmp_path, None) == 1
    assert "there is no such file" in capsys.readouterr().err
