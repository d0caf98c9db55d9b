"""Measures a suite of `mlxrun eval` beside lm-evaluation-harness on mlxrun and on transformers.

    python -m benchmarks.eval_speed --out benchmarks/results/eval-speed-cpu.json \\
        --harness-python PYTHON --transformers-python PYTHON

The three sides get the same texts: `choices` are questions behind five examples, each with four answers whose
likelihood decides; `answers` are questions behind eight examples, answered with 48 tokens. A side is one
process that does both. They take turns, and each is run with two rows besides, which is its time to start.
The model has float32 weights, so that all sides can be compared row by row.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serve_peers import read_versions
from mlxrun.cli.bench.models import PRESETS, write_chat_model
from mlxrun.cli.bench.report import add_provenance

# SmolLM2-135M's width and depth.
SHAPE: Mapping[str, Any] = PRESETS["tiny"] | {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
}
WORDS = (
    "red",
    "blue",
    "round",
    "heavy",
    "old",
    "quiet",
    "river",
    "house",
    "garden",
    "number",
    "letter",
    "winter",
)
TASKS = ("choices", "answers")
START_ROWS = 2


@dataclass(frozen=True, slots=True)
class Side:
    """One way to run both tasks. `{folder}`, `{rows}` and `{out}` in a command are filled in for each run."""

    name: str
    command: tuple[str, ...]
    shown: str
    versions: Mapping[str, str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all sides in turns, and write the report."""
    options = _parse_options(arguments)
    with tempfile.TemporaryDirectory(prefix="mlxrun-eval-speed-") as name:
        folder = Path(name)
        if options.model is None:
            write_chat_model(folder / "model", SHAPE)
        else:
            (folder / "model").symlink_to(options.model.resolve())
        _write_tasks(folder, options.rows)
        sides = list(_list_sides(options))
        starts = {side.name: [_run_side(side, folder, START_ROWS)[0]] for side in sides}
        wholes: dict[str, list[float]] = {side.name: [] for side in sides}
        answers: dict[str, list[Any]] = {}
        for _ in range(options.repeat):
            for side in sides:
                starts[side.name].append(_run_side(side, folder, START_ROWS)[0])
                seconds, answers[side.name] = _run_side(side, folder, options.rows)
                wholes[side.name].append(seconds)
                print(f"{side.name}: {seconds:.1f} s", file=sys.stderr, flush=True)
    report = _build_report(options, sides, starts, wholes, answers)
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eval_speed", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--model", type=Path, help="folder with float32 weights; default: random ones")
    parser.add_argument("--harness-python", type=os.path.abspath, help="interpreter with lm-eval and mlxrun")
    parser.add_argument(
        "--transformers-python", type=os.path.abspath, help="interpreter with lm-eval, torch and transformers"
    )
    parser.add_argument("--batch", type=int, default=16, help="batch size of the side with transformers")
    parser.add_argument("--rows", type=int, default=100, help="rows of each task")
    parser.add_argument("--repeat", type=int, default=3, help="rounds")
    return parser.parse_args(arguments)


def _list_sides(options: argparse.Namespace) -> Iterator[Side]:
    run = "import sys; from mlxrun.cli.main import main; sys.exit(main())"
    suite = ("eval", "{folder}/suite.yaml", "--output", "{out}", "--limit", "{rows}")
    yield Side(
        "suite",
        (sys.executable, "-c", run, *suite),
        "mlxrun eval suite.yaml",
        read_versions(sys.executable),
    )
    tasks = ("--tasks", ",".join(f"speed_{task}" for task in TASKS), "--include_path", "{folder}")
    rest = (*tasks, "--limit", "{rows}", "--output_path", "{out}", "--log_samples")
    if options.harness_python:
        yield Side(
            "lm-eval on mlxrun",
            (
                options.harness_python,
                "-m",
                "mlxrun.evals.harnesses.lm_eval_command",
                "--model",
                "mlxrun",
                "--model_args",
                "pretrained={folder}/model",
                *rest,
            ),
            "mlxrun-lm-eval --model mlxrun --model_args pretrained=MODEL",
            read_versions(options.harness_python),
        )
    if options.transformers_python:
        arguments = "pretrained={folder}/model,dtype=float32"
        size = ("--device", "cpu", "--batch_size", str(options.batch))
        yield Side(
            "lm-eval on transformers",
            (
                options.transformers_python,
                "-m",
                "lm_eval",
                "--model",
                "hf",
                "--model_args",
                arguments,
                *size,
                *rest,
            ),
            f"lm_eval --model hf --model_args pretrained=MODEL,dtype=float32 {shlex.join(size)}",
            read_versions(options.transformers_python),
        )


def _write_tasks(folder: Path, rows: int) -> None:
    """Write the rows, a suite, and two tasks of the harness that read them."""
    source = random.Random(0)
    examples = [_write_question(source) for _ in range(8)]
    shown = "\n\n".join(
        f"Question: {question}\nAnswer: {source.choice(given)}" for question, given in examples[:5]
    )
    longer = "\n\n".join(f"Q: {question}\nA: {' '.join(given)}" for question, given in examples)
    choices, answers = [], []
    for _ in range(rows):
        question, given = _write_question(source)
        row = {
            "text": f"{shown}\n\nQuestion: {question}\nAnswer:",
            "choices": given,
            "label": source.randrange(4),
        }
        choices.append(row)
        answers.append({"text": f"{longer}\n\nQ: {question}\nA:", "target": source.choice(WORDS)})
    for name, found in (("choices", choices), ("answers", answers)):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    (folder / "suite.yaml").write_text(SUITE.replace("FOLDER", str(folder)), encoding="utf-8")
    for name, own in HARNESS.items():
        text = HARNESS_HEAD.replace("NAME", name).replace("FOLDER", str(folder)) + own
        (folder / f"speed_{name}.yaml").write_text(text, encoding="utf-8")


