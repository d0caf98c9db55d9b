"""Writes suites and their data, and reads them as `mlxrun eval` does."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from mlxrun.config.loading import LoadedConfig, load_config
from mlxrun.config.nodes import ConfigNode
from mlxrun.core.errors import ConfigError
from mlxrun.evals.suites.cell_jobs import CellJobs
from mlxrun.evals.suites.matrix import Cell, build_cells
from mlxrun.evals.suites.suite_checks import check_suite
from mlxrun.evals.suites.suite_file import SuiteFile, read_suite

CITIES = "country,capital,area,number\nFrance,Paris,EU,1\nJapan,Tokyo,Asia,2\nPeru,Lima,America,3\n"
CAPITALS = """
    models: {tiny: }
    tasks:
      capitals:
        data: cities.csv
        prompt: "Capital of {{ country }}?"
        expected: capital
"""


def write_suite(folder: Path, text: str, **tables: str) -> Path:
    """A suite beside cities.csv and other tables, by their names with `_` for the last dot."""
    for name, content in {"cities_csv": CITIES, **tables}.items():
        stem, _, ending = name.rpartition("_")
        (folder / f"{stem}.{ending}").write_text(content, encoding="utf-8")
    path = folder / "suite.yaml"
    path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
    return path


def load_model_config(path: Path | None, trees: Sequence[tuple[ConfigNode, Path]]) -> LoadedConfig:
    """The config of a model, with nothing from outside the suite."""
    return load_config(path, trees=trees)


def read_cells(path: Path) -> tuple[SuiteFile, list[Cell], CellJobs]:
    """The suite, its cells and their jobs; ConfigError with all problems if there are any."""
    file = read_suite(path)
    check_suite(file)
    cells = build_cells(file, load_model_config)
    jobs = CellJobs(file)
    jobs.check(cells)
    file.raise_problems()
    return file, cells, jobs


def find_problems(path: Path) -> list[str]:
    """The problems of a suite, without the folder that it is in."""
    try:
        read_cells(path)
    except ConfigError as error:
        return [line.replace(f"{path.parent}/", "") for line in str(error).splitlines()]
    return []
