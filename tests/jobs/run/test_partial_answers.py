"""Partial answers: kept token by token, taken up again anywhere, and only where they still belong."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlxrun.config.settings import SamplingSettings
from mlxrun.core.errors import JobError
from mlxrun.core.request import FinishReason, Request, SamplingParams, TokenEvent, TokenLogprob
from mlxrun.jobs.lines.line_index import DONE, TODO, IndexRow, LineIndex
from mlxrun.jobs.records.run_paths import Appender, wrap_write_errors
from mlxrun.jobs.run import partial_answers
from mlxrun.jobs.run.partial_answers import PartialAnswer, PartialAnswers, parse_records
from tests.helpers.batch_fakes import Bench, FakeClient, chat, chats, make_config, write_job

pytestmark = pytest.mark.thorough

LINES = [
    chat("plain", "hello world"),
    chat("sampled", "say it", temperature=1.0, seed=11),
    chat("n", "some of them", n=3),
    chat("cut", "a long one that is cut", max_tokens=7),
    chat("stop", "left STOP right", stop=["STOP"]),
    chat("sure", "with numbers", logprobs=True, top_logprobs=2),
    chat("both", "up to here and on", stop=["here"], logprobs=True, n=2),
    chat("bytes", "ř😀ř"),
    {"id": "raw", "prompt": ["one", "two"], "n": 2, "logprobs": 1},
    chat("ids", "with ids", n=2, return_token_ids=True, min_tokens=3, stop=["w"]),
]
Found = dict[str, dict[int, PartialAnswer]]


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, Found]:
    """The output of an uninterrupted run, and all its answers as a kill at their end would leave them."""
    (tmp_path / "whole").mkdir()
    bench = Bench(write_job(tmp_path / "whole", LINES), make_config(order="input"))
    with monkeypatch.context() as patch:
        for name in ("remove_line", "delete_file"):
            patch.setattr(PartialAnswers, name, lambda *args: None)

        assert asyncio.run(bench.run()).exit_code == 0
    with bench.paths.answers.open("rb") as file:
        return bench.paths.out.read_bytes(), parse_records(file)


def cut(found: Found, most: int) -> Iterator[bytes]:
    """Records of at most `most` tokens of each choice, in two records where there are two."""
    for key, choices in found.items():
        for choice, answer in choices.items():
            part = PartialAnswer(answer.request_digest)
            for tokens in (most // 2, most):
                part.tokens, part.logprobs = answer.tokens[:tokens], answer.logprobs[:tokens]
                yield part.take_record(key, choice)


def take_whole(found: Found) -> bytes:
    """Records of all there is, though others may hold it already."""
    return b"".join(
        replace(answer, stored=0).take_record(key, choice)
        for key, choices in found.items()
        for choice, answer in choices.items()
    )


def put(bench: Bench, data: bytes) -> None:
    bench.paths.folder.mkdir(exist_ok=True)
    bench.paths.answers.write_bytes(data)


async def test_taken_up_anywhere(tmp_path: Path, whole: tuple[bytes, Found]) -> None:
    """The same bytes wherever all answers were cut, and no token is computed twice."""
    out, found = whole
    sizes = [len(each.tokens) for choices in found.values() for each in choices.values()]
    assert len(sizes) == 1 + 1 + 3 + 1 + 1 + 1 + 2 + 1 + 4 + 2
    bench = Bench(write_job(tmp_path, LINES), make_config(order="input"))
    for most in range(max(sizes) + 1):
        put(bench, b"".join(cut(found, most)))
        await bench.run()
        assert bench.paths.out.read_bytes() == out, most
        assert bench.client.output == sum(max(0, size - most) for size in sizes)
        assert not bench.paths.answers.exists()
        bench.paths.set_outputs_aside()


async def test_what_is_complete_is_not_asked_again(tmp_path: Path, whole: tuple[bytes, Found]) -> None:
    """A stop string, the length or a recorded end among the tokens: the engine hears nothing of it."""
    out, found = whole
    bench = Bench(write_job(tmp_path, LINES), make_config(order="input"))
    put(bench, b"".join(cut(found, 1000)))
    await bench.run()
    assert bench.paths.out.read_bytes() == out
    ended = 1 + 1 + 2  # cut, stop, both: the others stopped by a token that is not in the answer
    assert bench.ran == 14 + 1 + 2 - ended
    bench.paths.set_outputs_aside()
    put(bench, take_whole(found))
    await bench.run()
    assert (bench.paths.out.read_bytes(), bench.ran) == (out, 0)


async def test_what_was_left_out_of_a_prompt_is_still_said_of_a_choice_that_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine hears nothing of such a choice again, and prompts count with the first one."""
    job, config = [chat("n", "some of them", n=2)], make_config(order="input")
    answer_body = FakeClient.answer_body

    async def leave_out(self: FakeClient, request: Request, text: str) -> AsyncGenerator[TokenEvent, None]:
        async for event in answer_body(self, request, text):
            yield event._replace(num_left_out=4)

    monkeypatch.setattr(FakeClient, "answer_body", leave_out)
    bench = Bench(write_job(tmp_path, job), config)
    with monkeypatch.context() as patch:
        for name in ("remove_line", "delete_file"):
            patch.setattr(PartialAnswers, name, lambda *args: None)
        await bench.run()
    out = bench.paths.out.read_bytes()
    assert b'"left_out_tokens": 4' in out
    kept = bench.paths.answers.read_bytes()
    bench.paths.set_outputs_aside()
    put(bench, kept)
    await bench.run()
    assert (bench.paths.out.read_bytes(), bench.ran) == (out, 0)


