"""The embedded model: its files, its template, its answers, and the data that it was made from."""

from __future__ import annotations

import filecmp
import json
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_vlm
import pytest
from PIL import Image

from tools.embedded_model import make_jobs, mix, pack, scenes, skills, talk, tool_calls, words
from tools.embedded_model.render import render
from tools.embedded_model.score import Runner, matches
from tools.embedded_model.skills import Example, assistant, system, user

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "mlxrun" / "model" / "embedded" / "model"
JOBS = ROOT / "jobs"
WEATHER = tool_calls.offer(random.Random(0), tool_calls.TOOLS[0]).schema


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(MODEL)


def ask(runner: Runner, messages: list[dict], images: list | None = None, **more: Any) -> str:
    example = Example("any", [*messages, assistant("")], "", images=images or [], **more)
    return runner.answer(runner.prompt(example), example.images)


def test_size_and_vocabulary(runner: Runner) -> None:
    assert sum(f.stat().st_size for f in MODEL.iterdir()) <= 8_000_000
    config = json.loads((MODEL / "config.json").read_text())
    assert len(runner.tokenizer) == config["text_config"]["vocab_size"] == 2048
    assert runner.tokenizer.eos_token == "<|im_end|>"
    assert runner.end in json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"]


def test_digits_and_markup_are_single_tokens(runner: Runner) -> None:
    assert len(runner.tokenizer.encode("40213")) == 5
    for token in ("<|im_start|>", "<|image_pad|>", "<think>", "</think>", "<tool_call>", "</tool_call>"):
        assert len(runner.tokenizer.encode(token)) == 1
    kept = runner.tokenizer.decode(runner.tokenizer.encode("<think>a</think>"), skip_special_tokens=True)
    assert kept == "<think>a</think>"


@pytest.mark.parametrize("skill", [*mix.SCORED, "mixed"])
def test_render_is_the_chat_template(runner: Runner, skill: str) -> None:
    rng = random.Random(f"template/{skill}")
    for split in (words.TRAIN, words.TEST):
        for reach in (0.2, 2.0 if split == words.TRAIN else 1.0):
            example = mix.SCORED.get(skill, mix.mixed)(rng, split, reach)
            for prompt in (False, True):
                messages = example.messages[:-1] if prompt else example.messages
                expected = runner.tokenizer.apply_chat_template(
                    messages, tools=example.tools, tokenize=False, add_generation_prompt=prompt,
                    enable_thinking=example.thinking)  # fmt: skip
                assert render(messages, example.tools, example.thinking, prompt) == expected


def test_template_takes_openai_parts_and_results(runner: Runner) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": {"city": "Rome"}}}
    messages: list[dict] = [
        system("Be brief."),
        user([{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "What?"}]),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "one", "tool_call_id": "1"},
        {"role": "tool", "content": "two", "tool_call_id": "2"},
    ]
    text = runner.tokenizer.apply_chat_template(
        messages, tools=[WEATHER], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert json.dumps(WEATHER) in text
    assert "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n" in text
    assert '<tool_call>\n{"name": "clock", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>' in text
    assert text.count("<|im_start|>user") == 2
    assert text.endswith("\n<tool_response>\ntwo\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_mlx_vlm_generate_answers_about_an_image(runner: Runner, tmp_path: Path) -> None:
    scene = scenes.make_scene(random.Random(5), words.TEST, 3, 1.0)
    scenes.draw(scene).save(tmp_path / "scene.png")
    example = Example(
        "count", [scenes.shown("How many figures are there?", random.Random(1)), assistant("3")], "3"
    )
    result = mlx_vlm.generate(
        runner.model,
        runner.processor,
        runner.prompt(example),
        image=[str(tmp_path / "scene.png")],
        max_tokens=8,
    )
    assert result.text.strip() == "3"


def test_a_large_image_is_scaled_down(runner: Runner) -> None:
    scene = scenes.make_scene(random.Random(6), words.TEST, 1, 1.0)
    image = scenes.draw(scenes.Scene(scene.figures, scene.ground, (640, 480), True, scene.shade))
    processed = runner.processor.image_processor(images=[image])
    assert processed["image_grid_thw"].prod() // 4 <= 16
    question = [{"type": "image"}, {"type": "text", "text": "What colour is it?"}]
    assert ask(runner, [user(question)], [image]) == scene.figures[0].colour


@pytest.mark.parametrize("size", [(128, 128), (96, 96), (640, 480), (50, 70), (300, 40)])
def test_training_and_serving_cut_images_alike(runner: Runner, size: tuple[int, int]) -> None:
    image = Image.effect_noise(size, 90).convert("RGB")
    rows, grid = scenes.patches(image)
    processed = runner.processor.image_processor(images=[image])
    assert tuple(processed["image_grid_thw"][0]) == (1, *grid)
    frames = processed["pixel_values"].reshape(len(rows), 3, 2, 256)
    for frame in range(2):
        assert abs(frames[:, :, frame].reshape(len(rows), -1) - (rows / 127.5 - 1)).max() < 1e-5


def test_packed_positions_are_the_models_own(runner: Runner) -> None:
    encoder = pack.Encoder(MODEL)
    example = scenes.look(random.Random(3), words.TRAIN)
    ids, positions, *_ = encoder.encode(example)
    text = runner.tokenizer.apply_chat_template(example.messages, tokenize=False)
    inputs = runner.processor(text=[text], images=example.images)
    assert inputs["input_ids"].tolist()[0] == ids.tolist()
    found, _ = runner.model.language_model.get_rope_index(inputs["input_ids"], inputs["image_grid_thw"])
    assert found[:, 0].tolist() == positions.tolist()


def test_answers(runner: Runner) -> None:
    assert ask(runner, [user("What is 47 + 38?")]) == "85"
    assert ask(runner, [system("Answer in capital letters."), user("hello")]).isupper()
    called = ask(runner, [user("How is the weather in Oslo?")], tools=[WEATHER])
    assert '{"name": "' + WEATHER["function"]["name"] + '"' in called
    assert "Oslo" in called
    reasoning = ask(runner, [user("What is 31 + 45 - 20?")], thinking=True)
    assert reasoning.startswith("<think>\n")
    assert reasoning.endswith("</think>\n\n56")


def test_recall_reaches_through_a_long_list(runner: Runner) -> None:
    rng = random.Random(8)
    pairs = {
        f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)}": rng.randint(1000, 9999)
        for _ in range(130)
    }
    key = list(pairs)[20]
    text = "\n".join(f"{k}: {v}" for k, v in pairs.items())
    assert 1000 < len(runner.tokenizer.encode(text)) < 1500
    messages = [user(text), assistant("Noted."), user(f"What is the value of {key}?")]
    assert ask(runner, messages) == str(pairs[key])


