"""The lines of the test: requests that share beginnings, with all that a last digit could show in.

More than half return logprobs, of answers or of prompts, with all their digits. Some are sampled, with a seed
of their own or of the job; some have two choices, penalties, a bias or a JSON schema.
"""

from __future__ import annotations

import base64
import io
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SYSTEMS = 8  # beginnings that lines share
_TEXT = "red blue green seven eight nine cat dog bird day night sun moon one two three up down left right"
_WORDS = tuple(_TEXT.split(" "))
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
# What a line asks for besides its text, in turn.
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.9},
    {"temperature": 0, "prompt_logprobs": 1},
    {"temperature": 0.7, "top_p": 0.9, "logprobs": True},
    {"temperature": 1.0, "n": 2, "logprobs": True},
    {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0.8, "top_k": 20, "logit_bias": {"40": 2}, "logprobs": True, "top_logprobs": 1},
    {
        "temperature": 0.5,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
    },
)
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class LineWriter:
    """Writes the job of a model. `is_chat`: lines are chats, else completions, for a model without a chat
    template; `images`: every second chat has one; `more_tokens`: how much longer answers are."""

    is_chat: bool = True
    images: bool = False
    more_tokens: int = 0

    def write(self, path: Path, count: int) -> list[str]:
        """Write a job of `count` lines, and return them."""
        rng = random.Random("reproduce")
        systems = [_draw_text(rng, 24) for _ in range(SYSTEMS)]
        pictures = [_draw_image(rng) for _ in range(SYSTEMS)]
        lines = [json.dumps(self._make_line(rng, number, systems, pictures)) for number in range(count)]
        _write(path, lines)
        return lines

    def _make_line(
        self, rng: random.Random, number: int, systems: list[str], pictures: list[str]
    ) -> dict[str, Any]:
        text, system = _draw_text(rng, rng.randint(2, 9)), rng.choice(systems)
        body = {"max_tokens": 2 + number % 3 + self.more_tokens, **_KINDS[number % len(_KINDS)]}
        if self.more_tokens and "response_format" not in body:
            body["min_tokens"] = body["max_tokens"]
        if number % 3 == 0:
            body["seed"] = number
        if self.is_chat:
            image = {"type": "image_url", "image_url": {"url": rng.choice(pictures)}}
            content = [image, {"type": "text", "text": text}] if self.images and number % 2 else text
            body["messages"] = [{"role": "system", "content": system}, {"role": "user", "content": content}]
        else:
            body["prompt"] = f"{system}\n{text}"
            if body.pop("logprobs", False):
                body["logprobs"] = body.pop("top_logprobs", 0)
        url = CHAT if self.is_chat else COMPLETION
        return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}


def shuffle_lines(path: Path, lines: list[str]) -> None:
    """Write the same lines in another order."""
    _write(path, random.Random("shuffled").sample(lines, len(lines)))


def _write(path: Path, lines: list[str]) -> None:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def _draw_text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=words))


def _draw_image(rng: random.Random) -> str:
    """A small image of random blocks, as a data URL."""
    from PIL import Image

    image = Image.new("RGB", (4, 4))
    image.putdata([(rng.randrange(256), rng.randrange(256), rng.randrange(256)) for _ in range(16)])
    data = io.BytesIO()
    image.resize((32, 32), Image.Resampling.NEAREST).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
