"""Inspect AI's evaluation log, as one JSON file or as the zip file that Inspect itself writes.

The format is that of `inspect_ai.log.EvalLog`, version 2. A zip file has `header.json` (the log without its
samples), `summaries.json`, and `samples/ID_epoch_1.json` for each line.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlxrun.core.limited_json import load_json
from mlxrun.evals.exports.exported_run import (
    ExportedRun,
    build_usage,
    describe_interval,
    dump_json,
    name_metric,
)
from mlxrun.evals.prompt_messages import PromptMessage, dump_text
from mlxrun.evals.run_folders.run_line import RunLine
from mlxrun.jobs.scoring.score_groups import ScoreGroup

Json = dict[str, Any]
SUFFIXES = (".eval", ".json")
_VERSION = 2
_ID_LENGTH = 22  # of Inspect's own ids
_SHOWN = 1000  # characters of an input in a summary
_ROLES = ("system", "user", "assistant", "tool")
# Fields of a request in Inspect's generate config: those of another name there, and those of the same.
_RENAMED = {"stop": "stop_seqs", "n": "num_choices", "max_completion_tokens": "max_tokens"}
_SAME = (
    *("max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty"),
    *("presence_penalty", "logprobs", "top_logprobs", "reasoning_effort"),
)
_STOP_REASONS = {
    "stop": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "completed": "stop",
    "length": "max_tokens",
    "max_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "tool_calls": "tool_calls",
    "tool_use": "tool_calls",
}


def write_inspect_log(run: ExportedRun, path: Path) -> None:
    """Write the log. The suffix of `path` chooses its form."""
    header = build_header(run)
    if path.suffix == ".json":
        with path.open("w", encoding="utf-8") as file:
            file.write(dump_json(header).removesuffix("}") + ',"samples":[')
            for at, sample in enumerate(list_samples(run)):
                file.write(("," if at else "") + "\n" + dump_json(sample))
            file.write("]}\n")
        return
    start = {name: header[name] for name in ("version", "eval", "plan")}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("_journal/start.json", dump_json(start))
        summaries = []
        for sample in list_samples(run):
            archive.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", dump_json(sample))
            summaries.append(_summarize_sample(sample))
        archive.writestr("_journal/summaries/1.json", dump_json(summaries))
        archive.writestr("summaries.json", dump_json(summaries))
        archive.writestr("header.json", dump_json(header))


def build_header(run: ExportedRun) -> Json:
    """Build the log without its samples."""
    summary, task_id = run.summary, run.digest[:_ID_LENGTH]
    usage = {run.model_id: build_usage(summary.input_tokens, summary.output_tokens)}
    spec = {
        "eval_id": task_id,
        "run_id": task_id,
        "task_id": task_id,
        "created": run.started,
        "task": run.task,
        "task_file": str(run.run.paths.job.absolute()),
        "dataset": {
            "name": run.names.dataset or run.task,
            "location": str(run.run.paths.job.absolute()),
            "samples": run.run.total,
            "sample_ids": summary.ids,
            "shuffled": False,
        },
        "model": run.model_id,
        "model_args": {},
        "config": {},
        "packages": run.versions,
        "metadata": run.facts,
        "scorers": [{"name": name_metric(run.summary.total)}],
    }
    return {
        "version": _VERSION,
        "status": "success" if run.is_complete else "cancelled",
        "eval": spec,
        "plan": {"steps": [{"solver": "generate", "params": {}}], "config": _build_config(run)},
        "results": _build_results(run),
        "stats": {"started_at": run.started, "completed_at": run.ended, "model_usage": usage},
    }


def _build_config(run: ExportedRun) -> Json:
    """The settings that all lines share, in the fields of Inspect's generate config."""
    given = (run.summary.generation or {}).items()
    found = {_RENAMED.get(key, key): value for key, value in given if key in (*_RENAMED, *_SAME)}
    if isinstance(found.get("stop_seqs"), str):
        found["stop_seqs"] = [found["stop_seqs"]]
    if not isinstance(found.get("logprobs", True), bool):  # a number, for completions
        found["top_logprobs"], found["logprobs"] = found["logprobs"], True
    return found


def _build_results(run: ExportedRun) -> Json:
    total = run.summary.total
    name = "mean" if total.scores.fractions else "accuracy"
    name = name if total.measure.is_share else total.measure.aggregate
    metrics = _build_metrics(total, name)
    if len(run.summary.groups) > 1:
        for group, found in sorted(run.summary.groups.items()):
            for key, metric in _build_metrics(found, name).items():
                metrics[f"{group}/{key}"] = {**metric, "name": group, "group": key}
    for each, scores in total.metrics.items():
        metrics[each] = _build_metric(each, scores.value)
    scored = {
        "name": name_metric(total),
        "scorer": name_metric(total),
        "scored_samples": total.sample.count,
        "unscored_samples": run.summary.lines - total.sample.count,
        "metrics": metrics,
    }
    done = run.summary.lines - run.summary.failed
    return {"total_samples": run.run.total, "completed_samples": done, "scores": [scored]}


def _build_metrics(group: ScoreGroup, name: str) -> dict[str, Json]:
    """The mean of a group's scores, with its interval, and its standard error."""
    facts: Json = {"samples": group.sample.count, "failed": group.failed, "unscored": group.unscored}
    if (interval := group.interval) is not None:
        facts["confidence_interval"] = describe_interval(interval)
    found = {name: {**_build_metric(name, group.value), "metadata": facts}}
    if (error := group.sample.compute_standard_error()) is not None:
        found["stderr"] = _build_metric("stderr", error)
    return found


