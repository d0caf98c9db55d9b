"""Prompts with audio give what the ORACLE gives for the same samples; planted bugs must be found.

mlx-vlm's qwen3_omni_moe computes audio that is shorter than a second otherwise beside longer audio, as its
transformers do. So the features of several are those of the set.
"""

from __future__ import annotations

import base64
import io
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx_vlm.utils
import numpy as np
import pytest

from benchmarks.tiny import omni_models
from benchmarks.tiny.omni_families import FAMILIES
from benchmarks.tiny.omni_models import OMNI, Part
from mlxrun.cli.main import main
from mlxrun.config.media_settings import Audio
from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import MediaError, ModelLoadError
from mlxrun.core.request import Request
from mlxrun.engine.engine import Engine
from mlxrun.jobs.records.run_paths import JobPaths
from mlxrun.model.load import model_info
from mlxrun.model.run.prompt_inputs import PromptInputs
from mlxrun.model.vision import embedder, media_processing
from mlxrun.model.vision.image_units import Media, group_by_kind
from mlxrun.model.vision.placeholders import FEATURE_TOKEN
from tests.helpers import engine_driver, oracle, vision_models
from tests.helpers.audio_files import audio_url, make_audio
from tests.helpers.batch_fakes import by_id, write_job
from tests.helpers.command_processes import read_log, start_command, wait_until
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.load_check_driver import list_failed, probe_model
from tests.helpers.model_fixtures import Zoo, mark_sweep
from tests.helpers.oracle import Answer
from tests.helpers.pdf_files import make_pdf, pdf_url
from tests.helpers.video_files import make_video, video_url
from tests.parity.test_vision import push_out
from tests.parity.test_vision_mutations import looks_at_images

pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter")  # of gemma4's own files too

Patch = pytest.MonkeyPatch
Case = tuple[Part, ...]
COUNT = 8
SHORT, LONG = omni_models.make_audio(1, 0.4), omni_models.make_audio(2, 1.3)
OTHER = omni_models.make_audio(3, 0.4)
RED = vision_models.images(3, 1, size=(32, 32))[0]
CLIP = vision_models.video(1)
TURN = "<|im_end|>\n<|im_start|>assistant\nfine<|im_end|>\n<|im_start|>user\n"
CASES: dict[str, Case] = {
    "one": ("what is ", LONG, " and tell me more about it, please"),
    "two": (SHORT, "hm", LONG, "which one?"),
    "turns": ("listen: ", SHORT, TURN, "and ", OTHER, "?"),
    "text": ("just text, no audio",),
    "image": ("what is ", RED, "?"),
    "both": ("is ", SHORT, " in ", RED, "?"),
    "video": ("what is ", CLIP, "?"),
    "mixed": ("is ", SHORT, " in ", RED, " or in ", CLIP, "?"),
}


def make_request(engine: Engine, family: str, name: str, case: Case) -> Request:
    text, *media = omni_models.render(family, case)
    if not any(media):
        return engine_driver.make_vision_request(engine, name, text, max_tokens=COUNT)
    made = engine.model_info.process(text, *media)
    request = engine_driver.make_text_request(name, made.ids, max_tokens=COUNT)
    return replace(request, image_spans=made.image_spans, media=made.media, image_digests=made.image_digests)


# The checks that do not pass. mlx-vlm's gemma4 gives padding of one audio to the next; the image tokens of
# gemma4_unified see each other; an image of inkling has any number of arrays.
_CHUNKS = ("chunks", "chunks, encoded by one call")
FAILED = {
    "gemma4": ["audio beside audio"],
    "phi4mm": ["decode ragged"],
    "nemotron_h_nano_omni": ["image beside video", "video beside audio"],
    "inkling": ["decode ragged", "decode grouped", "image beside audio"],
    "gemma4_unified": [f"{kind} {check}" for kind in ("image", "video") for check in _CHUNKS],
}


def list_cases(family: str) -> dict[str, Case]:
    """The prompts that a family answers."""
    return {name: case for name, case in list_possible(family).items() if not name_refused(family, case)}


def list_possible(family: str) -> dict[str, Case]:
    """The prompts with media that a family takes."""
    takes_video = FAMILIES[family].video
    return {name: case for name, case in CASES.items() if takes_video or CLIP not in case}


def name_refused(family: str, case: Case) -> str:
    """Why a family refuses a prompt; empty if it does not."""
    entry = FAMILIES[family]
    if RED in case and SHORT in case and not entry.beside:
        return "images beside audio are"
    several = sum(isinstance(part, Audio) for part in case) > 1
    return "audio beside audio is" if several and not entry.several else ""


_answers: dict[tuple[Any, ...], Answer] = {}


def hear(zoo: Zoo, family: str, case: Case) -> Answer:
    folder = zoo.omni(family)
    key = (folder, *(part if isinstance(part, str) else id(part) for part in case))  # media of this module
    if key not in _answers:
        text, *media = omni_models.render(family, case)
        images, videos, audio = media
        _answers[key] = oracle.vision_answer(folder, text, images, COUNT, videos, audio)
    return _answers[key]


