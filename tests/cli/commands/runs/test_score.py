"""`mlxrun score` as it is typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mlxrun.cli.commands.runs import score
from mlxrun.cli.main import main
from tests.helpers.batch_fakes import Bench, chat, chats, edit_line, read, write_job
from tests.helpers.command_processes import run_program

pytestmark = pytest.mark.thorough


@pytest.fixture
async def bench(tmp_path: Path) -> Bench:
    """A finished run of four chats."""
    found = Bench(write_job(tmp_path, chats(4)))
    await found.run()
    return found


def test_another_match(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(bench.job), "--match", "exact"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{bench.job}:",
        "group  lines  correct       score [95 %]  failed",
        "g0         2        0  0.0 % [0.0, 65.8]       0",
        "g1         2        0  0.0 % [0.0, 65.8]       0",
        "total      4        0  0.0 % [0.0, 49.0]       0",
    ]
    assert main(["score", str(bench.paths.out)]) == 0
    assert "total      4        4" in capsys.readouterr().out


def test_a_scorer(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 if an answer could not be scored. Its failures are in the table."""
    code = "def score(answer, line):\n    assert line['custom_id'] != 'line-2'\n    return 0.5\n"
    (tmp_path / "s.py").write_text(code)
    assert main(["score", str(bench.paths.folder), "--scorer", f"{tmp_path}/s.py:score"]) == 1
    out = capsys.readouterr().out
    assert "unscored" in out and "1 answer could not be scored; `note` in" in out
    assert [record["eval"]["score"] for record in read(bench.paths.out)].count(0.5) == 3


LIKELIEST = {"match": "likeliest", "expected": 0, "context_chars": 2}


async def test_likelihoods_are_left_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A scorer, another match and a judge read answers, and a comparison of likelihoods has none. The other
    runs of a folder, and the other lines of a run, are scored."""
    (tmp_path / "s.py").write_text("def score(answer): return 0.5\n")
    (tmp_path / "j.yaml").write_text("prompt: '{{ answer }}'\nverdict: {choices: {A: 1, B: 0}}\n")
    choice = {"prompt": ["a b", "a c"], "echo": True, "logprobs": 1, "max_tokens": 0, "eval": LIKELIEST}
    lines = {"likely": [{"id": "l", **choice}], "mixed": [{"id": "l", **choice}, *chats(2)]}
    benches = {name: Bench(write_job(tmp_path, each, f"{name}.jsonl")) for name, each in lines.items()}
    for each in benches.values():
        await each.run()
    before = benches["likely"].paths.out.read_bytes()
    likely, *_ = sorted(read(benches["mixed"].paths.out), key=lambda record: record["custom_id"] != "l")
    scorer = f"{tmp_path}/s.py:score"
    assert main(["score", str(tmp_path), "--scorer", scorer]) == 0
    err = capsys.readouterr().err
    assert "likely.out.jsonl: 1 line with `match: likeliest` left as they are" in err
    assert "mixed.out.jsonl: 1 of 3 lines with `match: likeliest` left as they are" in err
    assert benches["likely"].paths.out.read_bytes() == before
    records = sorted(read(benches["mixed"].paths.out), key=lambda record: record["custom_id"] != "l")
    assert records[0] == likely and [each["eval"]["score"] for each in records[1:]] == [0.5, 0.5]
    for options in (["--match", "exact"], ["--scorer", scorer], ["--judge", str(tmp_path / "j.yaml")]):
        assert main(["score", str(benches["likely"].job), *options]) == 2
        assert "no line has an answer text that could be scored in another way" in capsys.readouterr().err


def test_mistakes(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and nothing changes."""
    before, job = bench.paths.out.read_bytes(), str(bench.job)
    (tmp_path / "j.yaml").write_text("prompt: '{{ answer }} {{ x }}'\nverdict: {choices: {A: 1, B: 0}}\n")
    for arguments, says in (
        ([job, "--match", "fuzzy"], "'fuzzy' is not one of"),
        ([job, "--match", "number"], f"{job}:1: eval.expected must be a number"),
        ([job, "--eval", "tolerance=1"], f"{job}:1: eval.tolerance belongs to the match number"),
        ([job, "--eval", "x"], "--eval x: it does not have the form field=value"),
        ([job, "--scorer", "no_such:f"], "scorer 'no_such:f': cannot be imported"),
        ([job, "--scorer", "x:y", "--match", "exact"], "--scorer cannot be given with --match"),
        ([job, "--judge", "x.yaml", "--match", "exact"], "--judge cannot be given with --match"),
        ([job, "--match", "judge"], "--match judge needs a judge: give --judge FILE"),
        ([job, "--judge", "none.yaml"], "none.yaml: cannot read the judge"),
        ([job, "--judge", f"{tmp_path}/j.yaml"], "j.yaml: 'x' is not a variable of a judge"),
        ([job, "-c", "x.yaml"], "give --judge"),
        ([str(tmp_path / "none.jsonl")], "no such file"),
    ):
        assert main(["score", *arguments]) == 2, arguments
        assert says in capsys.readouterr().err
    assert bench.paths.out.read_bytes() == before


