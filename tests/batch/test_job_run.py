"""A job from file to files with an engine that echoes: records, resume, order, retries, exits."""

from __future__ import annotations

import asyncio
import fcntl
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.batch import output_records
from mlxrun.batch.job_file import BadLine
from mlxrun.config.settings import SamplingSettings
from mlxrun.errors import EngineDead, JobError
from tests.helpers.batch_fakes import (
    Bench,
    by_id,
    chat,
    chats,
    make_config,
    read,
    write_job,
)
from tests.helpers.tokenizers import DIGESTS, FakeModelInfo

MIXED = [
    chat("good", "hello", {"expected": "hello", "match": "contains", "group": "a"}),
    "this is not JSON",
    chat("good", "again"),
    chat("param", "hello", temprature=1),
    chat("long", "LONG 1", {"expected": "x", "group": "a"}),
    {"id": "short", "prompt": "once", "max_tokens": 3},
    {**chat("url", "hello"), "url": "/v1/embeddings"},
]


def normal(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what its key decides."""
    text = re.sub(r"(batch_req_|req_)[0-9a-f]+", r"\1KEY", json.dumps(record))
    found: dict[str, Any] = json.loads(text)
    return found


async def test_output_shape(tmp_path: Path) -> None:
    """OpenAI's batch output, the short form too; seeds, ids and times are those of every run."""
    bench = Bench(write_job(tmp_path, [MIXED[0], MIXED[5]]))
    outcome = await bench.run()
    assert outcome.exit_code == 0
    first, second = (normal(record) for record in sorted(read(bench.paths.out), key=lambda r: r["custom_id"]))
    assert first == {
        "id": "batch_req_KEY",
        "custom_id": "good",
        "response": {
            "status_code": 200,
            "request_id": "req_KEY",
            "body": {
                "id": "chatcmpl-req_KEY",
                "object": "chat.completion",
                "created": 0,
                "model": "fake",
                "system_fingerprint": None,
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "hellozz", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {
                    "prompt_tokens": 20,
                    "completion_tokens": 3,
                    "total_tokens": 23,
                    "completion_tokens_details": {"reasoning_tokens": 0},
                },
                "mlxrun": {"seed": 1344898677},
            },
        },
        "error": None,
        "eval": {"score": 1, "match": "contains", "group": "a"},
    }
    body = second["response"]["body"]
    assert (body["object"], body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (
        "text_completion",
        "onc",
        "length",
    )
    assert not bench.paths.errors.exists()


async def test_bad_lines_become_error_records(tmp_path: Path) -> None:
    """Each with its line number and reason; the others run; exit 1."""
    bench = Bench(write_job(tmp_path, MIXED))
    outcome = await bench.run()
    assert outcome.exit_code == 1
    assert sorted(by_id(bench.paths.out)) == ["good", "short"]
    errors = {record["error"]["line"]: record for record in read(bench.paths.errors)}
    assert sorted(errors) == [2, 3, 4, 5, 7]
    assert errors[2]["custom_id"] is None
    assert errors[2]["response"] is None
    assert errors[2]["error"] == {
        "code": "invalid_line",
        "message": "not JSON: Expecting value at column 1",
        "line": 2,
        "param": None,
    }
    assert errors[3]["error"]["message"] == "custom_id 'good' is already used by line 1"
    assert errors[4]["response"]["status_code"] == 400
    assert errors[4]["response"]["body"]["error"]["param"] == errors[4]["error"]["param"] == "temprature"
    assert errors[5]["error"]["code"] == "context_length_exceeded"
    assert errors[5]["eval"] == {"score": 0, "match": "exact", "group": "a"}
    assert errors[7]["error"]["param"] == "url"
    assert [(name, g.lines, g.correct, g.failed) for name, g in outcome.scores.list_rows()] == [
        ("a", 2, 1, 1)
    ]


async def test_done_lines_are_not_run_again(tmp_path: Path) -> None:
    """Nothing to do, no engine, nothing changes, the same exit code and scores."""
    bench = Bench(write_job(tmp_path, MIXED))
    first = await bench.run()
    files = [path.read_bytes() for path in (bench.paths.out, bench.paths.errors)]
    second = await bench.run()
    assert (second.exit_code, bench.ran, bench.client.closed) == (1, 0, False)
    assert [path.read_bytes() for path in (bench.paths.out, bench.paths.errors)] == files
    assert second.scores.list_rows() == first.scores.list_rows()
    assert not bench.paths.dropped.exists()


async def test_changed_lines_run_again(tmp_path: Path) -> None:
    """Three lines edited, one removed, one added: four run; the old answers are kept aside."""
    bench = Bench(write_job(tmp_path, chats(10)))
    await bench.run()
    before = by_id(bench.paths.out)
    lines = chats(10)
    for i in (2, 5, 7):
        lines[i] = chat(f"line-{i}", f"now {i}")
    write_job(tmp_path, [*lines[:9], chat("new", "new")])
    outcome = await bench.run()
    assert sorted(bench.client.tries) == ["new", "now 2", "now 5", "now 7"]
    after = by_id(bench.paths.out)
    assert outcome.meter.done == len(after) == 10
    assert {name for name in after if before.get(name) == after[name]} == {
        f"line-{i}" for i in (0, 1, 3, 4, 6, 8)
    }
    assert sorted(by_id(bench.paths.dropped)) == ["line-2", "line-5", "line-7", "line-9"]
    assert any(text.startswith("3 lines will run again") for text in bench.said)
    assert any(text.startswith("the job no longer contains 1 line") for text in bench.said)


@pytest.mark.parametrize(
    "change",
    [
        lambda bench: replace(bench.config, sampling=SamplingSettings(temperature=0.5)),
        lambda bench: setattr(bench, "model_info", FakeModelInfo(digests={**DIGESTS, "model": "other"})),
        lambda bench: setattr(bench, "model_info", FakeModelInfo(digests={**DIGESTS, "template": "other"})),
    ],
)
async def test_another_model_or_setting_runs_all_again(tmp_path: Path, change: Any) -> None:
    """Answers of two models never mix in one output."""
    bench = Bench(write_job(tmp_path, chats(4)))
    await bench.run()
    bench.config = change(bench) or bench.config
    await bench.run()
    assert bench.ran == 4
    assert "the model or a setting that affects answers has changed since the earlier run" in bench.said
    assert len(by_id(bench.paths.out)) == len(by_id(bench.paths.dropped)) == 4


async def test_settings_that_change_no_answer_run_nothing_again(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, chats(4)))
    await bench.run()
    bench.config = make_config(rows=9, retries=0, concurrency=3)
    await bench.run()
    assert bench.ran == 0


async def test_a_changed_eval_is_scored_again_and_not_run(tmp_path: Path) -> None:
    """`eval` is no part of a line's key: the stored answer is compared with what is wanted now."""
    bench = Bench(
        write_job(tmp_path, [chat("a", "yes", {"expected": "no", "match": "contains"}), chat("b", "b")])
    )
    outcome = await bench.run()
    assert outcome.scores.groups["all"].correct == 0
    wanted = {"expected": "yes", "match": "contains", "group": "new"}
    write_job(tmp_path, [chat("a", "yes", wanted), chat("b", "b", {"expected": "b", "match": "contains"})])
    outcome = await bench.run()
    assert bench.ran == 0
    assert {name: group.correct for name, group in outcome.scores.groups.items()} == {"new": 1, "all": 1}
    assert {r["custom_id"]: r["eval"]["score"] for r in read(bench.paths.out)} == {"a": 1, "b": 1}


async def test_a_changed_image_runs_its_line_again(tmp_path: Path) -> None:
    """The answer belongs to the pixels, not to the path; an unchanged file is no reason to run."""
    from PIL import Image

    def ask(name: str) -> dict[str, Any]:
        parts = [
            {"type": "text", "text": "what?"},
            {"type": "image_url", "image_url": {"url": f"{name}.png"}},
        ]
        return chat(name, parts)  # type: ignore[arg-type]

    for name in "ab":
        Image.new("RGB", (4, 4), "red").save(tmp_path / f"{name}.png")
    bench = Bench(
        write_job(tmp_path, [ask("a"), ask("b"), ask("missing")]), model_info=FakeModelInfo(vision=True)
    )
    assert (await bench.run()).exit_code == 1
    assert bench.ran == 2
    assert read(bench.paths.errors)[0]["error"]["code"] == "invalid_image"
    Image.new("RGB", (4, 4), "blue").save(tmp_path / "b.png")
    Image.new("RGB", (4, 4), "blue").save(tmp_path / "missing.png")
    assert (await bench.run()).exit_code == 0
    assert bench.ran == 2
    (tmp_path / "a.png").touch()
    await bench.run()
    assert bench.ran == 0


async def test_failed_lines_run_again_on_request_only(tmp_path: Path) -> None:
    """A failed line stays failed until --retry-failed; its error record goes if it succeeds."""
    bench = Bench(write_job(tmp_path, [chat("a", "BUSY 9"), chat("b", "b"), "bad"]), make_config(retries=0))
    assert (await bench.run()).exit_code == 1
    assert bench.ran == 2
    assert (await bench.run()).exit_code == 1
    assert bench.ran == 0
    assert any("2 failed (--retry-failed runs these again)" in text for text in bench.said)
    bench.config = make_config(retries=9)
    bench.no_sleep = True
    assert (await bench.run(retry_failed=True)).exit_code == 1
    assert bench.client.tries == {"BUSY 9": 10}
    assert sorted(by_id(bench.paths.out)) == ["a", "b"]
    assert [record["error"]["line"] for record in read(bench.paths.errors)] == [3]


async def test_transient_errors_are_tried_again_and_others_not(tmp_path: Path) -> None:
    """`retries` more tries for what may pass; none for what is the request's own fault, or ours."""
    bench = Bench(
        write_job(tmp_path, [chat("a", f"{word} 2 {word}") for word in ("BUSY",)]), make_config(retries=2)
    )
    bench.no_sleep = True
    assert (await bench.run()).exit_code == 0
    assert bench.ran == 3
    lines = [chat(word, f"{word} 5") for word in ("BUSY", "BROKEN", "LONG", "BUG")]
    write_job(tmp_path, lines)
    assert (await bench.run()).exit_code == 1
    assert bench.client.tries == {"BUSY 5": 3, "BROKEN 5": 3, "LONG 5": 1, "BUG 5": 1}
    errors = {record["custom_id"]: record for record in read(bench.paths.errors)}
    assert {name: record["response"]["status_code"] for name, record in errors.items()} == {
        "BUSY": 429,
        "BROKEN": 500,
        "LONG": 400,
        "BUG": 500,
    }
    assert errors["BUG"]["error"]["message"] == "internal error (KeyError)"


async def test_a_dead_engine_ends_the_run_and_the_job_can_go_on(tmp_path: Path) -> None:
    """Exit 3; what was finished stays, the manifest says how the run ended, and nothing else is lost."""
    bench = Bench(
        write_job(tmp_path, [*chats(6), chat("dead", "DEAD"), chat("last", "last")]),
        make_config(concurrency=1),
    )
    with pytest.raises(EngineDead):
        await bench.run()
    assert bench.client.closed
    assert sorted(by_id(bench.paths.out)) == [f"line-{i}" for i in range(6)]
    assert any("6 of 8 lines done" in text and "the same command continues" in text for text in bench.said)
    write_job(tmp_path, [*chats(6), chat("last", "last")])
    assert (await bench.run()).exit_code == 0
    assert bench.ran == 1
    manifest = json.loads(bench.paths.manifest.read_text())
    assert [(run["exit"], run["done"]) for run in manifest["runs"]] == [(3, 6), (0, 1)]


async def test_an_unwritable_journal_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is closed all the same; records without entries are taken over by the next run."""
    bench = Bench(write_job(tmp_path, chats(8)))

    def full(*_: object) -> None:
        raise JobError("journal.jsonl: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("mlxrun.batch.output_writer.OutputWriter.commit", full)
        with pytest.raises(JobError, match="No space left"):
            await bench.run()
    assert bench.client.closed
    before = by_id(bench.paths.out)
    assert (await bench.run()).exit_code == 0
    assert before.items() <= by_id(bench.paths.out).items()
    assert bench.ran == 8 - len(before)
    assert json.loads(bench.paths.manifest.read_text())["device"] == {"name": "fake"}


async def test_order_input(tmp_path: Path) -> None:
    """The finished output is in the order of the job, also over several runs and for errors."""
    lines: list[Any] = [*chats(30), "bad one", chat("z", "z"), "bad two"]
    bench = Bench(write_job(tmp_path, lines[10:]), make_config(order="completion", rows=16))
    bench.client.pause = 0.002
    await bench.run()
    assert [r["custom_id"] for r in read(bench.paths.out)] != [f"line-{i}" for i in range(10, 30)] + ["z"]
    write_job(tmp_path, lines)
    bench.config = make_config(order="input", rows=16)
    await bench.run()
    assert bench.ran == 10
    assert [r["custom_id"] for r in read(bench.paths.out)] == [f"line-{i}" for i in range(30)] + ["z"]
    assert [r["error"]["line"] for r in read(bench.paths.errors)] == [31, 33]
    done = bench.paths.out.read_bytes()
    await bench.run()
    assert (bench.ran, bench.paths.out.read_bytes()) == (0, done)


async def test_no_line_waits_for_a_slow_one(tmp_path: Path) -> None:
    """With order input too, a slow first line holds nothing back."""
    bench = Bench(
        write_job(tmp_path, [chat("slow", "s" * 2500), *chats(40)]), make_config(order="input", rows=2)
    )
    bench.client.pause = 0.001
    task = asyncio.create_task(bench.run())
    while len(read(bench.paths.out)) < 40:
        await asyncio.sleep(0.005)
    assert "slow" not in {r["custom_id"] for r in read(bench.paths.out)}
    await task
    assert read(bench.paths.out)[0]["custom_id"] == "slow"


async def test_the_window_is_bounded(tmp_path: Path) -> None:
    """At most `concurrency` lines are in flight, by default twice the rows."""
    for config, most in ((make_config(concurrency=3), 3), (make_config(rows=4), 8)):
        bench = Bench(write_job(tmp_path, chats(40)), config)
        bench.client.pause = 0.005
        await bench.run(fresh=True)
        assert bench.client.most == most


async def test_limit(tmp_path: Path) -> None:
    """The first N lines of the file; a later run without it does the rest, one with it loses nothing."""
    bench = Bench(write_job(tmp_path, chats(8)))
    outcome = await bench.run(limit=3)
    assert (outcome.exit_code, outcome.meter.total, bench.ran) == (0, 3, 3)
    await bench.run()
    assert bench.ran == 5
    await bench.run(limit=3)
    assert (bench.ran, len(by_id(bench.paths.out))) == (0, 8)


async def test_limit_and_retry(tmp_path: Path) -> None:
    """Failed lines beyond the limit stay failed."""
    bench = Bench(write_job(tmp_path, [chat("a", "LONG 1"), chat("b", "LONG 2"), chat("c", "c")]))
    await bench.run()
    await bench.run(retry_failed=True, limit=1)
    assert bench.client.tries == {"LONG 1": 1}
    assert sorted(by_id(bench.paths.errors)) == ["a", "b"]


async def test_fresh(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, MIXED))
    await bench.run()
    before = by_id(bench.paths.out)
    await bench.run(fresh=True)
    assert bench.ran == 3
    assert by_id(bench.paths.out) == before
    assert len(json.loads(bench.paths.manifest.read_text())["runs"]) == 1


@pytest.mark.parametrize("options, batch", [({"strict": True}, {}), ({}, {"on_invalid": "fail"})])
async def test_strict(tmp_path: Path, options: dict[str, Any], batch: dict[str, Any]) -> None:
    """All bad lines with file:line, exit 2, nothing run; a good job runs."""
    lines = [line for line in MIXED if "long" not in str(line)]  # that one only the engine can refuse
    bench = Bench(write_job(tmp_path, lines), make_config(**batch))
    with pytest.raises(JobError, match="4 of 6 lines refused; nothing was run") as caught:
        await bench.run(**options)
    assert caught.value.exit_code == 2
    assert [text.split(": ")[0] for text in bench.said] == [f"{bench.job}:{n}" for n in (2, 3, 4, 6)]
    assert (bench.ran, bench.paths.out.exists(), bench.paths.manifest.exists()) == (0, False, False)
    write_job(tmp_path, chats(3))
    assert (await bench.run(**options)).exit_code == 0


async def test_seeds(tmp_path: Path) -> None:
    """A line's own seed counts; without one its id and the config's seed decide alone."""
    job = [chat("a", "one"), chat("b", "one"), chat("c", "one", seed=5), chat("d", "one", seed=5)]
    bench = Bench(write_job(tmp_path, job))
    await bench.run()
    seeds = {r["custom_id"]: r["response"]["body"]["mlxrun"]["seed"] for r in read(bench.paths.out)}
    assert seeds["a"] != seeds["b"]
    assert seeds["c"] == seeds["d"] == 5
    first = by_id(bench.paths.out)
    write_job(tmp_path, job[::-1])
    await bench.run(fresh=True)
    assert by_id(bench.paths.out) == first
    bench.config = replace(bench.config, sampling=SamplingSettings(seed=7))
    await bench.run()
    others = {r["custom_id"]: r["response"]["body"]["mlxrun"]["seed"] for r in read(bench.paths.out)}
    assert others["a"] != seeds["a"]
    assert others["c"] == 5
    assert json.loads(bench.paths.manifest.read_text())["seeds"]["base"] == 7


async def test_several_choices_and_prompts(tmp_path: Path) -> None:
    """n and lists of prompts: one record a line; a stop string ends a request early."""
    lines = [
        chat("n", "hi", n=3),
        {"id": "list", "prompt": ["one", "two"]},
        {"id": "stop", "messages": [{"role": "user", "content": "left right"}], "stop": [" rig"]},
    ]
    bench = Bench(write_job(tmp_path, lines))
    assert (await bench.run()).exit_code == 0
    bodies = {r["custom_id"]: r["response"]["body"] for r in read(bench.paths.out)}
    assert len({c["message"]["content"] for c in bodies["n"]["choices"]}) > 1
    assert [c["text"][:3] for c in bodies["list"]["choices"]] == ["one", "two"]
    assert bodies["stop"]["choices"][0]["message"]["content"] == "left"
    assert bench.client.aborted == 1


async def test_the_manifest(tmp_path: Path) -> None:
    """Every field; digests are those of the files; tokens and runs add up."""
    import hashlib

    bench = Bench(write_job(tmp_path, MIXED))
    await bench.run(limit=2)
    await bench.run()
    found = json.loads(bench.paths.manifest.read_text())
    keys = "format config config_hash model versions device seeds input output counts tokens cache runs"
    assert list(found) == keys.split()
    assert found["input"]["sha256"] == hashlib.sha256(bench.job.read_bytes()).hexdigest()
    assert found["output"]["sha256"] == hashlib.sha256(bench.paths.out.read_bytes()).hexdigest()
    assert found["counts"] == {"total": 7, "done": 2, "failed": 5}
    assert [(run["done"], run["failed"], run["exit"]) for run in found["runs"]] == [(1, 1, 1), (1, 4, 1)]
    assert (
        found["tokens"]["computed"] == found["tokens"]["prompt"] == sum(r["computed"] for r in found["runs"])
    )
    assert found["model"] == {
        "path": "embedded",
        "fingerprint": DIGESTS["model"],
        "tokenizer_sha256": DIGESTS["tokenizer"],
        "template_sha256": DIGESTS["template"],
    }
    status = json.loads(bench.paths.status.read_text())
    assert (status["state"], status["done"], status["failed"], status["total"]) == ("done", 2, 5, 7)


async def test_one_process_at_a_time(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, chats(2)))
    await bench.run()
    with (bench.paths.folder / "lock").open("r+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(JobError, match=r"another mlxrun \(process \d+\) runs this job"):
            await bench.run()
    await bench.run()


@pytest.mark.parametrize(
    "name, text",
    [
        ("none.jsonl", "cannot read the job file: No such file"),
        ("folder", "cannot read"),
        ("empty.jsonl", "no lines"),
    ],
)
async def test_a_job_file_that_is_none(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(JobError, match=text):
        await Bench(tmp_path / name).run()


async def test_a_file_that_is_not_ours_is_not_touched(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, chats(2)))
    bench.paths.out.write_text('{"precious": 1}\n')
    with pytest.raises(JobError, match=r"was not written by this job .*--fresh"):
        await bench.run()
    assert bench.paths.out.read_text() == '{"precious": 1}\n'
    assert (await bench.run(fresh=True)).exit_code == 0


async def test_the_input_changes_while_it_runs(tmp_path: Path) -> None:
    """A line is not answered under another line's key."""
    bench = Bench(write_job(tmp_path, chats(40)), make_config(concurrency=1))
    bench.client.pause = 0.001
    task = asyncio.create_task(bench.run())
    while len(read(bench.paths.out)) < 2:
        await asyncio.sleep(0.002)
    text = bench.job.read_text()
    with bench.job.open("r+") as file:
        file.write(text.replace("say 2", "SAY 2").replace("say 3", "SAY 3"))
    with pytest.raises(JobError, match="changed while the job was running"):
        await task


async def test_records_are_one_line_for_every_tool(tmp_path: Path) -> None:
    """Unicode line ends and control characters in answers never break a line."""
    bench = Bench(write_job(tmp_path, [{"id": "a", "prompt": "x\u2028y\x85z\x0b\x1e\u0159\U0001f600"}]))
    await bench.run()
    assert len(bench.paths.out.read_text(encoding="utf-8").splitlines()) == 1
    assert read(bench.paths.out)[0]["response"]["body"]["choices"][0]["text"].startswith(
        "x\u2028y\x85z\x0b\x1e\u0159\U0001f600"
    )
    assert output_records.parse_record(output_records.dump_record(read(bench.paths.out)[0])) is not None


async def test_cached_tokens_are_not_in_records(tmp_path: Path) -> None:
    """What a cache saved differs from run to run, so it is in the manifest, not in the output."""
    bench = Bench(write_job(tmp_path, chats(1)))
    await bench.run()
    assert "prompt_tokens_details" not in read(bench.paths.out)[0]["response"]["body"]["usage"]


def test_a_bad_line_has_no_response() -> None:
    from mlxrun.batch.line_index import IndexedLine

    record = output_records.build_bad_line_record(IndexedLine(0, "k" * 32, BadLine(3, None, "why", "p")))
    assert record["response"] is None
    assert record["error"] == {"code": "invalid_line", "message": "why", "line": 3, "param": "p"}
