"""The checks of images and videos: prompts as the engine computes them, and by the library's own call."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from mlxrun.errors import MediaError
from mlxrun.model.adapter import MediaKind, VisionAdapter
from mlxrun.model.compute_methods import ComputeMethods, make_decode_batch
from mlxrun.model.model_info import LoadedModelInfo
from mlxrun.model.probe.image_prompt import make_media_prompt, make_mixed_prompt
from mlxrun.model.probe.reference import LENGTHS, ProbeLogits, Reference, copy_cache
from mlxrun.model.probe.report import ProbeCheck, ProbeReport
from mlxrun.model.prompt_inputs import PromptInputs, split_prompt
from mlxrun.model.ragged.decode_batch import JoiningRow
from mlxrun.model.ragged.layer_caches import list_all_arrays
from mlxrun.model.vision.embedder import Embedder
from mlxrun.model.vision.image_units import find_regions
from mlxrun.scheduler.request import ProcessedPrompt

log = logging.getLogger(__name__)

IMAGE_STEPS = 1  # tokens decoded after the prompt
MIX_TOLERANCE = 1e-2  # of features, in standard deviations: rounding by other neighbours in a product
_PLURALS: dict[str, MediaKind] = {"image": "images", "video": "videos"}


def probe_images(
    adapter: VisionAdapter, vocab: int, info: LoadedModelInfo | None, text: ProbeReport
) -> ProbeReport:
    """The report of the text checks, with those of images, and of videos if the model takes them. What cannot
    be computed exactly is refused by the adapter from now on."""
    found, cached = _MediaProbe(adapter, vocab, info, "image").compare(text, True)
    if info is None or info.video_sampling is None:
        return found
    found, cached = _MediaProbe(adapter, vocab, info, "video").compare(found, cached)
    if not found.images and not found.videos:
        found = _compare_mix(adapter, info, found)
    return found


@dataclass(frozen=True, slots=True)
class _MediaProbe:
    """The checks of images alone, or of videos alone."""

    adapter: VisionAdapter
    vocab: int
    info: LoadedModelInfo | None
    kind: Literal["image", "video"]

    def compare(self, report: ProbeReport, cached: bool) -> tuple[ProbeReport, bool]:
        """The report with these checks, and whether features are cached. `cached`: whether they may be."""
        if refused := self.adapter.refused[_PLURALS[self.kind]]:  # whatever they would show
            return self._add_note(report, f"refused: {refused}"), cached
        try:
            if self.info is None:
                raise MediaError("there is no image processor")
            prompt = make_media_prompt(self.info, self.kind)
        except MediaError as error:
            return self._report_uncompared(report, str(error)), cached
        try:
            reference = Reference(self.adapter, self.vocab, LENGTHS[:1], reduced=False)
            checks = ImageChecks(self.adapter, prompt, reference)
        except Exception as error:  # a library may raise anything: there is nothing to compare with
            why = f"the library's own call fails: {type(error).__name__}: {error}"
            return self._report_uncompared(report, why), cached
        methods, cached = _ImageLadder(checks, report.methods, self.kind).compare(cached)
        refused = self.adapter.refused[_PLURALS[self.kind]]
        report = replace(report, methods=methods, checks=(*report.checks, *checks.done))
        return self._add_note(report, f"refused: {refused}" if refused else ""), cached

    def _report_uncompared(self, report: ProbeReport, why: str) -> ProbeReport:
        log.warning("parity probe: %s are not compared for this model: %s", _PLURALS[self.kind], why)
        return self._add_note(report, f"not compared: {why}")

    def _add_note(self, report: ProbeReport, note: str) -> ProbeReport:
        return replace(report, images=note) if self.kind == "image" else replace(report, videos=note)


def _compare_mix(adapter: VisionAdapter, info: LoadedModelInfo, report: ProbeReport) -> ProbeReport:
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
        worst = max(worst, _compare_arrays(whole[0, mx.array(run)], alone[0, mx.array(part.places)]))
    return worst


class ImageChecks:
    """Each method computes the prompt in one way. The reference's only prompt is the text beside it: its
    logits have index 0, those of the prompt with images index 1."""

    def __init__(self, adapter: VisionAdapter, prompt: ProcessedPrompt, reference: Reference) -> None:
        self.adapter = adapter
        self.done: list[ProbeCheck] = []
        self._prompt = prompt
        self._reference = reference
        self._last = len(prompt.ids) - 1
        spans = [range(*span) for span in prompt.image_spans]
        text = [token for i, token in enumerate(prompt.ids) if not any(i in span for span in spans)]
        self._answer = text[-IMAGE_STEPS:]
        self._prefilled: tuple[PromptInputs, list[Any]] | None = None
        self._features = self._call_library(reference)

    def _call_library(self, reference: Reference) -> dict[str, Any]:
        """Add the logits of the library's own calls to the reference; returns what it made of the prompt."""
        model, ids = self.adapter.model, mx.array([self._prompt.ids])
        given = {key: mx.array(value) for key, value in self._prompt.media.items()}
        pixels = given.pop("pixel_values", None)
        made = model.get_input_embeddings(ids, pixels, mask=mx.ones_like(ids), **given).to_dict()
        features = {name: value for name, value in made.items() if value is not None}
        cache = self.adapter.make_cache()
        copied = {name: a[...] if isinstance(a, mx.array) else a for name, a in features.items()}
        outputs = [model.language_model(ids, cache=cache, **(given | copied)).logits]  # may write into them
        mx.eval(outputs, list_all_arrays(cache))
        for token in self._answer:
            outputs.append(model.language_model(mx.array([[token]]), cache=cache).logits)
        reference.add_logits({(1, step): logits[0, -1] for step, logits in enumerate(outputs)})
        return features

    def check(self, name: str, run: Any, instead: str) -> bool:
        """Compare the result of a run, and record it."""
        check = self._reference.check(name, run)
        self.done.append(check if check.passed else replace(check, instead=instead))
        return check.passed

    def prefill_chunks(self) -> ProbeLogits:
        """In chunks that end before and after images, as the scheduler splits such a prompt."""
        spans = self._prompt.image_spans
        edges = {0, spans[0][0], spans[0][1], spans[-1][1], self._last}
        return self._prefill(sorted(edge for edge in edges if edge <= self._last))

    def prefill_whole(self) -> ProbeLogits:
        return self._prefill((0, self._last))

    def _prefill(self, edges: Sequence[int]) -> ProbeLogits:
        ids, cache = self._prompt.ids, self.adapter.make_cache()
        inputs = self.adapter.prepare_inputs(ids, self._prompt.media)
        for start, stop in itertools.pairwise(edges):
            inputs = self.adapter.encode_images(inputs, start, stop)
            self.adapter.prefill(mx.array([ids[start:stop]]), cache, start, inputs)
            mx.eval(list_all_arrays(cache))
        copied = copy_cache(cache)
        self._prefilled = None if copied is None else (inputs, copied)
        tokens = [ids[-1], *self._answer]
        positions = [self._last + step + inputs.position_delta for step in range(len(tokens))]
        pairs = enumerate(zip(tokens, positions, strict=True))
        decode = self.adapter.decode
        return {(1, step): decode(mx.array([[token]]), cache, [at])[0, -1] for step, (token, at) in pairs}

    def compare_features(self) -> float:
        """The largest difference of a prompt that is made of cached features, in standard deviations of the
        library's embeddings. ValueError for other positions than the library's."""
        ids, media = self._prompt.ids, self._prompt.media
        inputs = self.adapter.prepare_inputs(ids, media)
        inputs = self.adapter.encode_images(inputs, 0, len(ids))
        rest = self.adapter.prepare_inputs(ids, media, cached=self._last)
        delta = self._features.get("rope_deltas")
        expected = 0 if delta is None else int(delta.item())
        if {inputs.position_delta, rest.position_delta} != {expected}:
            raise ValueError(f"positions after the images are off by other than {expected}")
        positions = self._features.get("position_ids")
        if inputs.positions is not None and not mx.array_equal(inputs.positions, positions).item():
            raise ValueError("positions inside the prompt differ")
        names = ("inputs_embeds", "per_layer_inputs")
        own = [self._features[name] for name in names if name in self._features]
        own += self._features.get("deepstack_visual_embeds", ())
        found = [a for a in (inputs.embeds, inputs.per_layer, *inputs.deepstack) if a is not None]
        return max(_compare_arrays(a, b) for a, b in zip(found, own, strict=True))

    def check_features(self, name: str, instead: str) -> bool:
        limit = self._reference.tolerance
        try:
            worst = self.compare_features()
        except Exception as error:  # as in `check_logits`
            log.debug("parity probe: %s raised", name, exc_info=True)
            found = ProbeCheck(name, False, error=f"{type(error).__name__}: {error}", limit=limit)
        else:
            found = ProbeCheck(name, bool(worst <= limit), worst, limit=limit)
        self.done.append(found if found.passed else replace(found, instead=instead))
        return found.passed

    @property
    def can_join(self) -> bool:
        """Whether the prompt's caches are at hand."""
        return self._prefilled is not None

    def decode_among_text(self, methods: ComputeMethods) -> ProbeLogits:
        """The prompt with images and the text beside it in one batch."""
        assert self._prefilled is not None
        inputs, cache = self._prefilled
        text = self._reference.prompts[0]
        batch = make_decode_batch(self.adapter.make_cache(), methods)
        rows = [JoiningRow("0", len(text) - 1, self._reference.copy_filled(0))]
        rows.append(JoiningRow("1", self._last, cache))
        self._prefilled = None  # the batch writes into it
        batch.update({"0", "1"}, rows)
        tokens = ([text[-1], *self._reference.answers[0]], [self._prompt.ids[-1], *self._answer])
        logits: ProbeLogits = {}
        for step in range(IMAGE_STEPS + 1):
            order = [int(rid) for rid in batch.ids]
            deltas = [inputs.position_delta if i else 0 for i in order]
            positions = [n + delta for n, delta in zip(batch.lengths, deltas, strict=True)]
            output = batch.forward(self.adapter.decode, mx.array([tokens[i][step] for i in order]), positions)
            mx.eval(output, batch.list_state_arrays())
            logits |= {(i, step): output[row] for row, i in enumerate(order)}
        return logits