SUITE = """\
models: {model: {set: {model.path: FOLDER/model, sampling.temperature: 0}}}
tasks:
  choices: {data: choices.jsonl, prompt: "{{ text }}", choices: "{{ choices }}", expected: label}
  answers: {data: answers.jsonl, prompt: "{{ text }}", endpoint: completion, expected: target,
    match: contains, generation: {max_tokens: 48, temperature: 0, stop: ["Q:"]}}
"""
HARNESS_HEAD = """\
task: speed_NAME
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/NAME.jsonl}}
test_split: test
doc_to_text: "{{text}}"
"""
HARNESS = {
    "choices": """\
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: label
metric_list: [{metric: acc}]
""",
    "answers": """\
output_type: generate_until
doc_to_target: target
metric_list: [{metric: exact_match}]
generation_kwargs: {until: ["Q:"], max_gen_toks: 48, do_sample: false}
""",
}


def _write_question(source: random.Random) -> tuple[str, list[str]]:
    """Some thirty words, and four answers of three to eight."""
    question = " ".join(source.choices(WORDS, k=30))
    return f"Which of these is the {question}?", [
        " ".join(source.choices(WORDS, k=source.randint(3, 8))) for _ in range(4)
    ]


def _run_side(side: Side, folder: Path, rows: int) -> tuple[float, list[Any]]:
    """Seconds of the whole command, and each row's answer: the likeliest choice, or a text."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        values = {"folder": str(folder), "rows": str(rows), "out": out}
        command = [part.format(**values) if "{" in part else part for part in side.command]
        variables = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HOME": str(folder),
        }
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=folder)
        seconds = time.perf_counter() - start
        if done.returncode:
            raise SystemExit(f"{side.name} failed:\n{(done.stdout + done.stderr)[-3000:]}")
        found = _read_suite(Path(out)) if side.name == "suite" else _read_samples(Path(out))
    if len(found) != len(TASKS) * rows:
        raise SystemExit(f"{side.name}: {len(found)} answers in place of {len(TASKS) * rows}")
    return seconds, found


def _read_suite(out: Path) -> list[Any]:
    found: list[Any] = []
    for task in TASKS:
        path = out / "model" / task / "seed-0" / "job.out.jsonl"
        rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        for row in sorted(rows, key=lambda row: int(row["custom_id"].removeprefix("row-"))):
            text = row["response"]["body"]["choices"][0]["text"].strip()
            found.append(text if task == "answers" else row["eval"]["extracted"])
    return found


def _read_samples(out: Path) -> list[Any]:
    found: list[Any] = []
    for task in TASKS:
        path = next(out.rglob(f"samples_speed_{task}_*.jsonl"))
        rows = sorted(
            map(json.loads, path.read_text(encoding="utf-8").splitlines()), key=lambda row: row["doc_id"]
        )
        for row in rows:
            resps = [each[0] for each in row["resps"]]
            if task == "answers":
                found.append(resps[0].strip())
            else:
                found.append(max(range(4), key=lambda at: float(resps[at][0])))
    return found


def _build_report(
    options: argparse.Namespace,
    sides: Sequence[Side],
    starts: Mapping[str, list[float]],
    wholes: Mapping[str, list[float]],
    answers: Mapping[str, list[Any]],
) -> dict[str, Any]:
    """A side's first start is not in its median: mlxrun compares a new model with its library then."""
    from mlxrun.model.machine.device import describe_device

    items = len(TASKS) * options.rows
    first = sides[0].name
    found: dict[str, Any] = {}
    for side in sides:
        start = statistics.median(starts[side.name][1:])
        speeds = [(items - len(TASKS) * START_ROWS) / (whole - start) for whole in wholes[side.name]]
        found[side.name] = {
            "command": side.shown,
            "versions": side.versions,
            "first_start_s": starts[side.name][0],
            "start_s": starts[side.name][1:],
            "whole_s": wholes[side.name],
            "items_per_s": statistics.median(speeds),
            "whole_items_per_s": items / statistics.median(wholes[side.name]),
            "same_as_suite": sum(a == b for a, b in zip(answers[side.name], answers[first], strict=True)),
        }
    ratios = {
        side.name: {
            "items_per_s": found[first]["items_per_s"] / found[side.name]["items_per_s"],
            "whole": found[first]["whole_items_per_s"] / found[side.name]["whole_items_per_s"],
        }
        for side in sides[1:]
    }
    report = {
        "format": 1,
        "command": _show_command(options),
        "device": describe_device(),
        "load": os.getloadavg()[0],
        "model": "135M parameters, random weights" if options.model is None else options.model.name,
        "items": items,
        "sides": found,
        "ratios": ratios,
    }
    return add_provenance(report)


def _show_command(options: argparse.Namespace) -> str:
    """The command of this script, without paths of this machine."""
    parts = ["python", "-m", "benchmarks.eval_speed", "--out", str(options.out)]
    parts += ["--harness-python", "PYTHON"] if options.harness_python else []
    parts += ["--transformers-python", "PYTHON"] if options.transformers_python else []
    parts += ["--batch", str(options.batch)] if options.transformers_python else []
    return shlex.join([*parts, "--rows", str(options.rows), "--repeat", str(options.repeat)])


if __name__ == "__main__":
    raise SystemExit(main())
