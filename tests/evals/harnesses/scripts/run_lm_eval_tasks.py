"""Runs the tasks of ../tasks with lm-evaluation-harness: over HTTP, in this process, and with
mlx-lm's own model. Prints the results and the harness' samples as JSON in its last line."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

os.environ |= {"HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from mlx_lm.evaluate import MLXLM

from mlxrun.evals.harnesses import lm_eval_command
from mlxrun.evals.harnesses.lm_eval_model import LmEvalModel

TASKS = Path(__file__).parents[1] / "tasks"
SCORED = ("letters", "truths", "last_word", "pages", "group")  # of choice and gaps
ANSWERED = ("sums", "votes")
WITH_CONTEXT = ("choice", "truths", "gaps", "last_word", "pages")  # mlx-lm scores no text without one


def evaluate(model: Any, names: tuple[str, ...], **options: Any) -> Any:
    """The metrics of tasks by name, and the responses of the model to each document."""
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=[f"mlxrun_{name}" for name in names],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0,
        **options,
    )
    metrics = {
        name: {key: value for key, value in each.items() if "," in key and "stderr" not in key}
        for name, each in found["results"].items()
    }
    samples = {
        name: [sample["resps"] for sample in sorted(each, key=lambda sample: sample["doc_id"])]
        for name, each in found["samples"].items()
    }
    return {"metrics": metrics, "samples": samples}


def evaluate_by_http(
    url: str, names: tuple[str, ...], model: str = "local-completions", **options: Any
) -> Any:
    path = "chat/completions" if "chat" in model else "completions"
    arguments = {"model": "tiny", "base_url": f"{url}/v1/{path}", "num_concurrent": 8, "max_length": 512}
    return evaluate(model, names, model_args=arguments | options.pop("more", {}), **options)


def run_command(arguments: list[str]) -> str:
    """What `mlxrun-lm-eval` prints."""
    output, sys.argv = io.StringIO(), ["mlxrun-lm-eval", *arguments]
    with redirect_stdout(output):
        lm_eval_command.main()
    return output.getvalue()


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    os.chdir(TASKS)  # the tasks name their data relative to it
    url, model = given["url"], given["model"]
    plain = LmEvalModel(model, add_bos_token=False, max_length=512)
    found = {
        "http": evaluate_by_http(url, SCORED + ANSWERED),
        "http batched": evaluate_by_http(
            url, ("choice", "pages"), more={"num_concurrent": 1, "batch_size": 4}
        ),
        "http chat": evaluate_by_http(
            url, ANSWERED, "local-chat-completions", apply_chat_template=True, fewshot_as_multiturn=True
        ),
        "local": evaluate(plain, SCORED + ANSWERED),
        "local bos": evaluate(LmEvalModel(model), WITH_CONTEXT + ANSWERED),
        "local chat": evaluate(LmEvalModel(model), ANSWERED, apply_chat_template=True),
        "mlx_lm": evaluate(MLXLM(model, use_chat_template=False), (*WITH_CONTEXT, "sums")),
        "mlx_lm chat": evaluate(MLXLM(model), ("sums",), apply_chat_template=True),
        "info": plain.get_model_info(),
    }
    found["command"] = run_command(
        [
            *("--model", "mlxrun", "--model_args", f"pretrained={model},scheduler.max_running=4"),
            *("--tasks", "mlxrun_gaps", "--include_path", str(TASKS)),
        ]
    )
    found["long"] = score_long_text(model)
    found["refused"] = list_refusals(model)
    print(json.dumps(found))


def score_long_text(model: str) -> Any:
    """A text of several contexts: its score, and what each token adds by the windows of the harness."""
    text = "The river runs past the old mill. " * 6
    requests = [Instance("loglikelihood_rolling", {}, (each,), 0) for each in (text, "", "x")]
    small = LmEvalModel(model, max_length=64)
    windows = [len(pair[2]) for pair in small._list_windows(text)]
    return {"scores": small.loglikelihood_rolling(requests, disable_tqdm=True), "windows": windows}


def list_refusals(model: str) -> list[str]:
    """What the model says to wrong arguments, options and texts."""
    small = LmEvalModel(model, max_length=8)
    beams = Instance("generate_until", {}, ("a", {"until": [], "num_beams": 2, "max_gen_toks": 2}), 0)
    long = Instance("loglikelihood", {}, ("a", "b" * 9), 0)
    cases: list[Callable[[], Any]] = [
        lambda: LmEvalModel(model, **{"scheduler.max_runing": 1}),
        lambda: LmEvalModel(model, pretrained=model),
        lambda: small.generate_until([beams], disable_tqdm=True),
        lambda: small.loglikelihood([long], disable_tqdm=True),
    ]
    found = []
    for case in cases:
        try:
            case()
        except Exception as error:
            found.append(str(error))
    return found


if __name__ == "__main__":
    main()
