"""Draws the pictures of the suite jobs/look.yaml, with their questions: charts, receipts and screenshots, and
figures as a control.

`python -m tools.visual_eval` writes jobs/look/ anew: PNG files and three tables. The same code draws the same
pixels. The font is Pillow's own bitmap font, so that no installed font matters. What is drawn is drawn at
random, so no model has seen it. `--keep SUITE.json` writes the scores of a run to benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from mlxrun.cli.bench.report import add_provenance
from tools.embedded_model.mix import SCORED
from tools.embedded_model.words import TEST

ROOT = Path(__file__).resolve().parents[1]
COUNT = 12  # pictures of each kind
SCALE = 3  # of the font, whose letters have 11 pixels
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug")
SHOPS = ("Corner Bakery", "Green Grocer", "Book Nook", "Tool Barn", "Cafe Luna", "Paper Mill")
GOODS = ("Bread", "Apples", "Coffee", "Notebook", "Hammer", "Soap", "Candles", "Honey", "Tea", "Stamps")
NAMES = ("Iris Vale", "Tom Brook", "Nora Finch", "Sam Holt", "Lena Marsh", "Otto Reed", "Ada Quill")
OPTIONS = ("Dark mode", "Sounds", "Backups", "Updates", "Location", "Sync", "Reminders")
THINGS = ("umbrellas", "kites", "lamps", "scarves", "maps", "drums")
Row = dict[str, Any]
Drawing = tuple[Image.Image, Row]
FONT = ImageFont.load_default_imagefont()


def write_text(image: Image.Image, place: tuple[int, int], text: str, scale: int = SCALE) -> None:
    """Write dark text, its upper left corner at `place`."""
    width, height = (int(edge) for edge in FONT.getbbox(text)[2:])
    letters = Image.new("L", (width, height))
    ImageDraw.Draw(letters).text((0, 0), text, fill=255, font=FONT)
    mask = letters.resize((width * scale, height * scale), Image.Resampling.NEAREST)
    image.paste((30, 30, 40), (*place, place[0] + mask.width, place[1] + mask.height), mask)


def draw_chart(rng: random.Random) -> Drawing:
    """A bar chart with a scale. Heights are multiples of ten, and all differ."""
    image = Image.new("RGB", (640, 480), "white")
    draw, thing = ImageDraw.Draw(image), rng.choice(THINGS)
    months = MONTHS[: rng.randint(4, 6)]
    values = rng.sample(range(10, 100, 10), len(months))
    write_text(image, (150, 10), f"Sold {thing}")
    for mark in range(0, 101, 20):
        y = 420 - mark * 7 // 2
        draw.line((80, y, 620, y), fill=(210, 210, 210))
        write_text(image, (10, y - 12), str(mark), 2)
    colour = tuple(rng.randrange(40, 200) for _ in range(3))
    for at, (month, value) in enumerate(zip(months, values, strict=True)):
        x = 95 + at * 88
        draw.rectangle((x, 420 - value * 7 // 2, x + 58, 420), fill=colour)
        write_text(image, (x, 432), month)
    at = rng.randrange(len(months))
    return image, {
        "ask_number": f"How many {thing} were sold in {months[at]}? Answer with a number.",
        "number": values[at],
        "ask_name": f"In which month were the most {thing} sold? Answer with the name in the chart.",
        "name": months[values.index(max(values))],
    }


def draw_receipt(rng: random.Random) -> Drawing:
    """A receipt with three to five lines and their sum."""
    goods = rng.sample(GOODS, rng.randint(3, 5))
    cents = [rng.randint(50, 1999) for _ in goods]
    shop, total = rng.choice(SHOPS), sum(cents)
    image = Image.new("RGB", (480, 200 + 44 * len(goods)), (250, 248, 240))
    write_text(image, (60, 16), shop)
    for at, (good, price) in enumerate(zip(goods, cents, strict=True)):
        write_text(image, (24, 80 + 44 * at), good)
        write_text(image, (320, 80 + 44 * at), f"{price / 100:.2f}")
    y = 96 + 44 * len(goods)
    ImageDraw.Draw(image).line((24, y, 456, y), fill=(90, 90, 90), width=2)
    write_text(image, (24, y + 16), "TOTAL")
    write_text(image, (320, y + 16), f"{total / 100:.2f}")
    return image, {
        "ask_number": "What is the total? Answer with a number.",
        "number": total / 100,
        "ask_fields": "Answer with a JSON object: shop, items (how many lines have a price) and total.",
        "fields": {"shop": shop, "items": len(goods), "total": total / 100},
    }


def draw_screen(rng: random.Random) -> Drawing:
    """A window of settings: two fields, boxes of which some are ticked, and two buttons."""
    image = Image.new("RGB", (640, 460), (225, 228, 235))
    draw = ImageDraw.Draw(image)
    draw.rectangle((20, 20, 620, 440), fill="white", outline=(120, 120, 130), width=2)
    draw.rectangle((20, 20, 620, 66), fill=(190, 205, 230))
    write_text(image, (36, 26), "Settings")
    name, port = rng.choice(NAMES), rng.randint(1000, 9999)
    for y, label, value in ((86, "Name", name), (140, "Port", str(port))):
        write_text(image, (40, y), label)
        draw.rectangle((170, y - 4, 590, y + 38), outline=(150, 150, 160), width=2)
        write_text(image, (182, y), value)
    options = rng.sample(OPTIONS, 4)
    ticked = rng.sample(options, rng.randint(1, 3))
    for at, option in enumerate(options):
        y = 200 + at * 42
        draw.rectangle((40, y, 68, y + 28), outline=(60, 60, 70), width=2)
        if option in ticked:
            draw.line((45, y + 14, 53, y + 23, 64, y + 5), fill=(20, 110, 40), width=5)
        write_text(image, (84, y), option)
    for x, label in ((380, "Save"), (490, "Close")):
        draw.rectangle((x, 384, x + 105, 428), fill=(205, 215, 235), outline=(120, 120, 130))
        write_text(image, (x + 10, 388), label)
    return image, {
        "ask_number": "How many boxes are ticked? Answer with a number.",
        "number": len(ticked),
        "ask_name": "What is written in the field Name? Answer with that text.",
        "name": name,
    }


def draw_figures(rng: random.Random) -> Drawing:
    """Coloured figures to count, as the built-in model has learnt them, but none that it was trained on."""
    example = SCORED["count"](rng, TEST, 1.0)
    parts = next(m["content"] for m in example.messages if isinstance(m["content"], list))
    question = next(part["text"] for part in parts if part["type"] == "text")
    return example.images[0].convert("RGB"), {"ask_number": question, "number": int(example.expected)}


KINDS: dict[str, Callable[[random.Random], Drawing]] = {
    "charts": draw_chart,
    "receipts": draw_receipt,
    "screens": draw_screen,
    "figures": draw_figures,
}


def write_pictures(folder: Path) -> None:
    """Write all pictures, and a table of rows for each kind."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, draw in KINDS.items():
        rows = []
        for number in range(COUNT):
            image, row = draw(random.Random(f"{kind} {number}"))
            name = f"{kind}-{number:02d}.png"
            image.quantize(16).save(folder / name, "PNG", optimize=True)
            rows.append({"id": name.removesuffix(".png"), "image": name, **row})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{kind}.jsonl").write_text(lines, encoding="utf-8")


def keep_scores(suite: Path, out: Path) -> None:
    """Write the scores of a run, by model and task, as benchmarks/results has them."""
    report = json.loads(suite.read_text(encoding="utf-8"))
    scores: dict[str, dict[str, Any]] = {}
    for cell in report["cells"]:
        scores.setdefault(cell["model"], {})[cell["task"]] = pick_score(cell)
    command = "python -m tools.visual_eval --keep jobs/look.out/suite.json"
    kept = add_provenance({"format": 1, "command": command, "scores": scores})
    out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def pick_score(cell: dict[str, Any]) -> dict[str, Any]:
    """The figures of a cell that are kept."""
    total = cell["scores"]["total"]
    return {"score": total["share"], "interval": total["interval"], "lines": total["lines"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pictures, or with `--keep` the scores of a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="suite.json of a run")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/visual-eval.json")
    given = parser.parse_args(arguments)
    if given.keep is None:
        write_pictures(ROOT / "jobs/look")
    else:
        keep_scores(given.keep, given.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
