"""`mlxrun batch` as it is typed: what it prints where, exit codes, --dry-run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxrun.cli.commands import batch
from mlxrun.cli.main import main
from mlxrun.config.settings import Config
from mlxrun.core.request import Request, TokenEvent
from mlxrun.jobs.run.progress import ProgressMeter
from mlxrun.jobs.scoring.eval_spec import MATCHES
from mlxrun.model.fit.verdict import WantedRows
from tests.helpers.batch_fakes import MIXED, Bench, FakeClient, by_id, chat, chats, write_job
from tests.helpers.command_processes import run_program
from tests.helpers.tokenizers import DIGESTS, FakeModelInfo


def test_a_job(tmp_path: Path, fake_engine: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    """The table and where the answers are on stdout, all else on stderr; a second run starts no engine."""
    job = write_job(tmp_path, chats(6))
    assert main(["batch", str(job), "--set", "scheduler.max_running=2"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "group  lines  correct           score [95 %]  failed",
        "g0         3        3  100.0 % [43.9, 100.0]       0",
        "g1         3        3  100.0 % [43.9, 100.0]       0",
        "total      6        6  100.0 % [61.0, 100.0]       0",
        f"6 of 6 lines done: {tmp_path}/job.out.jsonl",
    ]
    assert "INFO loading embedded from" in err and "\n6/6 lines, 0 failed, " in err
    assert main(["batch", str(job)]) == 0
    assert capsys.readouterr().out == out
    assert [config.model.path for config in fake_engine] == ["embedded"]


def test_weights_are_announced_only_where_they_are_loaded(
    tmp_path: Path, fake_engine: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by checks that fail, nor where no line is left."""
    said: list[Any] = []
    monkeypatch.setattr("mlxrun.model.load.model_info.log_weights", lambda *found: said.append(found))
    job = write_job(tmp_path, MIXED)
    assert main(["batch", str(job), "--strict"]) == 2
    assert said == []
    for _ in range(2):
        assert main(["batch", str(job)]) == 1
        assert len(said) == len(fake_engine) == 1


