"""docs/models.md, made of the results of a sweep."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.sweep.family import FamilyResult, Status
from benchmarks.sweep.layers import Layers, render_layers
from benchmarks.sweep.left_out import LEFT_OUT, NOT_HEARD
from benchmarks.sweep.library_faults import render_faults
from benchmarks.tiny.processor_files import PROCESSORS

WORDS: dict[Status, str] = {
    "exact": "exact",
    "slower": "exact by a slower way",
    "refused": "refused",
    "wrong": "wrong",
    "unbuilt": "does not build",
}
_KINDS = {"text": "Text families of mlx-lm", "vision": "Vision-language families of mlx-vlm"}
_HEAD = """# Models

Made by `python -m benchmarks sweep --markdown > docs/models.md` with {versions}. Do not edit.

Every family of the libraries gets a tiny model with random float32 weights. The engine has to answer as the
library's own loop for one request does, cold and alone. It must give the same tokens, and logprobs that
differ by less than 0.001.

Each model is checked alone with prefill chunks of 1, 7 and 64 tokens, and with prompts of several lengths
together (padded and ragged). It is also checked with requests that join late, across its windows (8 tokens),
from a snapshot, from the disk cache, and after preemption.{vision}

- *exact*: all of these give the library's answer.
- *exact by a slower way*: the same, but the load check found that a faster way differs, and does not use
  it. What is done instead is in the last column.
- *refused*: the model does not load, or does not take images, and the error says why; text is exact then.
- *wrong*: an answer differs. Do not use this family.
- *does not build*: the library cannot build or run the tiny model on this machine, so nothing is known.

A family is a module of the library, and mostly a `model_type` of config.json. Checkpoints of a family may
have options that its tiny model lacks; `mlxrun doctor` checks the checkpoint that you use.
"""
_VISION = """
Vision-language models are also checked with one image, with two, with images in two turns, and beside rows of
text. Of {count} families the models have the processor files of a real checkpoint, with small sizes. The
library's own processor makes pixels and image tokens of wide, tall and tiny pictures then, also for the load
check. For the others the sweep makes pixels and image tokens itself, and image processors are not part of it.
These families have them:

```text
{names}
```

Families that take audio are also checked with one sound, with two, with one beside an image, and beside rows
of text. All of them have processor files. The column *audio* has the result; in the other families mlx-vlm
takes no audio."""


def render_markdown(
    results: Sequence[FamilyResult],
    versions: Mapping[str, str],
    layers: Mapping[str, Mapping[str, Layers]] | None = None,
) -> str:
    """The page: a head, counts, and a table for each kind of family. `layers`: of families, by kind."""
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    processed = sorted(r.family for r in results if r.kind == "vision" and r.family in PROCESSORS)
    names = textwrap.fill(" ".join(processed), 110)
    vision = _VISION.format(count=len(processed), names=names) if processed else ""
    lines = [_HEAD.format(versions=named, vision=vision).rstrip()]
    for kind, title in _KINDS.items():
        some = [result for result in results if result.kind == kind]
        if some:
            lines += [
                "",
                f"## {title}",
                "",
                summarize(some) + ".",
                "",
                "| family | result | |" + (" audio |" if kind == "vision" else ""),
                "|---|---|---|" + ("---|" if kind == "vision" else ""),
            ]
            lines += _render_rows(some, _describe_audio(results) if kind == "vision" else None)
            lines += render_layers((layers or {}).get(kind, {}))
        if some and kind == "vision":
            lines += [*_render_left_out(), *render_faults()]
    return "\n".join(lines) + "\n"


def summarize(results: Sequence[FamilyResult]) -> str:
    """How many families have each result, as words."""
    counts = Counter(result.status for result in results)
    plural = WORDS | {"unbuilt": "do not build"}
    found = [f"{counts[status]} {words}" for status, words in plural.items() if counts[status]]
    return f"{len(results)} families: " + ", ".join(found)


def _render_rows(results: Sequence[FamilyResult], audio: Mapping[str, str] | None) -> Iterator[str]:
    """The rows of a table; `audio`: the cells of a column more, by family."""
    for result in sorted(results, key=lambda result: result.family.lower()):
        more = "" if audio is None else f" {audio.get(result.family, '')} |"
        yield f"| `{result.family}` | {WORDS[result.status]} | {_escape(result.why)} |{more}"


def _describe_audio(results: Sequence[FamilyResult]) -> dict[str, str]:
    """The result of audio of each family that was checked, and of those that were not. What the row says
    already is left out."""
    said = {result.family: result.why for result in results if result.kind == "vision"}
    found = dict(NOT_HEARD)
    for each in results:
        if each.kind == "audio":
            why = "" if each.why == said.get(each.family) else _escape(each.why)
            found[each.family] = ": ".join(filter(None, (WORDS[each.status], why)))
    return found


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def _render_left_out() -> Iterator[str]:
    yield from ("", "Not checked, with the reason:", "")
    for reason, families in LEFT_OUT.items():
        yield f"- {reason}: {', '.join(f'`{family}`' for family in sorted(families))}"
