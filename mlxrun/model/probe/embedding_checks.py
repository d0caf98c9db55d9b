"""Checks of the embeddings of images and videos: of the same ones again, and of one beside another."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlxrun.core.request import ProcessedPrompt
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.probe.image_prompt import make_mixed_prompt
from mlxrun.model.probe.report import ProbeCheck, ProbeReport
from mlxrun.model.run.adapter import VisionAdapter
from mlxrun.model.run.prompt_inputs import split_prompt
from mlxrun.model.vision.embedder import Embedder
from mlxrun.model.vision.image_units import find_regions

log = logging.getLogger(__name__)

MIX_TOLERANCE = 1e-2  # of features, in standard deviations: rounding by other neighbours in a product

REPETITIONS = 2  # one right after the other, so that what changes with every call is found
GIVEN = ("_position_ids", "_rope_deltas", "_no_grad")


def embed_by_library(model: Any, ids: Sequence[int], media: Mapping[str, Any]) -> dict[str, Any]:
    """What the library's own call makes of a prompt, by name, without what it leaves out."""
    tokens = mx.array([list(ids)])
    given = {key: mx.array(value) for key, value in media.items()}
    pixels = given.pop("pixel_values", None)
    made = model.get_input_embeddings(tokens, pixels, mask=mx.ones_like(tokens), **given).to_dict()
    return {name: value for name, value in made.items() if value is not None}


def measure_repetition(
    embedder: Embedder, prompt: ProcessedPrompt, before: Mapping[str, Any], own: Collection[str]
) -> float:
    """How far the library's embeddings of a prompt are from those that it made of it `before`, in standard
    deviations. Meanwhile it embeds the prompt's first image alone, if it can, and text. ValueError if it
    keeps arrays of the images on the model, where another request would find them. `own`: what it kept before
    it saw any."""
    model = embedder.model
    if kept := [name for name in find_kept_arrays(model) if name not in own]:
        raise ValueError(f"mlx-vlm keeps {', '.join(kept)} of the last images on the model")
    whole = split_prompt(prompt.ids, prompt.media, find_regions(prompt.ids, embedder.tokens, prompt.media))
    runs = None if whole is None else whole.split_places()
    if whole is not None and runs is not None and len(runs) > 1:
        part = whole.cut(runs, 0, 1)
        try:
            mx.eval(embed_by_library(model, part.tokens, part.media)["inputs_embeds"])
        except Exception:  # a library may raise anything; whether it can is for another check
            log.debug("parity probe: an image of a prompt cannot be embedded alone", exc_info=True)
    mx.eval(embed_by_library(model, prompt.ids[:1], {})["inputs_embeds"])
    again = [embed_by_library(model, prompt.ids, prompt.media)["inputs_embeds"] for _ in range(REPETITIONS)]
    return max(compare_arrays(found, before["inputs_embeds"]) for found in again)


def find_kept_arrays(model: Any) -> list[str]:
    """The attributes of a model and of its language model that hold arrays but are no parameters: what a call
    left there. Positions are not among them: the adapter gives them with each call."""
    found = []
    for module in (model, model.language_model):
        values = {**vars(module), **{key: module[key] for key in module}}
        for name, value in values.items():
            if name.startswith("_") and name not in GIVEN and not isinstance(value, nn.Module):
                found += [name] if any(isinstance(a, mx.array) for _, a in tree_flatten([value])) else []
    return sorted(set(found))


def compare_mix(adapter: VisionAdapter, info: LoadedModelInfo, report: ProbeReport) -> ProbeReport:
    """The report with a check of an image and a video in one prompt: the library must give each the features
    that it has alone. Unless it does, the adapter refuses such prompts."""
    name, instead = "image beside video", "prompts with images and videos are refused"
    limit = MIX_TOLERANCE
    try:
        made = make_mixed_prompt(info)
        worst = _measure_neighbours(adapter.embedder, made)
    except Exception as error:  # of the processor or the library, which may raise anything
        log.debug("parity probe: %s raised", name, exc_info=True)
        check = ProbeCheck(name, False, error=f"{type(error).__name__}: {error}", limit=limit)
    else:
        check = ProbeCheck(name, worst <= limit, worst, limit=limit)
    adapter.refused["images beside videos"] = (
        "" if check.passed else f"the library computes them together otherwise than alone: {check.describe()}"
    )
    check = check if check.passed else replace(check, instead=instead)
    return replace(report, checks=(*report.checks, check))


def _measure_neighbours(embedder: Embedder, made: ProcessedPrompt) -> float:
    """How far the features of an image or a video beside others are from those that it has alone, in standard
    deviations."""
    prompt = split_prompt(made.ids, made.media, find_regions(made.ids, embedder.tokens, made.media))
    runs = None if prompt is None else prompt.split_places()
    whole = embedder.embed_prompt(made.ids, made.media).embeds
    if prompt is None or runs is None or whole is None or len(runs) < 2:
        raise ValueError("the images and videos of the prompt cannot be told apart")
    worst = 0.0
    for at, run in enumerate(runs):
        part = prompt.cut(runs, at, at + 1)
        alone = embedder.embed_prompt(part.tokens, part.media).embeds
        assert alone is not None
        worst = max(worst, compare_arrays(whole[0, mx.array(run)], alone[0, mx.array(part.places)]))
    return worst


def compare_arrays(found: mx.array, expected: mx.array) -> float:
    """The largest difference, in standard deviations of what is expected."""
    a, b = (np.array(x.astype(mx.float32)) for x in (found, expected))
    return float(np.abs(a - b).max() / (b.std() + 1e-9))
