"""The chat bodies of `mlxrun bench serve`, made from a seed; its plan; and the results of a round. Pure.

Prompts are made of common words, so a token is about a word for most tokenizers; the server's usage says the
real number. Every request of a round has different words, unless the workload shares a prefix.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlxrun.cli.bench.engine.measurement import Measure
from mlxrun.cli.bench.serve.streaming_client import LoadPattern, Target

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue"
)
WORDS = tuple(_TEXT.split())
SIDE = 64  # pixels of an image


@dataclass(frozen=True, slots=True)
class PromptSize:
    """Words of a prompt and tokens of its answer. `long`: words of the long prompt, if there is one; `pages`:
    it is a PDF of so many pages instead."""

    prompt: int
    output: int
    long: int = 16_000
    pages: int = 0


Maker = Callable[[random.Random, PromptSize, int], dict[str, Any]]


def _make_body(messages: list[dict[str, Any]], output: int) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": output, "temperature": 0}


def _draw_words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=max(1, count)))


def _make_chat(rng: random.Random, size: PromptSize, at: int) -> dict[str, Any]:
    return _make_body([{"role": "user", "content": _draw_words(rng, size.prompt)}], size.output)


def _make_shared(rng: random.Random, size: PromptSize, at: int) -> dict[str, Any]:
    """Nine tenths of the prompt are the same for all, whatever the round."""
    own = max(1, size.prompt // 10)
    system = _draw_words(random.Random("shared"), size.prompt - own)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": _draw_words(rng, own)}]
    return _make_body(messages, size.output)


def _make_mixed(rng: random.Random, size: PromptSize, at: int) -> dict[str, Any]:
    """A quarter, once, twice and four times the prompt, in turns."""
    factor = (0.25, 1, 2, 4)[at % 4]
    return _make_chat(rng, PromptSize(round(size.prompt * factor), size.output), at)


def _make_image(rng: random.Random, size: PromptSize, at: int) -> dict[str, Any]:
    parts = [
        {"type": "image_url", "image_url": {"url": _draw_picture(rng)}},
        {"type": "text", "text": _draw_words(rng, size.prompt)},
    ]
    return _make_body([{"role": "user", "content": parts}], size.output)


def _draw_picture(rng: random.Random) -> str:
    """A PNG of blocks as a data URL."""
    from PIL import Image

    colours, data = b"".join(rng.randbytes(3) for _ in range(16)), io.BytesIO()
    blocks = Image.frombytes("RGB", (4, 4), colours)
    blocks.resize((SIDE, SIDE), Image.Resampling.NEAREST).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def make_pages_body(pages: int, tokens: int, seed: str) -> dict[str, Any]:
    """Make a chat about a PDF with that many letter pages of coloured blocks, other ones for each seed."""
    rng = random.Random(f"pages {seed}")
    parts = [{"type": "file", "file": {"filename": "pages.pdf", "file_data": _draw_pages(rng, pages)}}]
    return _make_body(
        [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}], tokens
    )


def _draw_pages(rng: random.Random, pages: int) -> str:
    """A PDF as a data URL, written here as no library of ours writes vectors. It has no table of its objects,
    which readers then find by themselves."""
    kids = " ".join(f"{3 + 2 * page} 0 R" for page in range(pages))
    objects = ["<</Type/Catalog/Pages 2 0 R>>", f"<</Type/Pages/Count {pages}/Kids[{kids}]>>"]
    for page in range(pages):
        blocks = [
            (x, y, [rng.random() for _ in range(3)]) for x in range(0, 612, 51) for y in range(0, 792, 66)
        ]
        content = "\n".join(f"{r:.2f} {g:.2f} {b:.2f} rg {x} {y} 51 66 re f" for x, y, (r, g, b) in blocks)
        objects.append(f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents {4 + 2 * page} 0 R>>")
        objects.append(f"<</Length {len(content)}>>stream\n{content}\nendstream")
    numbered = "".join(f"{number} 0 obj\n{body}\nendobj\n" for number, body in enumerate(objects, 1))
    data = f"%PDF-1.4\n{numbered}trailer<</Root 1 0 R/Size {len(objects) + 1}>>\n%%EOF\n"
    return "data:application/pdf;base64," + base64.b64encode(data.encode()).decode()


WORKLOADS: dict[str, Maker] = {
    "chat": _make_chat,
    "shared": _make_shared,
    "mixed": _make_mixed,
    "image": _make_image,
}


def make_bodies(name: str, size: PromptSize, count: int, seed: str) -> list[dict[str, Any]]:
    """Make the bodies of one round. Every seed gives other words."""
    rng = random.Random(f"{name} {seed}")
    return [WORKLOADS[name](rng, size, at) for at in range(count)]


Values = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What to send to which servers. `warm_up`: requests of the first round, which is not measured; None: as
    many as of the others."""

    targets: tuple[Target, ...]
    workloads: tuple[str, ...]
    size: PromptSize
    requests: int
    load: LoadPattern
    repeat: int = 3
    warm_up: int | None = None


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The numbers of one round, one for each measure of its workload (seconds, tokens, shares), and its
    errors."""

    numbers: Values
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    """How a workload is measured. `run_round`: sends one round to one server; its last argument seeds the
    words. `settings`: those that the workload uses, by their names on the command line. `describe`: says in
    words what was sent, from the report's settings; `headline`: the measure that progress shows."""

    measures: Mapping[str, Measure]
    run_round: Callable[[Target, ServePlan, str], Awaitable[RoundResult]]
    settings: frozenset[str]
    describe: Callable[[Mapping[str, Any]], str]
    headline: str
