"""`mlxrun compare`: what it prints, the exit codes of its conditions, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mlxrun.cli.main import main
from tests.helpers.batch_fakes import chat
from tests.helpers.eval_runs import HAS_X, run_lines, sampled_chats

pytestmark = pytest.mark.thorough


async def make_drop(folder: Path) -> tuple[str, str]:
    """Two runs; the second one's answers are cut, so that none is right."""
    lines = [chat(f"q{at}", f"say {at}", HAS_X | {"expected": f"say {at}"}) for at in range(20)]
    cut = [line | {"body": line["body"] | {"max_tokens": 2}} for line in lines]
    first = await run_lines(folder / "a", lines)
    return str(first), str(await run_lines(folder / "b", cut))


async def test_a_comparison_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = await make_drop(tmp_path)
    assert main(["compare", *runs, "--show", "1"]) == 0
    out, err = capsys.readouterr()
    assert "20 lines worse: q0, q1" in out and "expected:  say 0" in out and err == ""
    assert "`max_tokens` of 20 lines is 2, was null" in out
    assert out.endswith("Result: the second run scores 100.0 points lower; significant (p < .001).\n")


async def test_conditions_set_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = await make_drop(tmp_path)
    conditions = ["--fail-if", "regression", "--fail-if", "score < 0.8", "--fail-if", "better > 3"]
    assert main(["compare", first, second, *conditions]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "mlxrun: --fail-if regression: the score changed by -100.0 points (p = 9.5e-07)",
        "mlxrun: --fail-if score < 0.8: score is 0",
    ]
    assert main(["compare", second, first, *conditions]) == 1
    assert capsys.readouterr().err == "mlxrun: --fail-if better > 3: better is 20\n"
    equal = ["--equivalent-within", "20", "--fail-if", "not equivalent"]
    assert main(["compare", first, first, *equal]) == 0
    assert main(["compare", first, second, *equal]) == 1


async def test_json_has_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = await make_drop(tmp_path)
    assert main(["compare", *runs, "--json", "-", "--fail-if", "regression"]) == 1
    found = json.loads(capsys.readouterr().out)
    [comparison] = found["comparisons"]
    assert len(comparison["worse"]) == 20 and comparison["total"]["mcnemar"]["worse"] == 20
    assert found["failed_conditions"][0].startswith("regression: the score changed")
    file = tmp_path / "c.json"
    assert main(["compare", *runs, "--json", str(file)]) == 0
    assert json.loads(file.read_text()) == {**found, "failed_conditions": []}
    assert "Result:" in capsys.readouterr().out


async def test_suites_are_compared_cell_by_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side, seed in (("a", 1), ("b", 2)):
        for task in ("add", "sub"):
            for epoch in (0, 1):
                folder = tmp_path / side / "m" / task / f"seed-{epoch}"
                await run_lines(folder, sampled_chats(8), seed + 2 * epoch)
    sides = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["compare", *sides]) == 0
    out = capsys.readouterr().out
    assert out.count("Result:") == 2 and "== m/add" in out and "== m/sub" in out
    assert "\n  m/add" in out and "\n  m/sub" in out  # the summary
    folder = tmp_path / "b" / "m" / "add" / "seed-1"
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert main(["compare", *sides]) == 2
    assert "only the first side has m/add/seed-1; --common compares the others" in capsys.readouterr().err
    assert main(["compare", *sides, "--common"]) == 0
    assert "left out, as only one side has them: m/add/seed-1" in capsys.readouterr().out


async def test_other_lines_and_wrong_options_exit_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = str(await run_lines(tmp_path / "a", sampled_chats(4)))
    second = str(await run_lines(tmp_path / "b", sampled_chats(3)))
    for options, message in [
        ([], "are not runs of the same lines: 1 line only in"),
        (["--fail-if", "regresion"], "'regresion' is no condition; a condition is a value (score,"),
        (["--fail-if", "equivalent"], "'equivalent' needs --equivalent-within"),
        (["--cluster", "("], "--cluster '(' is not a regular expression"),
        (["--common", "--fail-if", "worse > 3 in nix"], "there is no group 'nix' (groups: g0, g1)"),
        (["--equivalent-within", "0"], "Invalid value for '--equivalent-within'"),
    ]:
        assert main(["compare", first, second, *options]) == 2
        assert message in capsys.readouterr().err
    assert main(["compare", first, first, "--json", str(tmp_path / "no" / "c.json")]) == 2
    assert "no/c.json: cannot be written: No such file" in capsys.readouterr().err
    assert main(["compare", first, str(tmp_path / "nothing")]) == 2
    assert "nothing: no such file or folder" in capsys.readouterr().err
    assert main(["compare", first, second, "--common"]) == 0
    assert "left out: 1 line only in the first run ('q3')" in capsys.readouterr().out


async def test_clusters_by_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [chat(f"q{at // 5}-e{at % 5}", "say", HAS_X) for at in range(40)]
    runs = [str(await run_lines(tmp_path / str(seed), lines, seed)) for seed in (1, 2)]
    assert main(["compare", *runs, "--cluster", r"(.+)-e\d"]) == 0
    out = capsys.readouterr().out
    assert "paired t test over 8 clusters" in out and "McNemar" not in out


async def test_more_than_two_runs_are_ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = await make_drop(tmp_path)
    third = await run_lines(tmp_path / "c", [chat(f"q{at}", "x", HAS_X) for at in range(20)])
    assert main(["compare", first, second, str(third), "--common", "--json", str(tmp_path / "x.json")]) == 2
    assert "no line in common" in capsys.readouterr().err
    again = await run_lines(
        tmp_path / "d", [chat(f"q{at}", f"say {at}", HAS_X | {"expected": f"say {at}"}) for at in range(20)]
    )
    assert main(["compare", first, second, str(again), "--json", str(tmp_path / "x.json")]) == 0
    out = capsys.readouterr().out
    assert "1 to 2" in out and "100.0 % [" in out and "by Holm" in out
    [ranking] = json.loads((tmp_path / "x.json").read_text())["rankings"]
    assert [side["best"] for side in ranking["ranking"]] == [1, 1, 3] and len(ranking["pairs"]) == 3


async def test_power_says_how_many_lines_are_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [str(await run_lines(tmp_path / str(seed), sampled_chats(60), seed)) for seed in (1, 2)]
    assert main(["compare", *jobs, "--power", "2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"power of 80 %: 60 lines show a difference of [\d.]+ points or more; [\d,]+ lines show one of 2 p",
        out,
    )


async def test_power_of_a_single_line_is_said_to_be_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = str(await run_lines(tmp_path, sampled_chats(1)))
    assert main(["compare", job, job, "--power", "2"]) == 0
    assert "--power is not known: differences of quantiles, of a single line" in capsys.readouterr().err


def test_judged_pairs_are_ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"first": "a", "second": "b", "winner": "ab"[at % 3 == 0], "id": at} for at in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["compare", "--judged", str(path)]) == 0
    out = capsys.readouterr().out
    assert "+60 [" in out and "66.7 %" in out and out.index(" a ") < out.index(" b ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a", "b", "c", "--fail-if", "regression"], "--fail-if has no effect with a comparison of each run"),
        (["a", "b", "--power", "nan"], "Invalid value for '--power': nan is no finite number"),
        (["a", "--power", "1"], "--power has no effect with a comparison of each run"),
        (["a", "--judged", "p.jsonl"], "RUNS has no effect with --judged"),
        ([], "Missing argument 'RUNS...'"),
    ],
)
def test_what_has_no_effect_is_refused(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *arguments]) == 2
    assert says in capsys.readouterr().err
