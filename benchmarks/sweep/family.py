"""One family of the sweep: its tiny model is made, the library answers, and the engine is compared."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.sweep.checks import TOKENS, TOLERANCE, CheckResult, FamilyChecks
from benchmarks.sweep.prompts import (
    LENGTHS,
    list_audio_prompts,
    make_audio_request,
    make_text_requests,
    make_vision_requests,
)
from benchmarks.tiny import library_loop, omni_models
from benchmarks.tiny.random_models import read_vision_info, write_text_model, write_vision_model
from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import MlxrunError
from mlxrun.core.request import Request
from mlxrun.model.load.model_info import load_model_info

Status = Literal["exact", "slower", "refused", "wrong", "unbuilt"]
LIBRARY_STEPS = (1, 7)  # tokens at once, besides all


@dataclass(frozen=True, slots=True)
class FamilyResult:
    """`status`: exact as fast as the model's kind allows; exact by a `slower` way; refused at load; wrong;
    unbuilt: the library cannot build or run the tiny model. `why`: in words. `difference`: of logprobs."""

    kind: str
    family: str
    status: Status
    why: str = ""
    difference: float | None = None

    def to_json(self) -> Mapping[str, Any]:
        """Fields as plain values."""
        return asdict(self)


def check_family(kind: str, family: str, brief: bool = False) -> FamilyResult:
    """The result of one family; errors are results too. `brief`: without the slowest checks."""
    with tempfile.TemporaryDirectory(prefix="mlxrun-sweep-") as folder:
        scratch = Path(folder)
        try:
            checks, measure = _PREPARE[kind](family, scratch)
        except (Exception, SystemExit) as error:  # a library's module may raise anything, even this
            return FamilyResult(kind, family, "unbuilt", _describe(error))
        return _judge(kind, family, checks, measure, brief)


def _prepare_text(family: str, scratch: Path) -> tuple[FamilyChecks, Callable[[], float]]:
    """The checks, and what measures how far the library is from itself."""
    folder = scratch / "model"
    write_text_model(family, folder)
    requests, longer = make_text_requests()
    answers = {
        key: library_loop.answer_text(folder, request.prompt, TOKENS)
        for key, request in (requests | longer).items()
    }
    checks = FamilyChecks(folder, scratch / "cache", requests, longer, answers)
    return checks, lambda: _measure_library(folder, requests[str(LENGTHS[-1])], answers)


def _prepare_vision(family: str, scratch: Path) -> tuple[FamilyChecks, Callable[[], float]]:
    folder = scratch / "model"
    write_vision_model(family, folder)
    info = read_vision_info(family, folder)
    requests, longer = make_vision_requests(family, info)
    answers = {
        key: library_loop.answer_vision(folder, request.prompt, request.media, TOKENS)
        for key, request in (requests | longer).items()
    }
    check_sight(folder, requests["one"], answers["one"])
    return FamilyChecks(folder, scratch / "cache", requests, longer, answers, info), lambda: 0.0


def _prepare_audio(family: str, scratch: Path) -> tuple[FamilyChecks, Callable[[], float]]:
    folder = scratch / "model"
    write_vision_model(family, folder)
    info = load_model_info(ModelSettings(path=str(folder)))
    prompts, longer = list_audio_prompts(family)
    answers = {
        key: library_loop.answer_media(folder, omni_models.render(family, parts), TOKENS)
        for key, parts in (prompts | longer).items()
    }
    check_hearing(family, folder, answers["one"])
    requests, more = (
        {key: make_audio_request(family, info, key, parts) for key, parts in every.items()}
        for every in (prompts, longer)
    )
    return FamilyChecks(folder, scratch / "cache", requests, more, answers), lambda: 0.0


_PREPARE = {"text": _prepare_text, "vision": _prepare_vision, "audio": _prepare_audio}


def check_hearing(family: str, folder: Path, answer: library_loop.LibraryAnswer) -> None:
    """ValueError if the library answers alike with another sound, as `check_sight`."""
    parts = list_audio_prompts(family, seed=9)[0]["one"]
    other = library_loop.answer_media(folder, omni_models.render(family, parts), 1)
    if abs(other.logprobs[0] - answer.logprobs[0]).max() < TOLERANCE:
        raise ValueError("the answer does not depend on the sound")


def check_sight(folder: Path, request: Request, answer: library_loop.LibraryAnswer) -> None:
    """ValueError if the library answers alike with other pixels: then it does not see the tiny model's
    images, and nothing is known of how they are computed."""
    pixels = request.media["pixel_values"]
    other = library_loop.answer_vision(
        folder, request.prompt, {**request.media, "pixel_values": 0.1 - pixels / 2}, 1
    )
    if abs(other.logprobs[0] - answer.logprobs[0]).max() < TOLERANCE:
        raise ValueError("the answer does not depend on the pixels of the image")


def _measure_library(
    folder: Path, request: Request, answers: Mapping[str, library_loop.LibraryAnswer]
) -> float:
    """How far the library is from itself when it prefills by other chunks; infinite where it cannot."""
    worst = 0.0
    for step in LIBRARY_STEPS:
        try:
            other = library_loop.answer_text(folder, request.prompt, TOKENS, step)
        except Exception:  # a library's model may raise anything
            return math.inf
        chosen = other.logprobs[range(len(other.tokens)), list(other.tokens)].tolist()
        worst = max(worst, answers[request.id].measure(other.tokens, chosen))
    return worst


def _judge(
    kind: str, family: str, checks: FamilyChecks, measure: Callable[[], float], brief: bool
) -> FamilyResult:
    results: list[CheckResult] = []
    try:
        results += checks.run(brief)
    except MlxrunError as error:
        return FamilyResult(kind, family, "refused", _describe(error))
    except Exception as error:  # of the engine or the model: the family does not work
        return FamilyResult(kind, family, "wrong", f"the engine fails: {_describe(error)}")
    worst = max(result.difference for result in results)
    failed = [result for result in results if not result.exact]
    if failed and all(result.refused for result in failed):
        return FamilyResult(kind, family, "refused", failed[0].error or "", worst)
    if failed:
        why = "; ".join(map(_explain, failed))
        library = measure()  # takes as long as a check, and explains a wrong answer only
        if library >= 1e-3:
            why += f"; the library itself differs by chunk size ({library:.2g})"
        return FamilyResult(kind, family, "wrong", why, worst)
    ways = checks.list_audio_ways() if kind == "audio" else checks.list_slower_ways()
    slower = [way for way in ways if "refused" not in way]
    return FamilyResult(kind, family, "slower" if slower else "exact", "; ".join(ways), worst)


def _explain(result: CheckResult) -> str:
    return f"{result.name}: {result.error or f'{result.difference:.2g}'}"


def _describe(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:200]