@pytest.mark.parametrize("family", mark_sweep(OMNI, (*OMNI[:2], "minicpmo", "phi4mm")))
def test_audio_beside_other_media_and_text(zoo: Zoo, family: str) -> None:
    """In one batch with late joins; in small chunks, none of which ends inside a span; after preemption."""
    engine = engine_driver.make_real_engine(zoo.omni(family), chunk=16, prefill_budget=32)
    assert engine.load_check is not None and not engine.load_check.audio
    assert list_failed(engine.load_check) == FAILED.get(family, [])
    cases = list_cases(family)
    requests = [make_request(engine, family, name, case) for name, case in cases.items()]
    joins = [TimedRequest(request, add_step=4 * i % 9) for i, request in enumerate(requests)]
    events = engine_driver.run_requests(engine, joins, push_out(engine))
    for name, event in events.items():
        answer = hear(zoo, family, cases[name])
        prompt = next(request for request in requests if request.id == name).prompt
        assert FEATURE_TOKEN in prompt or prompt == answer.ids
        engine_driver.check_answer(event, answer)
    for name, case in list_possible(family).items():
        if refused := name_refused(family, case):
            request = make_request(engine, family, name, case)
            error = engine_driver.run_requests(engine, [request])[name].error
            assert f"{refused} refused for this model" in str(error), name


def list_wrong(engine: Engine, zoo: Zoo, family: str, every: Sequence[Audio]) -> list[int]:
    """The audio with which one prompt after the other has another answer than alone and cold."""
    wrong = []
    for number, audio in enumerate(every):
        case = ("what is ", audio, " and tell me more")
        event = engine_driver.run_requests(engine, [make_request(engine, family, "again", case)])["again"]
        if engine_driver.has_other_answer(event, hear(zoo, family, case)):
            wrong.append(number)
    return wrong


@pytest.mark.parametrize("family", mark_sweep(OMNI, OMNI[:1]))
def test_audio_in_the_prefix_cache(zoo: Zoo, family: str, monkeypatch: Patch) -> None:
    """Found again as it is, not for other samples. The twin has one digest for all audio."""
    engine = engine_driver.make_real_engine(zoo.omni(family), chunk=8)
    assert list_wrong(engine, zoo, family, [SHORT, OTHER]) == []
    request = make_request(engine, family, "again", ("what is ", SHORT, " and tell me more"))
    event = engine_driver.run_requests(engine, [request])["again"]
    assert event.num_cached_tokens >= request.image_spans[-1][1]
    monkeypatch.setattr(media_processing, "compute_audio_digests", lambda *given: [b"the same"])
    engine = engine_driver.make_real_engine(zoo.omni(family), chunk=8)
    assert list_wrong(engine, zoo, family, [SHORT, OTHER]) == [1]


@pytest.mark.parametrize("family", mark_sweep(OMNI, OMNI[:1]))
def test_features_of_the_same_audio_are_computed_once(zoo: Zoo, family: str, monkeypatch: Patch) -> None:
    engine = engine_driver.make_real_engine(zoo.omni(family), backend="none")
    embedded: list[int] = []
    original = embedder.Embedder.embed_prompt
    monkeypatch.setattr(
        embedder.Embedder,
        "embed_prompt",
        lambda self, ids, media: embedded.append(len(ids)) or original(self, ids, media),
    )
    for number in range(3):
        request = make_request(engine, family, f"{number}", ("what is ", LONG, f" number {number}"))
        assert engine_driver.run_requests(engine, [request])[f"{number}"].error is None
    assert len(embedded) == 1


def swap_audio(patch: Patch) -> None:
    """The features of a prompt's tokens are in the reverse order."""

    def change(inputs: PromptInputs) -> PromptInputs:
        return replace(inputs, embeds=None if inputs.embeds is None else inputs.embeds[:, ::-1])

    looks_at_images(patch, change)


def leave_out_audio(patch: Patch) -> None:
    """Audio is what its placeholders are in a text."""
    original = embedder.Embedder.embed_prompt
    patch.setattr(
        embedder.Embedder,
        "embed_prompt",
        lambda self, ids, media: original(self, ids, drop_audio(media)),
    )


def drop_audio(media: Media) -> Media:
    own = group_by_kind(media).get("audio", {})
    return {key: array for key, array in media.items() if key not in own}


@pytest.mark.parametrize("family", mark_sweep(OMNI, OMNI[:1]))
def test_planted_bugs_are_found(zoo: Zoo, family: str) -> None:
    """By the answers, and by the load check."""
    folder, case = zoo.omni(family), CASES["two" if FAMILIES[family].several else "one"]
    engine = engine_driver.make_real_engine(folder, backend="none")
    for mutate in (None, swap_audio, leave_out_audio):
        with pytest.MonkeyPatch.context() as patch:
            if mutate is not None:
                mutate(patch)
            engine_driver.get_runner(engine)._caller.reset_images()
            event = engine_driver.run_requests(engine, [make_request(engine, family, "x", case)])["x"]
            is_other = engine_driver.has_other_answer(event, hear(zoo, family, case))
            found = list_failed(probe_model(folder))
            assert is_other == (found != FAILED.get(family, [])) == (mutate is not None), mutate


