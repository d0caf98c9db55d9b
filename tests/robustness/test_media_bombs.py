"""Images, animations and videos that are bombs: enormous sizes, a million frames, parts without number, rates
of 0 and lengths of years. Each is refused in a sentence or read within its limits, and nobody else notices.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mlxrun.api.text.media import image_decoding
from mlxrun.api.text.media.image_decoding import decode_image, read_header
from mlxrun.api.text.media.videos import choose_frames, read_video
from mlxrun.cli.main import main
from mlxrun.config.media_settings import VideoSampling
from mlxrun.config.settings import Config, EngineSettings, MediaSettings
from mlxrun.core.errors import MAX_MESSAGE, MediaError
from mlxrun.jobs.lines.job_file import JobLine
from mlxrun.jobs.lines.line_keys import LineKeys
from tests.helpers.batch_fakes import chat, write_job
from tests.helpers.media_bombs import (
    make_animation,
    make_avi,
    make_jpeg,
    make_png,
    make_still,
    make_tiff,
    resize_gif,
)
from tests.helpers.served_model import ModelServer, run_model_server
from tests.helpers.storm_counts import count
from tests.helpers.video_files import make_video, video_url

CHAT = "/v1/chat/completions"
PIXELS = 50_000_000
SMALL = make_still("JPEG", (32, 32))
LARGE = make_still("JPEG", (8000, 8000))


def decode(data: bytes) -> Any:
    read_header(data, PIXELS)
    return decode_image(data)


@pytest.mark.filterwarnings("ignore")  # as the module asks for, which pytest overrides
@pytest.mark.parametrize(
    "make",
    [lambda: make_animation(500_000), lambda: make_png(frames=2**32 - 1), lambda: make_tiff(1000)],
    ids=["frames", "frames that are not there", "tags"],
)
def test_animations_are_their_first_frame(make: Callable[[], bytes]) -> None:
    assert decode(make()).size == (4, 4)
    count("media bombs")


@pytest.mark.parametrize(
    "data",
    [resize_gif(65_535, 65_535), make_png(2**31 - 1, 2**31 - 1), make_png(PIXELS + 1, 1)],
    ids=["GIF", "PNG", "one row"],
)
def test_enormous_images_are_refused_by_their_headers(data: bytes) -> None:
    with pytest.raises(MediaError, match=r"pixels, more than media.max_pixels"):
        decode(data)
    count("media bombs")


@pytest.mark.parametrize(
    "data",
    [make_jpeg(fill=20_000), make_jpeg(parts=20_000), make_png(chunks=20_000)],
    ids=["bytes", "parts", "chunks"],
)
def test_parts_without_number_are_refused(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megabytes of them held up all threads of a server for a minute: PIL reads them one by one."""
    monkeypatch.setattr(image_decoding, "_MAX_READS", 10_000)
    with pytest.raises(MediaError, match="not a readable image"):
        decode(data)
    count("media bombs")
    monkeypatch.setattr(image_decoding, "_MAX_READS", 10**9)
    assert decode(data).size == (4, 4)  # the mutation twin


