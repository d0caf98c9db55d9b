"""Held-out scores of the exported model on MLX: ``python -m tools.embedded_model.score MODEL_DIR``.

Greedy, float32, through mlx-vlm's own loader, processor and cache; one request at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import random
import re
import time
from pathlib import Path
from typing import Any

from tools.embedded_model.mix import SCORED
from tools.embedded_model.skills import Example
from tools.embedded_model.words import TEST


def answer_json(text: str) -> Any:
    """The first JSON value in a text, or None."""
    for match in re.finditer(r"[\[{]", text):
        try:
            return json.JSONDecoder().raw_decode(text[match.start() :])[0]
        except ValueError:
            continue
    return None


def matches(text: str, expected: Any, match: str) -> bool:
    """Whether an answer is right, by the rules of the job files' ``eval.match``."""
    if match == "exact":
        return text.strip() == str(expected)
    if match == "contains":
        return str(expected) in text
    if match == "regex":
        return re.search(expected, text) is not None
    if match == "number":
        numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
        return bool(numbers) and abs(float(numbers[-1]) - float(expected)) <= 1e-9
    return answer_json(text) == expected


class Runner:
    """The model behind mlx-vlm, as float32."""

    def __init__(self, folder: Path) -> None:
        with contextlib.suppress(OSError):  # many times faster than the reference BLAS
            ctypes.CDLL("libopenblas.so.0", ctypes.RTLD_GLOBAL)
        import mlx.core as mx
        from mlx_vlm import load

        self.mx = mx
        self.model, self.processor = load(str(folder))
        self.model.set_dtype(mx.float32)
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        self.tokenizer, self.end = tokenizer, tokenizer.convert_tokens_to_ids("<|im_end|>")

    def prompt(self, example: Example) -> str:
        """The prompt as the model's own chat template renders it."""
        return self.tokenizer.apply_chat_template(
            example.messages[:-1], tools=example.tools, tokenize=False, add_generation_prompt=True,
            enable_thinking=example.thinking)  # fmt: skip

    def answer(self, prompt: str, images: list, limit: int = 200) -> str:
        """Greedy decoding."""
        from mlx_vlm.models.cache import make_prompt_cache
        from mlx_vlm.utils import prepare_inputs

        mx = self.mx
        inputs = prepare_inputs(self.processor, images=images or None, prompts=prompt)
        skip = ("input_ids", "pixel_values", "attention_mask")
        extra = {k: v for k, v in inputs.items() if k not in skip}
        cache = make_prompt_cache(self.model.language_model)
        mask = inputs["attention_mask"]
        f = self.model.get_input_embeddings(
            inputs["input_ids"], inputs.get("pixel_values"), mask=mask, **extra
        )
        position = f.position_ids
        if position.ndim == 2:
            position = mx.broadcast_to(position[None], (3, *position.shape))
        out = self.model.language_model(
            inputs["input_ids"], inputs_embeds=f.inputs_embeds, cache=cache, position_ids=position,
            visual_pos_masks=f.visual_pos_masks,
            deepstack_visual_embeds=f.deepstack_visual_embeds)  # fmt: skip
        at = int(position.max()) + 1
        tokens: list[int] = []
        for _ in range(limit):
            token = int(mx.argmax(out.logits[0, -1]))
            if token == self.end:
                break
            tokens.append(token)
            where = mx.full((3, 1, 1), at, dtype=mx.int32)
            out = self.model.language_model(mx.array([[token]]), cache=cache, position_ids=where)
            at += 1
        return self.tokenizer.decode(tokens)


def score(runner: Runner, skill: str, count: int, seed: int, show: int = 0) -> float:
    """Share of held-out answers that are right; ``show`` prints that many wrong ones."""
    rng = random.Random(f"{seed}/{skill}")
    right = 0
    for _ in range(count):
        example = SCORED[skill](rng, TEST, 1.0)
        text = runner.answer(runner.prompt(example), example.images)
        good = matches(text, example.expected, example.match)
        right += good
        if not good and show > 0:
            show -= 1
            question = example.messages[-2]["content"]
            print(f"  {skill}: {str(question)[-300:]!r} -> {text!r}, not {example.expected!r}", flush=True)
    return right / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print per skill")
    parser.add_argument("--skills", nargs="*", default=list(SCORED))
    args = parser.parse_args()
    runner = Runner(args.model)
    for skill in args.skills:
        begun = time.time()
        share = score(runner, skill, args.count, args.seed, args.show)
        print(f"{skill:12} {share:6.1%}  ({args.count} answers, {time.time() - begun:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