def spoil(data: bytes, rng: random.Random) -> bytes:
    """What an editor, a disk or a kill may make of a file."""
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    what = rng.randrange(6)
    if what == 0:
        del lines[at]
    elif what == 1:
        lines.insert(rng.randrange(len(lines)), lines[at])
    elif what == 2:
        lines[at] = lines[at].replace(b'"tokens":[', b'"tokens":[65,')
    elif what == 3:
        rng.shuffle(lines)
    elif what == 4:
        spot = rng.randrange(len(data))
        return data[:spot] + bytes([rng.randrange(256)]) + data[spot + 1 :]
    else:
        return data[: rng.randrange(len(data))]
    return b"".join(lines)


async def test_a_spoilt_file_changes_no_answer(tmp_path: Path, whole: tuple[bytes, Found]) -> None:
    out, found = whole
    bench = Bench(write_job(tmp_path, LINES), make_config(order="input"))
    rng = random.Random(5)
    for _ in range(40):
        data = b"".join(cut(found, rng.randrange(1, 20)))
        for _ in range(rng.randrange(1, 4)):
            data = spoil(data, rng) or b"\n"
        put(bench, data)
        await bench.run()
        assert bench.paths.out.read_bytes() == out
        bench.paths.set_outputs_aside()
    for data in (b"\xff\x00\n", b"", b"[" * 100_000 + b"\n", b'{"key":1}\n', b'{"check":"00"}\n'):
        put(bench, data)
        await bench.run()
        assert (bench.paths.out.read_bytes(), bench.client.answered) == (out, {})
        bench.paths.set_outputs_aside()


async def test_only_what_still_belongs(tmp_path: Path, whole: tuple[bytes, Found]) -> None:
    """Another setting, another model, another line, another prompt under the same key: begun anew."""
    data = b"".join(cut(whole[1], 5))
    bench = Bench(write_job(tmp_path, LINES), make_config(order="input"))
    config, host = bench.config, bench.model_info
    put(bench, data)
    bench.config = replace(config, sampling=SamplingSettings(seed=7))
    await bench.run()
    assert bench.client.answered == {}
    bench.paths.set_outputs_aside()
    put(bench, data)
    bench.config, bench.model_info = config, replace(host, digests={**host.digests, "model": "x" * 64})
    await bench.run()
    assert bench.client.answered == {}
    bench.paths.set_outputs_aside()
    put(bench, data)
    bench.model_info = host
    write_job(tmp_path, [chat("plain", "hello again"), *LINES[1:4]])
    await bench.run()
    assert set(bench.client.answered) == {"say it", "some of them", "a long one that is cut"}
    bench.paths.set_outputs_aside()
    put(
        bench,
        b"".join(
            cut(
                {
                    k: {i: replace(h, request_digest="0" * 16) for i, h in v.items()}
                    for k, v in whole[1].items()
                },
                5,
            )
        ),
    )
    write_job(tmp_path, LINES)
    await bench.run()
    assert (bench.client.answered, bench.paths.out.read_bytes()) == ({}, whole[0])