def test_thousands_of_bad_tags_are_not_in_the_log() -> None:
    code = (
        "from mlxrun.api.text.media.image_decoding import decode_image;"
        "from tests.helpers.media_bombs import make_tiff;"
        "decode_image(make_tiff(1000))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=120)
    assert done.stderr == b""


# -- videos --------------------------------------------------------------------------------------------------

# Each with what is said of it; None: it is read, within its limits.
VIDEOS: dict[str, tuple[Callable[[], bytes], str | None]] = {
    "a frame of 64 megapixels": (lambda: make_avi([LARGE] * 4), "8000 x 8000 pixels, more than media.max"),
    "frames that grow": (lambda: make_avi([SMALL] * 3 + [LARGE]), None),
    "2^32 frames": (lambda: make_avi([SMALL] * 4, total=2**32 - 1), "longer than media.video_max_seconds"),
    "100,000 empty frames": (
        lambda: make_avi([b""], rate=(10_000, 1), repeat=10**5),
        "no frame of the video can be decoded",
    ),
    "no rate": (lambda: make_avi([SMALL] * 4, rate=(0, 0)), None),
    "a frame a century": (
        lambda: make_avi([SMALL] * 4, rate=(1, 2**32 - 1)),
        "longer than media.video_max_seconds",
    ),
    "2 x 2": (lambda: make_video(size=(2, 2), kind="mp4"), "the model's processor refused the videos"),
    "5,000 streams": (lambda: make_avi([SMALL] * 4, streams=5_000), "not a readable video"),
}


def make_body(data: bytes) -> dict[str, Any]:
    part = {"type": "video_url", "video_url": {"url": video_url(data)}}
    text = {"type": "text", "text": "What is this?"}
    messages = [{"role": "user", "content": [part, text]}]
    return {"messages": messages, "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def served() -> Iterator[ModelServer]:
    with run_model_server(Config(engine=EngineSettings(load_check=False))) as server:
        yield server


async def test_bombs_are_refused_and_others_are_answered(served: ModelServer) -> None:
    """In data URLs, all at once, beside a client with a text and one with a video."""
    plain = {
        "messages": [{"role": "user", "content": "What is 12 + 30?"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    seen = make_body(make_video())
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(served.url, timeout=timeout) as http:

        async def send(body: dict[str, Any]) -> tuple[int, Any]:
            data = io.BytesIO(json.dumps(body).encode())
            async with http.post(CHAT, data=data, headers={"Content-Type": "application/json"}) as response:
                return response.status, await response.json()

        async def explode(name: str) -> None:
            make, said = VIDEOS[name]
            status, body = await send(make_body(make()))
            count("media bombs")
            if said is None:
                assert status == 200, (name, body)
                return
            text = body["error"]["message"]
            assert (status, body["error"]["code"]) == (400, "invalid_video"), (name, body)
            assert text.startswith("messages[0].content[0].video_url.url: ") and said in text, (name, text)
            assert text.isprintable() and len(text.encode()) <= MAX_MESSAGE

        alone = [(await send(body))[1]["choices"] for body in (plain, seen)]
        bombs = asyncio.gather(*map(explode, VIDEOS))
        while True:
            together = [(await send(body))[1]["choices"] for body in (plain, seen)]
            assert together == alone
            count("answers beside media bombs", 2)
            if bombs.done():
                break
        await bombs
    assert not len(served.live) and not served.active


def test_bombs_contain_error_in_a_job(tmp_path: Path) -> None:
    """Files, in the folder of the job."""
    (tmp_path / "good.mkv").write_bytes(make_video())
    (tmp_path / "grown.avi").write_bytes(make_avi([SMALL] * 4, total=2**32 - 1))
    (tmp_path / "empty.mp4").write_bytes(b"")
    os.mkfifo(tmp_path / "fifo.mp4")
    (tmp_path / "itself.mp4").symlink_to("itself.mp4")
    (tmp_path / "device.mp4").symlink_to("/dev/zero")
    with (tmp_path / "sparse.mp4").open("wb") as file:
        file.truncate(1 << 40)
    names = [path.name for path in sorted(tmp_path.iterdir())]
    lines = [chat("text", "What is 12 + 30?", max_tokens=2)]
    for name in names:
        content = [{"type": "video_url", "video_url": {"url": name}}, {"type": "text", "text": "What?"}]
        lines.append(chat(name, content, max_tokens=2))
    gif = base64.b64encode(make_animation(1000)).decode()
    picture = {"type": "image_url", "image_url": {"url": f"data:image/gif;base64,{gif}"}}
    lines.append(chat("animation", [picture], max_tokens=2))
    job = write_job(tmp_path, lines)
    assert main(["batch", str(job), "--set", "engine.load_check=false"]) == 1
    done = [json.loads(line) for line in (tmp_path / "job.out.jsonl").read_text().splitlines()]
    assert {record["custom_id"] for record in done} == {"text", "good.mkv", "animation"}
    errors = [json.loads(line) for line in (tmp_path / "job.errors.jsonl").read_text().splitlines()]
    assert len(errors) == len(names) - 1
    for record in errors:
        count("media bombs")
        assert record["error"]["code"] == "invalid_video", record
        text = record["error"]["message"]
        assert text.isprintable() and len(text.encode()) <= MAX_MESSAGE, text


def test_a_video_beyond_the_limit_is_not_read_for_a_key(tmp_path: Path) -> None:
    """A file of a terabyte held up the start of a job for hours. Without the limit it is read."""
    body = {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "a.mp4"}}]}]}
    line = JobLine(1, "a", CHAT, body)

    def compute(content: bytes, most: int | None) -> bytes:
        (tmp_path / "a.mp4").write_bytes(content)
        return LineKeys("s", tmp_path, 10**6, max_video=most).compute_key(line)

    assert compute(b"a" * 200, 100) == compute(b"b" * 200, 100)
    assert compute(b"a" * 200, None) != compute(b"b" * 200, None)


def test_a_length_that_lies_counts_without_its_limit() -> None:
    """The mutation twin: the video of 2^32 frames is believed, and has four."""
    data = make_avi([SMALL] * 4, total=2**32 - 1)
    settings, sampling = MediaSettings(video_max_seconds=1e12), VideoSampling(2.0, 4, 8, 2)
    chosen = choose_frames(data, settings, sampling)
    assert chosen.total > 10**9
    assert len(read_video(data, chosen, settings).frames) < 8
