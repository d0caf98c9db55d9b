"""`mlxrun bench`: which benchmarks it has, and where the others are now."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from mlxrun.cli.commands.bench import MOVED, command


def test_the_benchmarks_of_the_product_are_listed() -> None:
    shown = CliRunner().invoke(command, ["--help"]).output
    assert all(f"  {name}  " in shown for name in ("engine", "serve", "model"))


@pytest.mark.parametrize("name", MOVED)
def test_a_benchmark_that_moved_says_where_it_is(name: str) -> None:
    result = CliRunner().invoke(command, [name, "--repeat", "1"])
    assert result.exit_code == 2
    assert f"is now called `python -m benchmarks {MOVED[name]}`" in result.output