def _build_metric(name: str, value: float | None) -> Json:
    return {"name": name, "value": value}


def list_samples(run: ExportedRun) -> Iterator[Json]:
    """Yield the samples of a log, one for each line."""
    for line in run.read_lines():
        yield build_sample(run, line)


def build_sample(run: ExportedRun, line: RunLine) -> Json:
    """Build the sample of a line."""
    prompt = [_build_message(each) for each in line.messages]
    choices = _build_choices(run, line)
    usage, agent = build_usage(*line.tokens), line.record.get("agent", {})
    talk = list(_build_transcript(run, line.record.get("transcript", ())))
    sample: Json = {
        "id": line.id,
        "epoch": 1,
        "input": prompt or "",
        "target": line.targets or "",
        "messages": [*prompt, *(talk or (choice["message"] for choice in choices[:1]))],
        "output": {"model": run.model, "choices": choices, "usage": usage},
        "scores": {name_metric(run.summary.total): _build_score(line)} if run.has_score(line) else {},
        "metadata": {"group": line.group or "all", "match": line.match, "generation": line.generation},
        "model_usage": {run.model_id: usage},
        "uuid": f"{run.digest[:_ID_LENGTH]}-{line.number}",
    }
    if agent:
        sample["store"] = agent["state"]
        sample["metadata"]["ended"] = agent["ended"]
    if line.options:
        sample["choices"] = line.options
    if line.error is not None:
        sample["error"] = {"message": line.error, "traceback": "", "traceback_ansi": ""}
        sample["output"]["error"] = line.error
    return sample


def _build_message(message: PromptMessage) -> Json:
    """A message of the prompt; roles that Inspect does not have are named in the text of a user's message."""
    role, text = message.role, message.text
    if role == "developer":
        role = "system"
    if role not in _ROLES:
        role, text = "user", text if role == "prompt" else f"[{role}]\n{text}"
    media: list[Json] = [{"type": "image", "image": url} for url in message.images]
    for url in message.sounds:
        form = "mp3" if re.match(r"data:audio/(mp3|mpeg)|.*\.mp3$", url) else "wav"  # Inspect has no other
        media.append({"type": "audio", "audio": url, "format": form})
    if not media:
        return {"role": role, "content": text}
    return {"role": role, "content": [*media, *([{"type": "text", "text": text}] if text else [])]}


def _build_choices(run: ExportedRun, line: RunLine) -> list[Json]:
    """The choices of the answer. Of APIs other than chat completions the text has the tool calls."""
    raw = line.response.get("choices", [])
    found = []
    for at, answer in enumerate(line.answers):
        choice = raw[at] if at < len(raw) else {}
        message = choice.get("message") or {}
        reason = str(choice.get("finish_reason") or line.finish)
        text = answer if not message else message.get("content") or ""
        reasoning = message.get("reasoning_content") or (line.reasoning if at == 0 else None)
        made = _build_answer(run, text, reasoning, message.get("tool_calls"))
        found.append({"message": made, "stop_reason": _STOP_REASONS.get(reason, "unknown")})
    return found


def _build_answer(run: ExportedRun, text: str, reasoning: str | None, calls: Sequence[Json] | None) -> Json:
    """A message of the model."""
    parts = [{"type": "reasoning", "reasoning": reasoning}, {"type": "text", "text": text}]
    content = parts if reasoning else text
    made: Json = {"role": "assistant", "content": content, "model": run.model, "source": "generate"}
    return made | ({"tool_calls": [_build_call(call) for call in calls]} if calls else {})


def _build_transcript(run: ExportedRun, transcript: Sequence[Json]) -> Iterator[Json]:
    """The messages of a conversation with tools."""
    for each in transcript:
        text = each.get("content") or ""
        if each["role"] == "assistant":
            yield _build_answer(run, text, each.get("reasoning_content"), each.get("tool_calls"))
        elif each["role"] == "tool":
            yield {
                "role": "tool",
                "content": text,
                "tool_call_id": each["tool_call_id"],
                "function": each["name"],
            }
        else:
            yield {"role": each["role"], "content": text}


def _build_call(call: Json) -> Json:
    made = {"id": call["id"], "function": call["function"]["name"], "type": "function", "arguments": {}}
    try:
        arguments = load_json(call["function"]["arguments"])
        if isinstance(arguments, dict):
            return made | {"arguments": arguments}
        problem = "the arguments are no JSON object"
    except ValueError as error:
        problem = f"the arguments are no JSON: {error}"
    return made | {"parse_error": problem}


def _build_score(line: RunLine) -> Json:
    facts = {
        "metrics": dict(line.metrics),
        "choices": line.eval.get("choices"),
        "note": line.eval.get("note") or line.eval.get("comment"),
    }
    score: Json = {"value": line.score, "metadata": {key: each for key, each in facts.items() if each}}
    if line.extracted is not None:
        score["answer"] = line.extracted
    if line.answers:
        score["explanation"] = line.answers[0]
    return score


def _summarize_sample(sample: Json) -> Json:
    names = ("id", "epoch", "target", "metadata", "scores", "model_usage", "uuid")
    texts = [
        each["content"]
        if isinstance(each["content"], str)
        else dump_text(each["content"][-1].get("text", ""))
        for each in sample["input"] or ()
    ]
    scores = {
        name: {key: value for key, value in score.items() if key != "explanation"}
        for name, score in sample["scores"].items()
    }
    found = {name: sample[name] for name in names} | {"scores": scores}
    found |= {"input": "\n".join(texts)[:_SHOWN], "completed": True, "message_count": len(sample["messages"])}
    return found | ({"error": sample["error"]["message"]} if "error" in sample else {})
