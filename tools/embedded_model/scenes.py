"""The image skills: scenes of coloured figures, drawn with Pillow, and questions about them."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from tools.embedded_model.skills import Example, Skill, assistant, system, user
from tools.embedded_model.talk import filler, name
from tools.embedded_model.words import TEST, fresh

SHAPES = ["circle", "square", "triangle", "star", "cross", "ring"]
PAINT = {
    "red": (220, 40, 40), "green": (40, 160, 70), "blue": (40, 80, 220), "yellow": (245, 220, 50),
    "orange": (250, 140, 20), "purple": (130, 50, 170), "pink": (250, 150, 190),
    "black": (20, 20, 20), "white": (250, 250, 250), "brown": (125, 75, 35),
}  # fmt: skip
GROUNDS = {"white": (255, 255, 255), "black": (0, 0, 0), "gray": (200, 200, 200), "cream": (250, 240, 215),
           "sky": (205, 230, 250), "dark": (60, 65, 75), "mint": (215, 240, 220)}  # fmt: skip
_UNSEEN = {"white": ("white", "cream", "sky", "mint"), "black": ("black", "dark"), "brown": ("dark",)}


@dataclass(frozen=True)
class Figure:
    """One figure; the centre and the radius are fractions of the image."""

    shape: str
    colour: str
    x: float
    y: float
    r: float
    turn: float


@dataclass(frozen=True)
class Scene:
    """Figures on a ground."""

    figures: tuple[Figure, ...]
    ground: str
    size: tuple[int, int]
    smooth: bool
    shade: int


def _corners(figure: Figure, cx: float, cy: float, r: float) -> list[tuple[float, float]]:
    """The outline of a figure that is a polygon."""
    turn = figure.turn
    if figure.shape == "square":
        rays = [(math.pi / 4 + i * math.pi / 2, 1.0) for i in range(4)]
    elif figure.shape == "triangle":
        rays = [(-math.pi / 2 + i * 2 * math.pi / 3, 1.1) for i in range(3)]
    elif figure.shape == "star":
        rays = [(-math.pi / 2 + i * math.pi / 5, 1.12 if i % 2 == 0 else 0.46) for i in range(10)]
    else:
        w = math.atan2(0.3, 1.0)
        rays = []
        for i in range(4):
            a = i * math.pi / 2
            rays += [(a - w, math.hypot(1, 0.3)), (a + w, math.hypot(1, 0.3)),
                     (a + math.pi / 4, 0.3 * math.sqrt(2))]  # fmt: skip
    return [(cx + r * k * math.cos(a + turn), cy + r * k * math.sin(a + turn)) for a, k in rays]


def draw(scene: Scene) -> Image.Image:
    """Paint a scene."""
    scale = 2 if scene.smooth else 1
    width, height = scene.size[0] * scale, scene.size[1] * scale
    shade = random.Random(scene.shade)

    def tint(colour: tuple[int, int, int]) -> tuple[int, ...]:
        return tuple(max(0, min(255, c + shade.randint(-14, 14))) for c in colour)

    image = Image.new("RGB", (width, height), GROUNDS[scene.ground])
    pen = ImageDraw.Draw(image)
    for f in scene.figures:
        cx, cy, r = f.x * width, f.y * height, f.r * min(width, height)
        fill = tint(PAINT[f.colour])
        if f.shape in ("circle", "ring"):
            pen.ellipse((cx - r, cy - r, cx + r, cy + r), fill=fill)
            if f.shape == "ring":
                q = r * 0.55
                pen.ellipse((cx - q, cy - q, cx + q, cy + q), fill=GROUNDS[scene.ground])
        else:
            pen.polygon(_corners(f, cx, cy, r), fill=fill)
    return image.resize(scene.size, Image.Resampling.BOX) if scale > 1 else image


def _size(rng: random.Random, split: str, wide: bool) -> tuple[int, int]:
    kind = rng.random()
    if wide and kind < 0.5:
        return rng.randint(64, 360), rng.randint(64, 360)
    if split == TEST or kind < 0.5:
        return (128, 128) if rng.random() < 0.7 else (96, 96)
    if kind < 0.9:
        return rng.randint(80, 200), rng.randint(80, 200)
    return rng.choice(((320, 240), (256, 256), (240, 320), (300, 200)))


def _place(rng: random.Random, count: int) -> list[tuple[float, float, float]]:
    """Centres and radii of figures that do not touch: one a cell of a loose grid."""
    columns, rows = (1, 1) if count == 1 else (2, 2) if count <= 4 and rng.random() < 0.5 else (3, 3)
    cells = rng.sample([(c, r) for c in range(columns) for r in range(rows)], count)
    side = 1 / columns
    places = []
    for column, row in cells:
        r = rng.uniform(0.11, 0.38) if columns == 1 else rng.uniform(0.3, 0.4) * side
        free = max(0.0, side / 2 - r * 1.15)
        places.append(((column + 0.5) * side + rng.uniform(-free, free),
                       (row + 0.5) * side + rng.uniform(-free, free), r))  # fmt: skip
    return places


def _scatter(rng: random.Random, count: int) -> list[tuple[float, float, float]]:
    """Centres and radii of figures that do not touch, anywhere."""
    places: list[tuple[float, float, float]] = []
    for _ in range(400):
        r = rng.uniform(0.08, 0.3 if count < 4 else 0.17)
        x, y = rng.uniform(r, 1 - r), rng.uniform(r, 1 - r)
        if all(math.hypot(x - px, y - py) > 1.15 * (r + pr) for px, py, pr in places):
            places.append((x, y, r))
        if len(places) == count:
            return places
    return _place(rng, count)


def make_scene(rng: random.Random, split: str, count: int, spread: float, wide: bool = False) -> Scene:
    """A scene of ``count`` figures; ``spread`` is how often shapes and colours differ."""

    def make() -> Scene:
        ground = rng.choice(list(GROUNDS)) if rng.random() < 0.5 else "white"
        colours = [c for c in PAINT if ground not in _UNSEEN.get(c, ())]
        shape, colour = rng.choice(SHAPES), rng.choice(colours)
        figures = []
        scatter = wide and rng.random() < 0.6
        for x, y, r in (_scatter if scatter else _place)(rng, count):
            if rng.random() < spread:
                shape = rng.choice(SHAPES)
            if rng.random() < spread:
                colour = rng.choice(colours)
            turn = rng.uniform(-0.2, 0.2)
            figures.append(Figure(shape, colour, round(x, 3), round(y, 3), round(r, 3), round(turn, 2)))
        return Scene(
            tuple(figures), ground, _size(rng, split, wide), rng.random() < 0.6, rng.randrange(10**6)
        )

    return fresh(rng, split, make)


def plural(count: int, noun: str) -> str:
    """A number with its noun."""
    many = noun + ("es" if noun.endswith("ss") else "s")
    return f"{count} {noun if count == 1 else many}"


def many(shape: str) -> str:
    """The plural of a shape."""
    return plural(2, shape)[2:]


def ask_colour(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    """The colour of the only figure of its shape."""
    shapes = Counter(f.shape for f in scene.figures)
    only = [f for f in scene.figures if shapes[f.shape] == 1]
    if not only:
        return None
    figure = rng.choice(only)
    forms = ["What colour is the {s}?", "What color is the {s}?", "Which colour has the {s}?",
             "The colour of the {s}?", "Tell me the colour of the {s}."]  # fmt: skip
    if len(scene.figures) == 1:
        forms += ["What colour is it?", "What colour is the figure?", "What color is this?",
                  "Which colour do you see?", "What colour is the shape?"]  # fmt: skip
    return rng.choice(forms).format(s=figure.shape), figure.colour


def ask_shape(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    """The shape of the only figure of its colour."""
    colours = Counter(f.colour for f in scene.figures)
    only = [f for f in scene.figures if colours[f.colour] == 1]
    if not only:
        return None
    figure = rng.choice(only)
    forms = ["What shape is the {c} figure?", "Which shape is {c}?", "What is {c}?",
             "What is the {c} thing?", "Name the {c} shape."]  # fmt: skip
    if len(scene.figures) == 1:
        forms += ["What shape is this?", "Which shape do you see?", "What is in the image?",
                  "What figure is this?", "What is the shape?"]  # fmt: skip
    return rng.choice(forms).format(c=figure.colour), figure.shape


def ask_count(rng: random.Random, scene: Scene) -> tuple[str, str]:
    """How many figures: all, of a shape, or of a colour."""
    figures, kind = scene.figures, rng.random()
    if kind < 0.55:
        forms = ["How many figures are there?", "How many shapes are in the image?", "Count the figures.",
                 "How many figures do you see?", "How many things are in the picture?"]  # fmt: skip
        return rng.choice(forms), str(len(figures))
    if kind < 0.8:
        shape = rng.choice(figures).shape if rng.random() < 0.85 else rng.choice(SHAPES)
        forms = ["How many {s} are there?", "Count the {s}.", "How many {s} do you see?"]
        return rng.choice(forms).format(s=many(shape)), str(sum(f.shape == shape for f in figures))
    colour = rng.choice(figures).colour if rng.random() < 0.85 else rng.choice(list(PAINT))
    forms = ["How many {c} figures are there?", "Count the {c} figures.", "How many figures are {c}?"]
    return rng.choice(forms).format(c=colour), str(sum(f.colour == colour for f in figures))


def ask_is(rng: random.Random, scene: Scene) -> tuple[str, str]:
    """Whether a figure of a colour and a shape is there."""
    figure = rng.choice(scene.figures)
    shape, colour = figure.shape, figure.colour
    if rng.random() < 0.5:
        shape, colour = rng.choice(((shape, rng.choice(list(PAINT))), (rng.choice(SHAPES), colour)))
    there = any((f.shape, f.colour) == (shape, colour) for f in scene.figures)
    article = "an" if colour[0] in "aeiou" else "a"
    return f"Is there {article} {colour} {shape}?", "yes" if there else "no"


def ask_all(rng: random.Random, scene: Scene) -> tuple[str, str]:
    """Everything, in the order of the colours and shapes above."""
    groups = Counter((f.colour, f.shape) for f in scene.figures)
    order = sorted(groups, key=lambda g: (list(PAINT).index(g[0]), SHAPES.index(g[1])))
    parts = [plural(groups[g], f"{g[0]} {g[1]}") for g in order]
    text = ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0]
    forms = ["Describe the image.", "What do you see?", "Describe this picture.", "List the figures."]
    return rng.choice(forms), text + "."


def shown(question: str, rng: random.Random) -> dict:
    """A user turn with the image and the question, in either order."""
    parts = [{"type": "image"}, {"type": "text", "text": question}]
    return user(parts if rng.random() < 0.8 else parts[::-1])


def _scene_for(rng: random.Random, split: str, kind: str, wide: bool) -> tuple[Scene, str, str]:
    """A scene with a question of a kind, and the answer."""
    while True:
        count = rng.choice((1, 1, 2, 3, 4) if kind in ("colour", "shape") else (1, 2, 3, 4, 5, 6))
        scene = make_scene(rng, split, count, rng.choice((0.0, 0.4, 1.0)), wide)
        answer = _ASK[kind](rng, scene)
        if answer:
            return scene, *answer


_ASK = {"colour": ask_colour, "shape": ask_shape, "count": ask_count, "is": ask_is, "all": ask_all}
_LEADS = ["You are a helpful assistant.", "Be brief.", "You look at images.", "Answer in one word."]


def image_skill(kind: str) -> Skill:
    """The skill of one kind of question."""

    def skill(rng: random.Random, split: str, reach: float = 1.0) -> Example:
        scene, question, answer = _scene_for(rng, split, kind, reach > 1)
        messages = []
        if rng.random() < 0.2:
            messages.append(system(rng.choice(_LEADS)))
        if rng.random() < 0.15:
            messages += filler(rng, split)
        messages += [shown(question, rng), assistant(answer)]
        return Example(kind, messages, answer, images=[draw(scene)])

    return skill


colour, shape, count = image_skill("colour"), image_skill("shape"), image_skill("count")


def look(rng: random.Random, split: str, reach: float = 1.0) -> Example:
    """Several turns: questions about one image or two, with text turns between them."""
    messages, images = [], []
    for _ in range(1 if rng.random() < 0.75 else 2):
        kind = rng.choice(list(_ASK))
        scene, question, answer = _scene_for(rng, split, kind, reach > 1)
        images.append(draw(scene))
        if rng.random() < 0.25:
            messages += filler(rng, split)
        messages += [shown(question, rng), assistant(answer)]
        for _ in range(rng.choice((0, 1, 2, 3))):
            if rng.random() < 0.25:
                messages += filler(rng, split)
            more = _ASK[rng.choice(list(_ASK))](rng, scene)
            if more:
                messages += [user(more[0]), assistant(more[1])]
    if rng.random() < 0.15:
        reported = name(rng, split)
        half = len(reported.messages) - 2
        messages = reported.messages[:half] + messages + reported.messages[half:]
    elif rng.random() < 0.15:
        messages.insert(0, system("Answer in capital letters."))
        for m in messages:
            if m["role"] == "assistant":
                m["content"] = m["content"].upper()
    return Example("look", messages, messages[-1]["content"], images=images)


def patches(image: Image.Image, patch: int = 16, low: int = 9216, high: int = 16384) -> Any:
    """The image as the processor cuts it: uint8 rows of (3, patch, patch), and its grid."""
    factor = patch * 2
    height, width = image.height, image.width
    h, w = round(height / factor) * factor, round(width / factor) * factor
    if h * w > high:
        beta = math.sqrt(height * width / high)
        h = max(factor, math.floor(height / beta / factor) * factor)
        w = max(factor, math.floor(width / beta / factor) * factor)
    elif h * w < low:
        beta = math.sqrt(low / (height * width))
        h = math.ceil(height * beta / factor) * factor
        w = math.ceil(width * beta / factor) * factor
    if (w, h) != image.size:
        image = image.resize((w, h), Image.Resampling.BICUBIC)
    pixels = np.asarray(image).transpose(2, 0, 1)
    gh, gw = h // patch, w // patch
    cut = pixels.reshape(3, gh // 2, 2, patch, gw // 2, 2, patch)
    return cut.transpose(1, 4, 2, 5, 0, 3, 6).reshape(gh * gw, 3 * patch * patch), (gh, gw)