def test_the_engine_of_a_job(
    tmp_path: Path, fake_engine: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    """It keeps prefixes beside the answers while it runs, unless it is to keep none; a message says what
    that saved, and the config that the manifest shows is the user's own."""
    job = write_job(tmp_path, chats(2))
    assert main(["batch", str(job)]) == 0
    assert main(["batch", str(job), "--fresh", "--set", "cache.backend=none"]) == 0
    assert "reused" not in capsys.readouterr().out
    folder = tmp_path / "job.out.jsonl.run" / "cache"
    assert [config.cache.disk_path for config in fake_engine] == [str(folder), None]
    assert [config.cache.backend for config in fake_engine] == ["disk", "none"]
    assert not folder.exists()
    answer = FakeClient.answer_body

    async def reusing(self: FakeClient, request: Request, text: str) -> Any:
        length = len(request.prompt)
        yield TokenEvent(request.id, num_computed_tokens=length, num_cached_tokens=length // 2)
        async for event in answer(self, request, text):
            yield event

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeClient, "answer_body", reusing)
        assert main(["batch", str(job), "--fresh"]) == 0
    assert f"2 of 2 lines done, 50% of prompt tokens reused: {tmp_path}" in capsys.readouterr().out
    manifest = json.loads((folder.parent / "manifest.json").read_text())
    assert (manifest["config"]["cache"]["backend"], manifest["config"]["cache"]["disk_path"]) == (
        "memory",
        None,
    )


def test_exit_codes(tmp_path: Path, fake_engine: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, MIXED)
    assert main(["batch", str(job)]) == 1
    assert f"5 failed: {tmp_path}/job.errors.jsonl" in capsys.readouterr().out
    assert main(["batch", str(job), "--strict", "--fresh"]) == 2
    err = capsys.readouterr().err
    assert f"{job}:2: not JSON: Expecting value at column 1" in err
    assert f"{job}:4: temprature: " in err
    assert main(["batch", str(job), "--fresh", "--set", "model.path=org/broken"]) == 3
    assert "mlxrun: model.path: broken" in capsys.readouterr().err
    assert main(["batch", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl: cannot read the job file" in capsys.readouterr().err
    assert not list(tmp_path.glob("none*"))
    assert main(["batch", str(job), "-o", str(job)]) == 2
    assert main(["batch", str(job), "--set", "batch.ordre=input"]) == 2
    assert main(["batch", str(job), "--limit", "0"]) == 2


@pytest.mark.parametrize("flags", [[], ["--dry-run"], ["--fresh"]])
def test_the_job_file_is_looked_at_before_the_model(
    tmp_path: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the config or the model was loaded")

    monkeypatch.setattr("mlxrun.model.load.model_info.load_model_info", fail)
    monkeypatch.setattr(batch, "load_command_config", fail)
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, says in (("typo.jsonl", "cannot read the job file: No such"), ("empty.jsonl", "has no lines")):
        assert main(["batch", str(tmp_path / name), *flags]) == 2
        assert says in capsys.readouterr().err


def test_a_strict_failure_keeps_earlier_answers(tmp_path: Path, fake_engine: list[Config]) -> None:
    """--fresh removes nothing before --strict is content."""
    job = write_job(tmp_path, MIXED)
    assert main(["batch", str(job)]) == 1
    before = by_id(Bench(job).paths.out)
    assert main(["batch", str(job), "--strict", "--fresh"]) == 2
    assert by_id(Bench(job).paths.out) == before


def test_the_summary_of_a_limited_run_beyond_its_limit(
    tmp_path: Path, fake_engine: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    """The files and the table are of the whole job, and so are the counts beside them. The twin: where no
    further line is finished, there is nothing to tell apart."""
    job = write_job(tmp_path, [*chats(2), "bad", *chats(4)[2:], "bad"])
    assert main(["batch", str(job), "--limit", "3"]) == 1
    out = capsys.readouterr().out.splitlines()
    files = f"{tmp_path}/job.out.jsonl", f"{tmp_path}/job.errors.jsonl"
    assert out[-2:] == [
        f"2 of the first 3 lines (the job has 6) done: {files[0]}",
        f"1 failed: {files[1]} (1 without an `eval`)",
    ]
    assert main(["batch", str(job)]) == 1
    capsys.readouterr()
    assert main(["batch", str(job), "--limit", "3"]) == 1
    assert capsys.readouterr().out.splitlines()[-3:] == [
        f"4 of 6 lines done: {files[0]}",
        "2 of the first 3 lines (the job has 6) done, 1 failed (--limit)",
        f"2 failed: {files[1]} (2 without an `eval`)",
    ]


def test_the_summary_of_a_limited_run_of_a_finished_job(
    tmp_path: Path, fake_engine: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    """There is one count, as all lines are done."""
    job = write_job(tmp_path, chats(4))
    assert main(["batch", str(job)]) == main(["batch", str(job), "--limit", "3"]) == 0
    out = capsys.readouterr().out
    assert out.count(" lines done: ") == 2 and "--limit" not in out


def test_dry_run(
    tmp_path: Path,
    fake_engine: list[Config],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counts lines, tokens and images, shows what would be refused, and what memory the rows need; no engine,
    no file."""
    from PIL import Image

    def judge(config: Config, wanted: WantedRows) -> SimpleNamespace:
        return SimpleNamespace(verdict=f"rows of {wanted.tokens} tokens")

    monkeypatch.setattr(batch, "judge_fit", judge)

    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "a.png"}}]
    image = {"id": "image", "messages": [{"role": "user", "content": parts}], "max_tokens": 7}
    there = {"type": "image_url", "image_url": {"url": "../a.png"}}
    outside = {"id": "outside", "messages": [{"role": "user", "content": [there]}]}
    long = {"id": "long", "prompt": "x" * 5000}
    lines = [image, chat("n", "hello", n=2, max_tokens=5), "bad", outside, long]
    job = write_job(tmp_path, lines)
    assert main(["batch", str(job), "--dry-run", "--fresh"]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "5 lines, 3 would be refused",
        "3 answers with at most 17 tokens in total",
        "50 prompt tokens, the longest prompt has 30",
        "1 image",
        "memory: rows of 37 tokens",
    ]
    assert [line.split(": ")[0] for line in err.splitlines()] == [f"{job}:{n}" for n in (3, 4, 5)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "job.jsonl"]
    assert fake_engine == []
    assert main(["batch", str(job), "--dry-run", "--limit", "2"]) == 0
    assert "2 lines, none would be refused" in capsys.readouterr().out


def test_dry_run_estimates_the_time_by_earlier_jobs(
    tmp_path: Path,
    fake_engine: list[Config],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each job that ran long enough is noted. Without one of this model there is no estimate."""
    job, larger = write_job(tmp_path, chats(6)), write_job(tmp_path, chats(12), "larger.jsonl")
    for seconds, noted in ((1.0, False), (20.0, True)):
        monkeypatch.setattr(ProgressMeter, "seconds", seconds)
        assert main(["batch", str(job), "--fresh"]) == 0
        assert main(["batch", str(larger), "--dry-run"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1].startswith("time: ") is noted, lines
    assert lines[-1].startswith(
        "time: 0:40 without loading, by 1 earlier job of this model here, whose lines "
    )
    another = FakeModelInfo(digests={**DIGESTS, "model": "another"})
    monkeypatch.setattr("mlxrun.model.load.model_info.load_model_info", lambda settings, **_: another)
    assert main(["batch", str(job), "--dry-run"]) == 0
    assert "time: " not in capsys.readouterr().out


def test_the_output_of_another_job(
    tmp_path: Path,
    fake_engine: list[Config],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its answers are not moved away without a word: exit 2 with its name, and --fresh replaces them. The
    twin: the same job goes on, edited, by another path, or in a folder that was moved."""
    first, second = (
        write_job(tmp_path, chats(3), "first.jsonl"),
        write_job(tmp_path, chats(2), "second.jsonl"),
    )
    out = tmp_path / "v.out.jsonl"
    assert main(["batch", str(first), "-o", str(out)]) == 0
    before = out.read_bytes()
    capsys.readouterr()
    assert main(["batch", str(second), "-o", str(out)]) == 2
    err = capsys.readouterr().err
    assert f"{out}: is the output of another job, {first} (3 of 3 lines done)" in err and "--fresh" in err
    assert out.read_bytes() == before and not (tmp_path / "v.out.jsonl.run" / "dropped.jsonl").exists()
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path, [*chats(3)[:2], chat("line-2", "say 9")], "first.jsonl")
    assert main(["batch", "first.jsonl", "-o", "v.out.jsonl"]) == 0
    assert b"say 9" in by_id(out)["line-2"]
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("first.jsonl", "v.out.jsonl", "v.out.jsonl.run"):
        (tmp_path / name).rename(moved / name)
    write_job(moved, chats(3), "first.jsonl")
    assert main(["batch", str(moved / "first.jsonl"), "-o", "moved/v.out.jsonl"]) == 0
    assert main(["batch", "second.jsonl", "-o", "moved/v.out.jsonl"]) == 2
    assert main(["batch", "second.jsonl", "-o", "moved/v.out.jsonl", "--fresh"]) == 0
    assert len(by_id(moved / "v.out.jsonl")) == 2


def test_chats_without_a_template(
    tmp_path: Path,
    fake_engine: list[Config],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is loaded for chats alone, and the reason is given. The twin: a prompt among them runs."""
    host = FakeModelInfo(chat_template=None)
    monkeypatch.setattr("mlxrun.model.load.model_info.load_model_info", lambda settings, **_: host)
    job = write_job(tmp_path, ["bad", *chats(3)])
    assert main(["batch", str(job)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "its requests are chats, and the model 'fake' has no chat template" in err
    assert fake_engine == [] and not (tmp_path / "job.errors.jsonl").exists()
    write_job(tmp_path, [*chats(3), {"id": "p", "prompt": "x"}])
    assert main(["batch", str(job)]) == 1
    assert f"1 of 4 lines done: {tmp_path}/job.out.jsonl" in capsys.readouterr().out


def test_an_output_that_was_not_written_is_not_named(
    tmp_path: Path, fake_engine: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, ["bad"])
    assert main(["batch", str(job)]) == 1
    out = capsys.readouterr().out
    assert out.splitlines() == ["0 of 1 line done", f"1 failed: {tmp_path}/job.errors.jsonl"]
    assert not (tmp_path / "job.out.jsonl").exists()


def test_help_teaches_and_loads_nothing() -> None:
    script = (
        "import sys; from mlxrun.cli.main import main; code = main(['batch', '--help']);"
        "heavy = {'mlx', 'transformers', 'aiohttp', 'numpy', 'PIL', 'rich'} & set(sys.modules);"
        "sys.exit(code or (f'imports {heavy}' if heavy else 0))"
    )
    found = run_program([sys.executable, "-c", script])
    assert found.returncode == 0, found.stderr
    for word in ("--dry-run", "--retry-failed", "continues where", '"custom_id"', "Exit codes:"):
        assert word in found.stdout
    matches = found.stdout[found.stdout.index("`match` is") :]
    assert not [name for name in MATCHES if not re.search(rf"[ \n]{re.escape(name)}[, \n;]", matches)]


def test_a_scorer_that_fails_is_not_a_model_that_is_wrong(
    tmp_path: Path, fake_engine: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 and how many; answers that wait for a judge are no failure."""
    (tmp_path / "s.py").write_text("def score(answer):\n    raise RuntimeError('no')\n")
    job = write_job(tmp_path, chats(3))
    assert main(["batch", str(job), "--scorer", f"{tmp_path}/s.py:score"]) == 1
    assert f"3 answers could not be scored; `note` in {tmp_path}/job.out.jsonl" in capsys.readouterr().out
    job = write_job(tmp_path, [chat("a", "x", {"match": "judge"})], "judged.jsonl")
    assert main(["batch", str(job)]) == 0
    assert "could not be scored" not in capsys.readouterr().out


def test_the_first_notes_are_logged(
    tmp_path: Path,
    fake_engine: list[Config],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the job, on a line each; the others are counted. Scoring again does the same."""
    (tmp_path / "s.py").write_text("def score(answer):\n    raise RuntimeError('a\\nb')\n")
    job = write_job(tmp_path, chats(12))
    for command in ("batch", "score"):
        assert main([command, str(job), "--scorer", f"{tmp_path}/s.py:score"]) == 1
        out, err = capsys.readouterr()
        assert "12 answers could not be scored" in out
        found = [text for text in err.splitlines() if "raised RuntimeError" in text]
        assert len(found) == 5 and all(f"{job}:" in text and text.endswith("a b") for text in found)
        assert all(": line 'line-" in text for text in found)
        assert f"{job}: more answers that cannot be scored are counted" in err


def test_failed_lines_without_an_eval_are_told_apart(
    tmp_path: Path, fake_engine: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, [*chats(2), "bad", chat("long", "LONG")])
    assert main(["batch", str(job)]) == 1
    assert f"2 failed: {tmp_path}/job.errors.jsonl (2 without an `eval`)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"eval": {"expected": "5", "match": "nubmer"}}, "not 'nubmer' (did you mean 'number'?)"),
        ({"eval": {"expected": "5", "mtach": "number"}}, "eval.mtach is not known (did you mean 'match'?)"),
        ({"evla": {"expected": "5"}}, "evla: unknown key (did you mean 'eval'?)"),
        ({"expected": "5"}, "expected: unknown key; it belongs into `eval`"),
        ({"eval": {"match": "perplexity"}}, "perplexity needs a completion with `prompt_windows`"),
    ],
)
def test_a_wrong_eval_is_an_error_of_the_file(
    tmp_path: Path, fake_engine: list[Config], line: Any, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the line would be missing in the score: it is named with its number, and nothing is run."""
    job = write_job(tmp_path, [*chats(2), {"id": "wrong", "prompt": "two and three", **line}])
    assert main(["batch", str(job), "--dry-run"]) == 1
    out, err = capsys.readouterr()
    assert f"{job}:3: " in err and says in err and "1 would be refused" in out
    assert main(["batch", str(job)]) == 2
    err = capsys.readouterr().err
    assert f"{job}:3: " in err and says in err
    assert fake_engine == [] and not (tmp_path / "job.out.jsonl").exists()
    assert main(["batch", str(job), "--limit", "2"]) == 0, "lines beyond the limit are not looked at"


def test_each_wrong_eval_has_a_line_of_its_own(
    tmp_path: Path, fake_engine: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    """The first twenty, and whether there are more."""
    wrong = {"expected": "5", "match": "nubmer"}
    for count in (2, 20, 21):
        job = write_job(tmp_path, [chat(f"w{at}", "hello", wrong) for at in range(count)])
        assert main(["batch", str(job)]) == 2
        said = capsys.readouterr().err.splitlines()
        named = [line for line in said if "(did you mean 'number'?)" in line]
        assert [f"{job}:{at}: eval.match" in line for at, line in enumerate(named, 1)] == [True] * min(
            count, 20
        )
        assert any("--dry-run names all" in line for line in said) == (count > 20)
