"""Writes the job files from held-out data: ``python -m tools.embedded_model.make_jobs JOBS_DIR``.

The same bytes every time: jobs/eval.jsonl (text), jobs/vision.jsonl and jobs/images/*.png.
"""

from __future__ import annotations

import base64
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from tools.embedded_model import scenes
from tools.embedded_model.mix import SCORED
from tools.embedded_model.skills import Example
from tools.embedded_model.words import TEST, fresh

SEED = 2024
TEXT = {
    "add": 32,
    "sub": 32,
    "recall": 32,
    "repeat": 32,
    "name": 32,
    "rule": 32,
    "json": 32,
    "tool": 32,
    "think": 32,
}
VISION = {"colour": 26, "shape": 26, "count": 26}
MIXED_IN = ("add", "name", "json", "rule", "repeat")  # text lines of the vision job, two of each
LIMITS = {"add": 8, "sub": 8, "recall": 24, "repeat": 160, "name": 32, "rule": 96, "json": 128, "tool": 128,
          "think": 96, "colour": 8, "shape": 8, "count": 8}  # fmt: skip


def line(example: Example, number: int, group: str, images: list[str]) -> dict:
    """One OpenAI batch line with its ``eval`` key; ``images`` are the URLs of the pictures."""
    urls = iter(images)
    messages = []
    for message in example.messages[:-1]:
        content = message["content"]
        if isinstance(content, list):
            content = [{"type": "image_url", "image_url": {"url": next(urls)}} if p["type"] == "image" else p
                       for p in content]  # fmt: skip
        messages.append({"role": message["role"], "content": content})
    body: dict[str, Any] = {"messages": messages}
    if example.tools:
        body["tools"] = example.tools
    body |= {"max_tokens": LIMITS[example.skill], "temperature": 0}
    if example.thinking:
        body["chat_template_kwargs"] = {"enable_thinking": True}
    return {
        "custom_id": f"{group}-{number:03d}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
        "eval": {"expected": example.expected, "match": example.match, "group": group},
    }


def png(image: Image.Image, colours: int = 64) -> bytes:
    """A small PNG: few colours, best compression."""
    out = io.BytesIO()
    image.quantize(colours).save(out, "PNG", optimize=True)
    return out.getvalue()


def text_lines() -> list[dict]:
    """The text job, its skills in turn."""
    made: dict[str, list[dict]] = {}
    for skill, count in TEXT.items():
        rng = random.Random(f"{SEED}/{skill}")
        made[skill] = [line(SCORED[skill](rng, TEST, 1.0), i, skill, []) for i in range(count)]
    return [made[skill][i] for i in range(max(TEXT.values())) for skill in TEXT if i < TEXT[skill]]


def photo(rng: random.Random) -> tuple[Example, Image.Image]:
    """A count over an image of 640 x 480, which the processor scales down."""
    scene = fresh(rng, TEST, lambda: scenes.make_scene(rng, TEST, 3, 1.0))
    scene = scenes.Scene(scene.figures, scene.ground, (640, 480), True, scene.shade)
    question = [{"type": "image"}, {"type": "text", "text": "How many figures are there?"}]
    messages: list[dict] = [{"role": "user", "content": question}, {"role": "assistant", "content": "3"}]
    return Example("count", messages, "3"), scenes.draw(scene)


def vision_lines() -> tuple[list[dict], dict[str, bytes]]:
    """The image job with text lines mixed in, and its image files."""
    lines, files = [], {}
    for skill, count in VISION.items():
        rng = random.Random(f"{SEED}/{skill}")
        for i in range(count):
            example = SCORED[skill](rng, TEST, 1.0)
            data = png(example.images[0])
            if i % 12 == 5:
                url = "data:image/png;base64," + base64.b64encode(data).decode()
            else:
                url = f"images/{skill}-{i:03d}.png"
                files[url] = data
            lines.append((i, line(example, i, skill, [url])))
    example, image = photo(random.Random(f"{SEED}/photo"))
    files["images/photo.png"] = png(image)
    lines.append((13, line(example, VISION["count"], "count", ["images/photo.png"])))
    rng = random.Random(f"{SEED}/text")
    for i in range(2 * len(MIXED_IN)):
        example = SCORED[MIXED_IN[i % len(MIXED_IN)]](rng, TEST, 1.0)
        lines.append((2 * i + 1, line(example, i, "text", [])))
    lines.sort(key=lambda pair: pair[0])
    return [entry for _, entry in lines], files


def write(folder: Path) -> None:
    """Write the job files and their images."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    vision, files = vision_lines()
    for name, lines in (("eval.jsonl", text_lines()), ("vision.jsonl", vision)):
        text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in lines)
        (folder / name).write_text(text, encoding="utf-8")
    for name, data in files.items():
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