def test_the_splits_are_disjoint() -> None:
    seen: dict[str, set] = {words.TRAIN: set(), words.TEST: set()}
    for split, found in seen.items():
        rng = random.Random(f"split/{split}")
        for _ in range(3000):
            found.add(("add", *sorted(skills.sum_pair(rng, split))))
            found.add(("sub", *skills.difference_pair(rng, split)))
            name = talk.name(rng, split)
            found.add(("told", name.expected))
            table = skills.recall(rng, split, 0.1)
            found.add(("recall", table.messages[-2]["content"][-40:], table.expected))
    assert not {f for f in seen[words.TRAIN] & seen[words.TEST] if f[0] != "recall"}
    assert all(words.is_held_out(f) for f in seen[words.TEST] if f[0] in ("add", "sub"))
    assert len({f for f in seen[words.TEST] if f[0] == "add"}) > 300


def test_matches_as_the_job_files_say() -> None:
    assert matches(" 7\n", "7", "exact")
    assert matches("Your name is Ada.", "Ada", "contains")
    assert matches("<think>\n1 + 1 = 2\n</think>\n\n-2", -2, "number")
    assert matches(
        '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>', {"name": "a", "arguments": {}}, "json"
    )
    assert not matches("{'name'}", {"name": 1}, "json")


def test_job_files_are_what_the_recipe_writes(tmp_path: Path) -> None:
    make_jobs.write(tmp_path)
    names = sorted(str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*") if f.is_file())
    committed = [JOBS / "eval.jsonl", JOBS / "vision.jsonl", *(JOBS / "images").rglob("*.png")]
    assert names == sorted(str(f.relative_to(JOBS)) for f in committed)
    for name in names:
        if name.endswith(".png"):  # the bytes depend on Pillow's zlib, the pixels do not
            with Image.open(tmp_path / name) as a, Image.open(JOBS / name) as b:
                assert a.convert("RGB").tobytes() == b.convert("RGB").tobytes()
    assert filecmp.cmp(tmp_path / "eval.jsonl", JOBS / "eval.jsonl", shallow=False)
    old, new = ((f / "vision.jsonl").read_text().splitlines() for f in (JOBS, tmp_path))
    assert len(old) == len(new)
    assert all(a == b for a, b in zip(old, new, strict=True) if "data:image" not in a)


def test_job_files_have_what_they_should() -> None:
    groups: dict[str, int] = {}
    ids: set[str] = set()
    for name in ("eval.jsonl", "vision.jsonl"):
        for text in (JOBS / name).read_text().splitlines():
            line = json.loads(text)
            ids.add(f"{name} {line['custom_id']}")
            groups[line["eval"]["group"]] = groups.get(line["eval"]["group"], 0) + 1
    assert len(ids) == sum(groups.values())
    assert set(groups) == {*make_jobs.TEXT, *make_jobs.VISION, "text"}
    assert all(groups[g] >= 30 for g in make_jobs.TEXT)
    assert sum(groups[g] for g in make_jobs.VISION) >= 72
    assert sum(f.stat().st_size for f in (JOBS / "images").iterdir()) < 1_000_000


def test_floats_are_what_the_runner_runs(runner: Runner) -> None:
    assert runner.model.language_model.model.embed_tokens.weight.dtype == mx.float32