async def test_fresh_forgets(tmp_path: Path, whole: tuple[bytes, Found]) -> None:
    bench = Bench(write_job(tmp_path, LINES), make_config(order="input"))
    put(bench, b"".join(cut(whole[1], 5)))
    await bench.run(fresh=True)
    assert (bench.client.answered, bench.paths.answers.exists()) == ({}, False)


async def test_lines_beyond_the_limit_keep_theirs(tmp_path: Path, whole: tuple[bytes, Found]) -> None:
    """The job is complete only when nothing is left to do."""
    bench = Bench(write_job(tmp_path, LINES), make_config(order="input"))
    put(bench, b"".join(cut(whole[1], 5)))
    await bench.run(limit=2)
    assert len(bench.client.answered) == 2
    with bench.paths.answers.open("rb") as file:
        assert len(parse_records(file)) >= len(LINES) - 2
    await bench.run()
    assert f"{len(LINES) - 2} partial answers of the last run will be continued" in bench.said
    assert set(bench.client.answered) >= {"some of them", "ř😀ř", "one"}
    assert bench.paths.out.read_bytes() == whole[0]
    assert not bench.paths.answers.exists()


async def test_a_try_goes_on_where_the_one_before_broke_off(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, [chat("a", "PARTIAL 3 of it", n=1), *chats(3)]), no_sleep=True)
    assert (await bench.run()).exit_code == 0
    assert bench.client.answered == {"PARTIAL 3 of it": 3}
    assert b"PARTIAL 3 of it" in bench.paths.out.read_bytes()


async def test_the_copy_of_a_line_costs_it_nothing(tmp_path: Path, whole: tuple[bytes, Found]) -> None:
    """A line that is there twice is refused under the key of the first, which still runs."""
    bench = Bench(write_job(tmp_path, [LINES[0], LINES[0], *chats(3)]), make_config(concurrency=1))
    put(bench, b"".join(cut(whole[1], 5)))
    await bench.run()
    assert bench.client.answered == {"hello world": 5}


async def test_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs partial answers, said once, and nothing else."""
    append = Appender.append

    def full_too(path: Path, data: bytes, *, durable: bool) -> None:
        raise OSError("no space left")

    def full(self: Appender, data: bytes) -> None:
        if self.path.name == "answers.jsonl":
            with wrap_write_errors(self.path):
                raise OSError(errno.ENOSPC, "No space left on device")
        append(self, data)

    monkeypatch.setattr(Appender, "append", full)
    monkeypatch.setattr(partial_answers, "write_atomically", full_too)
    monkeypatch.setattr("mlxrun.jobs.run.line_runner.WRITE_EVERY", 0.001)
    bench = Bench(write_job(tmp_path, chats(30)))
    bench.client.pause = 0.002
    with caplog.at_level(logging.WARNING):
        assert (await bench.run()).exit_code == 0
    [warning] = [text for text in caplog.messages if "partial answers are not kept" in text]
    assert "cannot be written (No space left on device); partial" in warning


def test_what_a_failed_write_lost_is_written_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records join on to each other again once there is room."""
    path, request = tmp_path / "answers.jsonl", Request("r", (1, 2), SamplingParams(max_tokens=9))
    answers = PartialAnswers(path)

    def full(self: Appender, data: bytes) -> None:
        raise JobError("no space left")

    for token in range(4):
        answers.find("k", 0, request).add(TokenEvent("r", (token,)))
        with monkeypatch.context() as patch:
            if token == 1:
                patch.setattr(Appender, "append", full)
            answers.write()
        wanted = [0] if token == 1 else list(range(token + 1))
        assert parse_records(path.read_bytes().splitlines(keepends=True))["k"][0].tokens == wanted
    answers.close()