def make_lines() -> list[dict[str, Any]]:
    """Lines with text, an image, a video, a PDF and audio, and with all of them."""
    buffer = io.BytesIO()
    RED.save(buffer, "PNG")
    picture = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    parts: dict[str, dict[str, Any]] = {
        "image": {"type": "image_url", "image_url": {"url": picture}},
        "video": {"type": "video_url", "video_url": {"url": video_url(make_video())}},
        "pdf": {"type": "file", "file": {"file_data": pdf_url(make_pdf("red"))}},
        "audio": {"type": "audio_url", "audio_url": {"url": "memo.wav"}},
        "input": {
            "type": "input_audio",
            "input_audio": {"data": audio_url(make_audio("flac")).partition(",")[2], "format": "flac"},
        },
    }
    cases = {"text": [], **{name: [part] for name, part in parts.items()}, "all": list(parts.values())}
    return [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "what is "}, *given]}],
                "max_tokens": 60 if given else 8,  # the line of text ends first
            },
        }
        for name, given in cases.items()
    ]


def has_bytes(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def test_a_job_with_every_kind_of_media_is_killed_and_resumed(tmp_path: Path, zoo: Zoo) -> None:
    """Each line's bytes are those that it has alone, in a process that is killed and in the next one."""
    (tmp_path / "memo.wav").write_bytes(make_audio("wav", 1.2))
    lines = make_lines()
    options = ["--set", f"model.path={zoo.omni('qwen3_omni_moe')}"]
    alone = write_job(tmp_path, lines, "alone.jsonl")
    assert main(["batch", str(alone), *options, "--set", "scheduler.max_running=1"]) == 0
    job = write_job(tmp_path, lines)
    # Two rows at a time, so that lines are left after the first answer: seven rows end nearly together.
    process = start_command(tmp_path, "batch", str(job), *options, "--set", "scheduler.max_running=2")
    answers = JobPaths(job).answers
    wait_until(lambda: process.poll() is not None or has_bytes(answers), lambda: read_log(tmp_path))
    process.kill()
    assert process.wait() == -signal.SIGKILL, read_log(tmp_path)
    assert len(answers.read_text().splitlines()) < len(lines), "nothing is left to resume"
    assert main(["batch", str(job), *options]) == 0
    expected = by_id(tmp_path / "alone.out.jsonl")
    assert by_id(tmp_path / "job.out.jsonl") == expected and len(expected) == len(lines)


def test_the_media_of_a_prompt_are_told_apart() -> None:
    """The features of two audio have digests of their own, and others beside other audio."""
    features = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    both = media_processing.compute_audio_digests({"input_features": features})
    alone = media_processing.compute_audio_digests({"input_features": features[:1]})
    assert len({*both, *alone}) == 3
    assert media_processing.compute_audio_digests({"pixel_values": features}) == []


def test_arrays_of_audio_that_are_not_known_are_refused(zoo: Zoo, monkeypatch: Patch) -> None:
    """Audio could not be told apart in the prefix cache."""
    info = model_info.load_model_info(ModelSettings(path=str(zoo.omni("qwen3_omni_moe"))))
    original = mlx_vlm.utils.prepare_inputs
    names = {"input_features": "sound_waves", "feature_attention_mask": "sound_mask"}
    monkeypatch.setattr(
        "mlx_vlm.utils.prepare_inputs",
        lambda *args, **given: {names.get(key, key): a for key, a in original(*args, **given).items()},
    )
    text, *media = omni_models.render("qwen3_omni_moe", CASES["one"])
    with pytest.raises(MediaError, match="arrays of audio are not known: .*sound_waves"):
        info.process(text, *media)


def test_audio_without_a_place_is_refused(zoo: Zoo) -> None:
    """Phi-4's processor takes marks in the text for audio, and leaves out audio without one."""
    info = model_info.load_model_info(ModelSettings(path=str(zoo.omni("phi4mm"))))
    with pytest.raises(MediaError, match="has places for 0 of 1 audio parts"):
        info.process("hello", [], [], [SHORT])


@pytest.mark.parametrize("family", mark_sweep(OMNI, ("inkling",)))
def test_prompts_are_processed_on_any_thread(zoo: Zoo, family: str) -> None:
    """Not only on the one that loaded the processor: what is pending there cannot be computed elsewhere."""
    info = model_info.load_model_info(ModelSettings(path=str(zoo.omni(family))))
    text, *media = omni_models.render(family, CASES["one"])
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(info.process, text, *media).result().image_spans


def test_gemma_3n_is_refused(zoo: Zoo) -> None:
    """The library embeds its prompts otherwise than the tokens of its answers (docs/models.md)."""
    with pytest.raises(ModelLoadError, match="no way to compute it gives the logits of the library's own"):
        engine_driver.make_real_engine(zoo.omni("gemma3n"))
