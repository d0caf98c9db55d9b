"""`mlxrun job make` as it is typed."""

from __future__ import annotations

import fcntl
import json
import signal
import time
from pathlib import Path

import pytest

from mlxrun.cli.commands import job
from mlxrun.cli.main import main
from mlxrun.jobs.lines.job_maker import JobMaker


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("c.csv").write_text("country,capital\nFrance,Paris\nJapan,Tokyo\n")
    Path("t.jinja").write_text("Capital of {{ country }}?\n")
    return Path("c.csv")


@pytest.mark.usefixtures("table")
def test_a_job_beside_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "job",
        "make",
        "c.csv",
        "--template",
        "t.jinja",
        "--expected",
        "capital",
        "--set",
        "max_tokens=5",
    ]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out == "c.job.jsonl: 2 lines; to run them: mlxrun batch c.job.jsonl\n"
    first = json.loads(Path("c.job.jsonl").read_text().splitlines()[0])
    assert first == {
        "id": "row-1",
        "messages": [{"role": "user", "content": "Capital of France?"}],
        "max_tokens": 5,
        "eval": {"expected": "Paris", "match": "exact"},
    }
    before = Path("c.job.jsonl").read_bytes()
    assert main(arguments) == 2
    assert "c.job.jsonl exists already; --force overwrites it" in capsys.readouterr().err
    assert main([*arguments, "--force"]) == 0
    assert Path("c.job.jsonl").read_bytes() == before


@pytest.mark.usefixtures("table")
def test_a_problem_leaves_no_file_and_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    for output in ([], ["-o", "-"]):
        assert main(["job", "make", "c.csv", "--prompt", "{{ contry }}", *output]) == 2
        out, err = capsys.readouterr()
        assert out == "" and len(err.splitlines()) == 2
        assert "'contry' is undefined (2 rows, of which this is the first)" in err
    assert sorted(path.name for path in Path().iterdir()) == ["c.csv", "t.jinja"]


@pytest.mark.usefixtures("table")
def test_lines_on_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["job", "make", "c.csv", "--prompt", "{{ country }}", "--id", "capital", "-o", "-"]) == 0
    lines = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [line["id"] for line in lines] == ["Paris", "Tokyo"]


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give one of --template and --prompt"),
        (["--prompt", "{{ country }}", "--template", "t.jinja"], "give one of --template and --prompt"),
        (["--prompt", "{{ country }}", "--match", "contains"], "--match and --group need --expected"),
        (
            ["--prompt", "x", "--expected", "capital", "--match", "fuzzy"],
            "'fuzzy' is not one of 'exact', 'contains', 'contains_all', 'regex', 'json', 'number'",
        ),
        (["--prompt", "{{ country }}", "--set", "x"], "--set x: it does not have the form field=value"),
        (["--prompt", "{{ country }}", "--set", "x=["], "--set x: this is not YAML"),
        (["--template", "none.jinja"], "none.jinja: cannot read the template"),
        (["--prompt", "{{ country }}", "-o", "no/x.jsonl"], "no/x.jsonl: cannot be written"),
    ],
)
def test_mistakes(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "make", "c.csv", *arguments]) == 2
    assert says in capsys.readouterr().err
    assert main(["job", "make", "none.csv", *arguments]) == 2
    assert ("none.csv: cannot be read: there is no such file" in capsys.readouterr().err) != ("fuzzy" in says)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_leave_no_part_of_a_file(
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """Exit code 130. The process takes both signals as `handle_interrupts` has it."""

    def interrupt(*_: object) -> int:
        assert Path("c.job.jsonl.tmp").exists()
        signal.raise_signal(number)  # to this thread: another one would not end the sleep
        time.sleep(5)
        raise AssertionError("the signal was ignored")

    earlier = signal.signal(number, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(number, earlier))
    monkeypatch.setattr(JobMaker, "write_lines", interrupt)
    assert main(["job", "make", "c.csv", "--prompt", "{{ country }}"]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["c.csv", "t.jinja"]


@pytest.mark.usefixtures("table")
def test_long_tables_show_their_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("c.csv").write_text("country\n" + "x\n" * 2500)
    monkeypatch.setattr(job, "REPORT_SECONDS", 0.0)
    assert main(["job", "make", "c.csv", "--prompt", "{{ country }}"]) == 0
    assert capsys.readouterr().err == "c.csv: 1,000 rows read\nc.csv: 2,000 rows read\n"


def test_help_lists_the_kinds_of_matches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "make", "--help"]) == 0
    assert "exact|contains|contains_all|regex|json|number" in "".join(capsys.readouterr().out.split())


def test_a_file_of_a_killed_command_is_removed(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where nothing is written, because the output is there."""
    left = Path("c.job.jsonl.tmp")
    for flags, code in (([], 0), ([], 2), (["--force"], 0)):
        left.write_bytes(b'{"id": "half a li')
        assert main(["job", "make", "c.csv", "--prompt", "{{ country }}", *flags]) == code
        assert "c.job.jsonl.tmp: removed; it was left by a command that was killed" in capsys.readouterr().err
        assert not left.exists()
        assert "half" not in Path("c.job.jsonl").read_text()


def test_two_commands_do_not_write_one_file(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Path("c.job.jsonl.tmp").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main(["job", "make", "c.csv", "--prompt", "{{ country }}"]) == 2
        assert "c.job.jsonl.tmp: another `mlxrun job make` is writing it" in capsys.readouterr().err
        assert Path("c.job.jsonl.tmp").exists() and not Path("c.job.jsonl").exists()
