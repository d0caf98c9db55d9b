"""Runs mlxrun's standard tasks and, beside them, lm-evaluation-harness' own ones on the same rows. Prints
what the harness asked and found for each row as JSON in its last line; mlxrun's runs stay in the folder."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import evaluate as metrics
import langdetect
import lm_eval
from lm_eval import tasks
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from mlxrun.cli.main import main as run_mlxrun
from mlxrun.evals.harnesses.lm_eval_model import LmEvalModel
from mlxrun.evals.tasks.code_sandbox import run_program
from mlxrun.evals.tasks.lm_eval_scorers import score_mmmu

HARNESS = Path(tasks.__file__).parent


class Answers(LM):
    """A model whose answers are given, one for each row."""

    def __init__(self, answers: list[str]) -> None:
        super().__init__()
        self.answers = answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return [self.answers[each.doc_id or 0] for each in requests]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> Any:
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> Any:
        raise NotImplementedError


class CodeEval:
    """Stands for the hub's metric `code_eval`, whose source there is no network for. Programs of the model
    run in mlxrun's sandbox here too; what is compared is how each of them is put together."""

    def compute(self, references: list[str], predictions: list[list[str]], k: list[int]) -> Any:
        pairs = [(each, test) for some, test in zip(predictions, references, strict=True) for each in some]
        passed = [run_program(f"{each}\n{test}") is None for each, test in pairs]
        return {"pass@1": sum(passed) / len(passed)}, None


def write_config(name: str, task: dict[str, Any], folder: Path) -> None:
    """A task that is the harness' own but for its rows, which are in files."""
    files = json.dumps(task["data"])
    lines = [f"include: {HARNESS / task['file']}", f"task: own_{name}", "dataset_path: json", "tag: null"]
    lines += ["dataset_name: null", f"dataset_kwargs: {{data_files: {files}}}"]
    if "shots" in task:
        lines.append(f"num_fewshot: {task['shots']}")
    (folder / f"{name}.yaml").write_text("\n".join(lines) + "\n")


def evaluate(model: LM, name: str, manager: TaskManager, **options: Any) -> list[dict[str, Any]]:
    """Each row with what the model is asked, its answer, and its scores: metrics, or filters if there are
    several."""
    task = f"own_{name}"
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=[task],
        task_manager=manager,
        bootstrap_iters=0,
        confirm_run_unsafe_code=True,
        **options,
    )
    rows: dict[int, dict[str, Any]] = {}
    for sample in found["samples"][task]:
        row = rows.setdefault(sample["doc_id"], {"scores": {}})
        row["arguments"] = [list(each) for each in sample["arguments"]]
        row["answer"] = sample["resps"]
        for metric in sample["metrics"]:
            name = metric if sample["filter"] in ("none", "create_test") else sample["filter"]
            row["scores"][name] = sample[metric]
    return [rows[at] for at in sorted(rows)]


def score_images(given: dict[str, Any]) -> dict[str, Any]:
    """What the harness asks of MMMU, for which its models need PyTorch; and both scores of given answers."""
    utils = importlib.import_module("lm_eval.tasks.mmmu.utils")
    rows, pairs = given["rows"], list(zip(given["rows"], given["answers"], strict=True))
    return {
        "prompts": [utils.doc_to_text(row) for row in rows],
        "images": [utils.doc_to_image(row) for row in rows],
        "theirs": [utils.process_results(row, [answer])["acc"] for row, answer in pairs],
        "ours": [score_mmmu(answer, row)["score"] for row, answer in pairs],
    }


def main() -> None:
    metrics.load = lambda name: CodeEval()
    langdetect.DetectorFactory.seed = 0  # without a seed it guesses differently each time
    given = json.loads(Path(sys.argv[1]).read_text())
    code = run_mlxrun(["eval", *given["arguments"], "-o", "out"])
    folder = Path("configs")
    folder.mkdir()
    for name, task in given["tasks"].items():
        write_config(name, task, folder)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    model = LmEvalModel(given["model"])
    found: dict[str, Any] = {"code": code, "run": {}, "given": {}, "scored": {}}
    for name, task in given["tasks"].items():
        options = {"apply_chat_template": True} if task.get("is_chat") else {}
        found["run"][name] = evaluate(model, name, manager, limit=task.get("limit"), **options)
        if "answers" in task:
            found["given"][name] = evaluate(Answers(task["answers"]), name, manager)
            module, _, function = task["scorer"].partition(":")
            score = getattr(importlib.import_module(module), function)
            pairs = zip(task["answers"], task["expected"], strict=True)
            found["scored"][name] = [score(answer=answer, expected=expected) for answer, expected in pairs]
    found["mmmu"] = score_images(given["images"])
    print(json.dumps(found, default=str))


if __name__ == "__main__":
    main()
