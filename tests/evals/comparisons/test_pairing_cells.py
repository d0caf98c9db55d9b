"""Which runs of two sides belong together."""

from __future__ import annotations

import pytest

from mlxrun.core.errors import JobError
from mlxrun.evals.comparisons.pairing import match_cells, remove_seed
from mlxrun.evals.run_folders.run_folder import RunFolder


def make_runs(*names: str) -> list[RunFolder]:
    """Runs that only have a name."""
    runs = [RunFolder.__new__(RunFolder) for _ in names]
    for run, name in zip(runs, names, strict=True):
        run.name = name
    return runs


def match(first: list[str], second: list[str], *, common: bool = False) -> dict[str, list[tuple[str, str]]]:
    cells, _ = match_cells(make_runs(*first), make_runs(*second), common=common)
    return {cell.name: [(a.name, b.name) for a, b in cell.runs] for cell in cells}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("m/t/seed-1", "m/t"),
        ("m/t/seed-1,temperature-0.5", "m/t/temperature-0.5"),
        ("t/temperature-0.5", "t/temperature-0.5"),
        ("seed-1", ""),
        ("seed-1/t", "seed-1/t"),
        ("m/t/top_p-1,seed-2,few", "m/t/top_p-1,few"),
        ("m/t/seed-1,seed-3", "m/t/seed-3"),
        ("m/t/seed-1,temperature-0,seed-3", "m/t/temperature-0,seed-3"),
    ],
)
def test_the_seed_is_no_part_of_a_cell(name: str, wanted: str) -> None:
    assert remove_seed(name) == wanted


def test_two_single_runs_belong_together_whatever_their_names() -> None:
    assert match(["a"], ["b"]) == {"": [("a", "b")]}


def test_cells_of_one_name_belong_together() -> None:
    names = ["m/add/seed-1", "m/add/seed-2", "m/sub/seed-1", "m/sub/seed-2"]
    assert match(names, names[::-1]) == {
        "m/add": [(name, name) for name in names[:2]],
        "m/sub": [(name, name) for name in names[2:]],
    }


def test_seeds_of_examples_are_no_epochs() -> None:
    """`vary: {few_shot.seed: [3, 4]}` changes the prompts."""
    names = [f"m/t/seed-{seed},seed-{examples}" for seed in (1, 2) for examples in (3, 4)]
    assert match(names, names) == {
        "m/t/seed-3": [(name, name) for name in names[::2]],
        "m/t/seed-4": [(name, name) for name in names[1::2]],
    }


def test_one_model_a_side_may_be_another_one() -> None:
    assert match(["bf16/t/s-1", "bf16/u/s-1"], ["4bit/t/s-1", "4bit/u/s-1"]) == {
        "t/s-1": [("bf16/t/s-1", "4bit/t/s-1")],
        "u/s-1": [("bf16/u/s-1", "4bit/u/s-1")],
    }


def test_missing_cells_are_named() -> None:
    with pytest.raises(
        JobError, match=r"only the first side has m/c and only the second side has m/d; --common"
    ):
        match(["m/a", "m/b", "m/c"], ["m/a", "m/b", "m/d"])
    assert list(match(["m/a", "m/b", "m/c"], ["m/a", "m/b", "m/d"], common=True)) == ["m/a", "m/b"]
    with pytest.raises(JobError) as caught:
        match(["m/a", "n/b"], ["m/c", *(f"n/{at}" for at in range(5))], common=True)
    assert str(caught.value) == (
        "the two sides have no run of the same name: only the first side has m/a, n/b "
        "and only the second side has m/c, n/0, n/1, n/2, n/3, ..."
    )
