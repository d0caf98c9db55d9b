"""Packs dialogues into training batches: one long row of tokens with the borders of its documents.

All arrays have fixed sizes, so that the compiled step never changes shape. Each worker makes
whole batches from its own seed; batch ``n`` of the run is always the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tools.embedded_model import skills
from tools.embedded_model.mix import SCORED, Mixture
from tools.embedded_model.render import render
from tools.embedded_model.scenes import patches
from tools.embedded_model.skills import Example
from tools.embedded_model.words import TEST

TOKENS, DOCS, TARGETS, PATCHES, IMAGES = 65536, 1280, 18432, 10240, 256
LONGEST, LARGEST = 2560, 512  # tokens of a document, patches of an image
SIDE = 8  # side of the learned grid of image positions
SPARE = 32  # borders kept for what is left over


class Encoder:
    """Turns an example into token ids, mRoPE positions, target flags and image patches."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        to_id = self.tokenizer.token_to_id
        self.start, self.end, self.pad = map(to_id, ("<|im_start|>", "<|im_end|>", "<|image_pad|>"))
        self.assistant = self.tokenizer.encode("assistant\n").ids
        self.plain = [i for i in range(self.tokenizer.get_vocab_size())
                      if self._is_plain(self.tokenizer.id_to_token(i))]  # fmt: skip

    @staticmethod
    def _is_plain(token: str) -> bool:
        return token.isascii() and "<" not in token or (token[0] == "Ġ" and token[1:].isascii())

    def random_text(self, rng: random.Random, count: int) -> str:
        """Text of about ``count`` random tokens."""
        return self.tokenizer.decode(rng.choices(self.plain, k=count)).strip()

    def encode(self, example: Example) -> tuple:
        """Ids with images expanded, positions [3, n], turn of each target (0: none), images, slots."""
        ids = self.tokenizer.encode(render(example.messages, example.tools, example.thinking)).ids
        cuts = [patches(image) for image in example.images]
        grids = iter([grid for _, grid in cuts])
        out: list[int] = []
        position: list[np.ndarray] = []
        at = start = 0
        for i, token in enumerate(ids):
            if token != self.pad:
                continue
            h, w = (side // 2 for side in next(grids))
            out += ids[start:i] + [self.pad] * (h * w)
            n = i - start
            position.append(np.broadcast_to(np.arange(at, at + n), (3, n)))
            at += n
            row, column = np.divmod(np.arange(h * w), w)
            position.append(np.stack([row * 0, row, column]) + at)
            at, start = at + max(h, w), i + 1
        out += ids[start:]
        position.append(np.broadcast_to(np.arange(at, at + len(ids) - start), (3, len(ids) - start)))
        tokens = np.array(out, dtype=np.int32)
        positions = np.concatenate(position, 1).astype(np.int32)
        return tokens, positions, self._turns(tokens, example), cuts, np.flatnonzero(tokens == self.pad)

    def _turns(self, ids: np.ndarray, example: Example) -> np.ndarray:
        """The number of the assistant turn that a token belongs to, counted from 1; else 0."""
        turns = np.zeros(len(ids), dtype=np.int32)
        head, number = len(self.assistant) + 1, 0
        starts = np.flatnonzero(ids == self.start)
        ends = np.flatnonzero(ids == self.end)
        for start, end in zip(starts, ends, strict=True):
            if list(ids[start + 1 : start + head]) == self.assistant:
                number += 1
                turns[start + head : end + 1] = number
        if example.thinking or example.last_only:  # earlier thoughts are not shown: no model answers so
            turns[turns != number] = 0
        return turns


def image_positions(grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each patch in merge order: its row and column, and its corners in the learned grid."""
    h, w = grid
    block = np.arange(h * w).reshape(h // 2, 2, w // 2, 2).transpose(0, 2, 1, 3).reshape(-1)
    row, column = np.divmod(block, w)
    y, x = np.linspace(0, SIDE - 1, h)[row], np.linspace(0, SIDE - 1, w)[column]
    y0, x0 = y.astype(np.int32), x.astype(np.int32)
    y1, x1 = np.minimum(y0 + 1, SIDE - 1), np.minimum(x0 + 1, SIDE - 1)
    dy, dx = y - y0, x - x0
    index = np.stack([y0 * SIDE + x0, y0 * SIDE + x1, y1 * SIDE + x0, y1 * SIDE + x1])
    weight = np.stack([(1 - dy) * (1 - dx), (1 - dy) * dx, dy * (1 - dx), dy * dx])
    return np.stack([row, column]), index, weight.astype(np.float32)


def pack(examples: list[tuple[int, tuple]], sizes: tuple[int, ...] | None = None) -> dict:
    """Lay encoded examples out in arrays of fixed size. ``examples`` are (label, encoded)."""
    tokens, docs, targets, n_patches, n_images = sizes or (TOKENS, DOCS, TARGETS, PATCHES, IMAGES)
    b = {
        "ids": np.zeros(tokens, np.int32), "pos": np.zeros((3, tokens), np.int32),
        "cu": np.full(docs + 1, tokens, np.int32), "feature": np.full(tokens, -1, np.int32),
        "target": np.zeros(targets, np.int32), "label": np.zeros(targets, np.int32),
        "weight": np.zeros(targets, np.float32), "doc": np.full(targets, -1, np.int32),
        "skill": np.full(docs, -1, np.int32), "last": np.zeros(targets, bool),
        "patches": np.zeros((n_patches, 768), np.uint8), "vcu": np.full(n_images + 1, n_patches, np.int32),
        "vpos": np.zeros((2, n_patches), np.int32), "vindex": np.zeros((4, n_patches), np.int32),
        "vweight": np.zeros((4, n_patches), np.float32),
    }  # fmt: skip
    b["cu"][0] = b["vcu"][0] = at = t = p = image = 0
    for d, (label, (ids, pos, turns, cuts, slots)) in enumerate(examples):
        n = len(ids)
        b["ids"][at : at + n], b["pos"][:, at : at + n] = ids, pos
        marked = np.flatnonzero(turns)
        k = len(marked)
        b["target"][t : t + k], b["label"][t : t + k] = at + marked - 1, ids[marked]
        size = np.bincount(turns)[turns[marked]]
        b["weight"][t : t + k] = size**-0.5
        b["doc"][t : t + k], b["skill"][d] = d, label
        b["last"][t : t + k] = turns[marked] == turns.max()
        b["feature"][at + slots] = p // 4 + np.arange(len(slots))
        for rows, grid in cuts:
            m = len(rows)
            b["patches"][p : p + m] = rows
            b["vpos"][:, p : p + m], b["vindex"][:, p : p + m], b["vweight"][:, p : p + m] = image_positions(
                grid
            )
            p, image = p + m, image + 1
            b["vcu"][image] = p
        at, t = at + n, t + k
        b["cu"][d + 1] = at
    # What is left over is documents, too, none longer than the attention kernel is told.
    d = len(examples)
    b["cu"][d:] = np.minimum(at + LONGEST * np.arange(docs + 1 - d), tokens)
    b["vcu"][image:] = np.minimum(p + LARGEST * np.arange(n_images + 1 - image), n_patches)
    return b


def reach_at(step: int, steps: int, stage: int) -> float:
    """The curriculum: in stage 1 short lists first, the full length after 30 %; then wider forms."""
    if stage == 2:
        return 2.0
    return min(1.0, 0.1 + 0.9 * step / (0.3 * steps))


def batches(folder: Path, seed: int, worker: int, workers: int, steps: int, stage: int = 1) -> Iterator[dict]:
    """Batches ``worker``, ``worker + workers``, ... of the run."""
    encoder = Encoder(folder)
    skills.random_text = encoder.random_text
    for step in range(worker, steps, workers):
        rng = random.Random(f"{seed}/{step}" if stage == 1 else f"{seed}/{stage}/{step}")
        mixture = Mixture(rng)
        chosen: list[Any] = []
        tokens = targets = n_patches = images = 0
        while len(chosen) < DOCS - SPARE:
            skill, example = mixture.draw(reach_at(step, steps, stage))
            encoded = encoder.encode(example)
            size = len(encoded[0])
            mixture.count(skill, size)
            if size > LONGEST:
                continue
            tokens, targets = tokens + size, targets + int((encoded[2] > 0).sum())
            n_patches += sum(len(rows) for rows, _ in encoded[3])
            images += len(encoded[3])
            if tokens > TOKENS - 64 or targets > TARGETS or n_patches > PATCHES or images > IMAGES - SPARE:
                break
            chosen.append((0, encoded))
        yield pack(chosen)


def held_out(folder: Path, seed: int, per_skill: int) -> Iterator[dict]:
    """Batches of held-out examples, labelled by the index of their skill."""
    encoder, rng = Encoder(folder), random.Random(f"{seed}/held out")
    for label, skill in enumerate(SCORED):
        chosen: list[Any] = []
        tokens = 0
        for _ in range(per_skill):
            encoded = encoder.encode(SCORED[skill](rng, TEST, 1.0))
            full = tokens + len(encoded[0]) > TOKENS - 64
            if full or sum(len(rows) for _, given in chosen for rows, _ in given[3]) > PATCHES - 256:
                break
            chosen.append((label, encoded))
            tokens += len(encoded[0])
        yield pack(chosen)
