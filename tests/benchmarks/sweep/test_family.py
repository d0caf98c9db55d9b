"""Families of the libraries answer through the engine as through the library's own loop.

CI checks those named here, without the slowest checks; `pytest -m sweep` checks every family, each in a
process of its own.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from benchmarks.sweep import checks, sweep
from benchmarks.sweep.family import check_family
from benchmarks.tiny import library_loop
from tests.helpers import text_models, vision_models

# Of each kind one: attention, windows, recurrent states, latent attention, experts, odd positions. Those of
# tests/parity are not repeated here.
TEXT = (
    *("afm7", "afmoe", "baichuan_m1", "cohere2", "deepseek_v2", "ernie4_5", "exaone4", "glm4_moe", "gpt2"),
    *("gpt_neox", "granite", "jamba", "kimi_linear", "mamba", "minicpm3", "olmo3", "phi", "plamo3"),
)
SLOWER = {"afm7", "plamo3"}

VISION = (
    *("qwen2_vl", "qwen3_vl_moe", "glm4v", "gemma4_unified", "llava", "mistral3", "internvl", "llava_next"),
    *("llava_onevision", "phi4mm", "paligemma"),
)
SLOWER_VISION = {
    "gemma4_unified": "a prompt with images is computed at once up to the last of them",
    "phi4mm": "one forward for rows of similar length",
    "paligemma": "each prompt is computed at once, without a prefix cache",
}


def test_enough_families_are_checked_by_default() -> None:
    """25 of text and 10 of images, with those of tests/parity."""
    assert len({*TEXT, *text_models.CORE, "deepseek_v3", "gemma2"}) >= 25
    assert len({*VISION, *vision_models.CORE}) >= 10


@pytest.mark.parametrize("family", VISION)
def test_a_vision_family_is_exact(family: str) -> None:
    """Image tokens of gemma4_unified see each other."""
    result = check_family("vision", family, brief=True)
    slower = SLOWER_VISION.get(family, "")
    expected = ("slower" if slower else "exact", slower)
    assert (result.status, result.why) == expected, result


@pytest.mark.parametrize(("family", "why"), [("mllama", "cross attention")])
def test_what_cannot_be_exact_is_refused(family: str, why: str) -> None:
    """Images alone, where text is exact; or the model."""
    result = check_family("vision", family, brief=True)
    assert result.status == "refused" and why in result.why, result


@pytest.mark.parametrize("family", TEXT)
def test_a_text_family_is_exact(family: str) -> None:
    result = check_family("text", family, brief=True)
    assert result.status == ("slower" if family in SLOWER else "exact"), result
    # plamo3 is one whose library differs by the size of chunks.
    assert ("as the library splits them" in result.why) == (family == "plamo3"), result


def test_a_family_that_this_machine_cannot_run_is_not_built() -> None:
    result = check_family("text", "nanbeige_of_no_library")
    assert result.status == "unbuilt" and "ModuleNotFoundError" in result.why


def confuse_chunks(engine: Any) -> None:
    """Chunks after the first see other tokens."""
    caller = engine.generation.runner._caller
    prefill = caller.prefill

    def confused(ids: mx.array, cache: Any, start: int, *rest: Any) -> mx.array:
        return prefill(ids if start == 0 else mx.zeros_like(ids), cache, start, *rest)

    caller.prefill = confused


def confuse_rows(engine: Any) -> None:
    """Each decoding row goes on with the token of another."""
    caller = engine.generation.runner._caller
    decode = caller.decode
    caller.decode = lambda ids, cache, positions: decode(ids[::-1], cache, positions)


def confuse_snapshots(engine: Any) -> None:
    """Restored keys are nothing."""
    copier = engine.generation.runner._copier
    restore = copier.restore

    def restored(*given: Any) -> Any:
        cache = restore(*given)
        for layer in cache:
            layer.keys = mx.zeros_like(layer.keys)
        return cache

    copier.restore = restored


@pytest.mark.parametrize(
    ("confuse", "found"),
    [(confuse_chunks, "alone, chunks of 7"), (confuse_rows, "together"), (confuse_snapshots, "disk")],
)
def test_a_wrong_engine_is_found(monkeypatch: pytest.MonkeyPatch, confuse: Any, found: str) -> None:
    """Each bug is planted after the checks at load."""
    build = checks.build_engine

    def build_confused(*given: Any) -> Any:
        engine = build(*given)
        confuse(engine)
        return engine

    monkeypatch.setattr(checks, "build_engine", build_confused)
    result = check_family("text", "llama", brief=True)
    assert result.status == "wrong" and found in result.why, result


def test_swapped_images_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt with two images has each in the place of the other."""
    answer = library_loop.answer_vision

    def answer_swapped(folder: Any, prompt: Any, media: Any, count: int) -> Any:
        if media is not None:
            media = {**media, "pixel_values": media["pixel_values"][::-1].copy()}
        return answer(folder, prompt, media, count)

    monkeypatch.setattr(library_loop, "answer_vision", answer_swapped)
    result = check_family("vision", "llava", brief=True)
    assert result.status == "wrong" and "alone" in result.why, result


def test_a_family_hears_as_its_library_does() -> None:
    result = check_family("audio", "minicpmo", brief=True)
    assert (result.status, result.why) == ("exact", ""), result


@pytest.mark.sweep
def test_swapped_sounds_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt with two sounds has each in the place of the other."""
    answer = library_loop.answer_media
    monkeypatch.setattr(
        library_loop,
        "answer_media",
        lambda folder, rendered, count: answer(folder, (*rendered[:3], rendered[3][::-1]), count),
    )
    result = check_family("audio", "minicpmo", brief=True)
    assert result.status == "wrong" and "alone" in result.why, result


@pytest.mark.sweep
def test_sounds_that_a_library_does_not_hear_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that does not hear them either would be exact."""
    monkeypatch.setattr("mlx_vlm.models.minicpmo.minicpmo.Model.get_audio_embedding", lambda *given: [])
    result = check_family("audio", "minicpmo", brief=True)
    assert result.status == "unbuilt" and "does not depend on the sound" in result.why, result


def test_images_that_a_library_does_not_see_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that does not see them either would be exact."""
    monkeypatch.setattr(library_loop, "hook_embeddings", lambda model: 0)
    result = check_family("vision", "mistral_large3", brief=True)
    assert result.status == "unbuilt" and "does not depend on the pixels" in result.why, result


@pytest.mark.parametrize(("family", "where"), [("gemma4_unified", "disk"), ("paligemma", "together")])
def test_tokens_that_see_later_ones_in_part_are_found(
    monkeypatch: pytest.MonkeyPatch, family: str, where: str
) -> None:
    """Prompts are split although the load check says that they must not be. The last token is one part."""
    monkeypatch.setattr("mlxrun.engine.engine.join_media_spans", lambda request, **_: request)
    result = check_family("vision", family, brief=True)
    assert result.status == "wrong" and where in result.why, result


@pytest.mark.sweep
def test_no_family_is_wrong() -> None:
    results = list(sweep.run_sweep(sweep.list_families()))
    assert [result for result in results if result.status == "wrong"] == []
    assert {result.status for result in results if result.kind == "audio"} <= {"exact", "slower", "refused"}
    built = [result for result in results if result.status != "unbuilt"]
    exact = [result for result in built if result.status in ("exact", "slower")]
    assert len(built) > 130 and len(exact) >= 0.95 * len(built)