@pytest.mark.parametrize("journal", [True, False])
def test_deleted_records(bench: Bench, capsys: pytest.CaptureFixture[str], journal: bool) -> None:
    """They are named, with or without the journal; a test does not shrink, and nothing is written."""
    kept = bench.paths.out.read_bytes().splitlines(keepends=True)[:2]
    bench.paths.out.write_bytes(b"".join(kept))
    before = bench.paths.manifest.read_bytes()
    if not journal:
        bench.paths.journal.unlink()
    assert main(["score", str(bench.job)]) == 2
    out, err = capsys.readouterr()
    says = "is missing, which the journal has (and 1 more)" if journal else "journal.jsonl: is missing"
    assert says in err and not out
    assert bench.paths.manifest.read_bytes() == before and bench.paths.journal.exists() is journal
    bench.paths.out.unlink()
    assert main(["score", str(bench.paths.out)]) == 2
    assert "missing" in capsys.readouterr().err


async def test_an_unfinished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(write_job(tmp_path, chats(5)))
    await bench.run(limit=2)
    assert main(["score", str(bench.job)]) == 0
    assert "unfinished: the scores are of 2 of 5 lines\n" in capsys.readouterr().out


@pytest.mark.parametrize("journal", ["missing", "empty", "head", "short"])
def test_records_without_digests_are_refused(
    bench: Bench, capsys: pytest.CaptureFixture[str], journal: str
) -> None:
    """A new journal would vouch for an edited record."""
    lines = bench.paths.journal.read_bytes().splitlines(keepends=True)
    kept = {"missing": 0, "empty": 0, "head": 1, "short": len(lines) - 1}[journal]
    bench.paths.journal.write_bytes(b"".join(lines[:kept]))
    if journal == "missing":
        bench.paths.journal.unlink()
    edit_line(bench.paths.out, -1, lambda data: data.replace(b"say", b"SAY", 1))
    files = [bench.paths.out, bench.paths.manifest, bench.paths.scores]
    before = [path.read_bytes() for path in files]
    assert main(["score", str(bench.job)]) == 2
    says = "journal.jsonl: is missing" if journal == "missing" else "has no digest in journal.jsonl"
    assert says in capsys.readouterr().err
    assert [path.read_bytes() for path in files] == before
    assert bench.paths.journal.exists() is (journal != "missing")


def test_a_run_without_evals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import asyncio

    bench = Bench(write_job(tmp_path, [chat("a", "x")]))
    asyncio.run(bench.run())
    assert main(["score", str(bench.job)]) == 2
    assert "no line has an `eval`; give --scorer or --judge" in capsys.readouterr().err


def test_a_judge(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its config is that of the command, and its job is in the run folder."""
    path, judge = tmp_path / "judge.yaml", Bench(bench.paths.folder / "judge" / "job.jsonl")
    path.write_text("prompt: 'yes {{ answer }}'\nverdict: {choices: {'yes': 1, 'no': 0}}\n")
    monkeypatch.setattr("mlxrun.cli.run_setup.make_command_setup", lambda *_: judge.make_setup())
    assert main(["score", str(bench.job), "--judge", str(path), "--set", "scheduler.max_running=2"]) == 0
    assert "total      4        4" in capsys.readouterr().out and judge.ran == 4
    assert json.loads(bench.paths.manifest.read_text())["scoring"]["judge"]["job"] == "judge/job.jsonl"


def test_help_teaches_and_loads_nothing() -> None:
    script = (
        "import sys; from mlxrun.cli.main import main; code = main(['score', '--help']);"
        "heavy = {'mlx', 'transformers', 'aiohttp', 'numpy', 'scipy', 'PIL', 'rich'} & set(sys.modules);"
        "sys.exit(code or (f'imports {heavy}' if heavy else 0))"
    )
    found = run_program([sys.executable, "-c", script])
    assert found.returncode == 0, found.stderr
    for word in ("--scorer", "--judge", "def score(answer", "verdict:", "Exit codes:"):
        assert word in found.stdout
    assert score.EPILOG