class _ImageLadder:
    """Goes to slower ways where the engine's differ, and refuses images or videos if none is left."""

    def __init__(self, checks: ImageChecks, methods: ComputeMethods, kind: Literal["image", "video"]) -> None:
        self._checks = checks
        self._methods = methods
        self._kind = kind

    def compare(self, cached: bool) -> tuple[ComputeMethods, bool]:
        """The methods that pass, and whether features are cached. `cached`: whether they may be."""
        methods, checks, adapter, kind = self._methods, self._checks, self._checks.adapter, self._kind
        by_call = f"all {kind}s of a prompt are encoded by one call, each time"
        adapter.reset_images(cached=cached)
        cached = cached and checks.check(f"{kind} chunks", checks.prefill_chunks, by_call)
        cached = cached and checks.check_features(f"{kind} features", by_call)
        adapter.reset_images(cached=cached)
        if not cached and not self._passes_uncached(f"{kind} chunks, encoded by one call", True):
            if not self._passes_uncached(f"{kind} whole", False):
                adapter.refused[_PLURALS[kind]] = (
                    f"they are computed differently from the library: {checks.done[-1].describe()}"
                )
                return methods, cached
            methods = methods.split_as_library()
        if methods.decode != "row_by_row" and checks.can_join:
            run = partial(checks.decode_among_text, methods)
            if not checks.check(f"{kind} among text", run, "one forward for each row"):
                methods = replace(methods, decode="row_by_row")
        adapter.reset_images(cached=cached)
        return methods, cached

    def _passes_uncached(self, name: str, chunked: bool) -> bool:
        checks = self._checks
        if chunked:
            instead = "prompts are split as the library splits them, without a prefix cache"
            return checks.check(name, checks.prefill_chunks, instead)
        return checks.check(name, checks.prefill_whole, f"{self._kind}s are refused")


def _compare_arrays(found: mx.array, expected: mx.array) -> float:
    """The largest difference, in standard deviations of what is expected."""
    a, b = (np.array(x.astype(mx.float32)) for x in (found, expected))
    return float(np.abs(a - b).max() / (b.std() + 1e-9))