class Lines(LineIndex):
    """Keys and states, no file."""

    def __init__(self, count: int) -> None:
        self.state = bytearray([TODO] * count)

    def get_row(self, position: int) -> IndexRow:
        return IndexRow(position + 1, 0, False, 0, position.to_bytes(16, "big"), b"")


def test_the_file_stays_small_and_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any order of growth, ends and starts: it gives back what was written, and is never mostly garbage."""
    monkeypatch.setattr(partial_answers, "COMPACT_FROM", 2000)
    rng, path, index = random.Random(3), tmp_path / "answers.jsonl", Lines(400)
    answers, current = PartialAnswers(path), list(range(8))
    request = Request("r", (1, 2, 3), SamplingParams(max_tokens=500, logprobs=1))
    truth: dict[tuple[str, int], list[int]] = {}
    for step in range(1500):
        line, choice = rng.choice(current), rng.randrange(2)
        key = index.get_row(line).key.hex()
        answer = answers.find(key, choice, request)
        assert answer.tokens == truth.setdefault((key, choice), [])
        token, p = rng.randrange(50_000), -rng.random()
        answer.add(TokenEvent("r", (token,), (TokenLogprob(p, ((token, p), (7, -1e300))),)))
        truth[key, choice].append(token)
        if step % 7 == 0:
            answers.write()
            with path.open("rb") as file:
                stored = {(k, i): h for k, v in parse_records(file).items() for i, h in v.items()}
            assert all(stored[at].tokens == tokens for at, tokens in truth.items())
            live = sum(len(replace(h, stored=0).take_record(*at)) for at, h in stored.items() if at in truth)
            assert path.stat().st_size < 2 * max(2000, 3 * live)
        if step % 11 == 0:
            answers.remove_line(key)
            index.state[line] = DONE
            truth = {at: tokens for at, tokens in truth.items() if at[0] != key}
            current[current.index(line)] = max(current) + 1
        if step % 100 == 99:
            answers.close()
            answers = PartialAnswers(path)
            answers.read(index)
            assert len(answers) == len({key for key, _ in truth})
    answers.delete_file()
    assert not path.exists()


def test_records_hold_every_digit() -> None:
    p = [0.1 + 0.2, -1e-300, float("-inf"), -123456.789012345]
    logprobs = [TokenLogprob(x, ((1, x), (2, -x / 3))) for x in p]
    answer = PartialAnswer("d" * 16, [1, 2, 3, 4], logprobs, FinishReason.LENGTH)
    data = answer.take_record("k", 2)
    assert parse_records([data]) == {"k": {2: replace(answer, stored=0)}}
    assert answer.take_record("k", 2) == b""
    assert parse_records([data[:-1]]) == {}


def test_when_an_answer_is_complete() -> None:
    """By the requested length, by the context's end, or as recorded; an abort is no end."""
    request = Request("r", tuple(range(10)), SamplingParams(max_tokens=5))
    tokens = [1, 2, 3, 4]
    assert PartialAnswer("", tokens).find_finish(request, 100) is None
    assert PartialAnswer("", [*tokens, 5]).find_finish(request, 100) is FinishReason.LENGTH
    assert PartialAnswer("", tokens).find_finish(request, 14) is FinishReason.LENGTH
    assert (
        PartialAnswer("", []).find_finish(request, 10) is None
    )  # the engine says that this prompt is too long
    for finish, kept in ((FinishReason.STOP, True), (FinishReason.LENGTH, True), (FinishReason.ABORT, False)):
        answer = PartialAnswer("")
        answer.add(TokenEvent("r", finish=finish))
        assert answer.find_finish(request, 100) is (finish if kept else None)
        assert bool(answer.take_record("k", 0)) is kept
