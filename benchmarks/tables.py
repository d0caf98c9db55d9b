"""`python -m benchmarks.tables` writes the tables of README.md and docs/ whose figures come from
benchmarks/results. A table stands between `<!-- measured: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.plots.results import load, read
from benchmarks.serve_peers import PRELOADED

Table = tuple[str, Iterable[str]]  # its head and its rows

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("benchmarks", "loading", "agents", "embeddings", "evals", "first-steps", "server")
    ),
)
INSTALL = "install"
STEPS = "first-steps"
UI_COST = "ui-cost"
MEMORY = "memory-fit-cpu"
PROMPT_SIZES = "agent-prompts"
VISUAL = "visual-eval"
BLOCK = re.compile(r"(<!-- measured: ([\w-]+) -->\n\n).*?(\n\n<!-- end -->)", re.S)
PROMPTS = {
    "ragged": "`ragged`: 1 × 16384 + 31 × 256",
    "mixed": "`mixed`: 4 × 8192 + 8 × 2048 + 20 × 512",
    "staggered": "`staggered`: one of 256 every 4 steps, one of 16384",
    "uniform": "`uniform`: 32 × 512",
    "few": "`few`: 8 × 512",
    "single": "`single`: 1 × 512",
}
MEASURES = {
    "wall_s": "whole workload",
    "decode_tps": "decode, all rows",
    "long_gap_p99_s": "inter-token p99 while the long prompt prefills",
    "ttft_mean_s": "TTFT mean",
    "peak_bytes": "peak memory",
}
ENGINE = {
    "engine-h200": ("engine-h200",),
    "engine-h200-8b-4bit": ("engine-h200-8b-4bit",),
    "engine-h200-30b-a3b-4bit": ("engine-h200-30b-a3b-4bit",),
    "engine-cpu": ("engine-cpu", "engine-cpu-few"),
}
# By the name of the second: two modes of mlxrun on one host, and their titles.
MODES = {
    second: (first, second, titles)
    for first, second, titles in (
        ("engine-h200", "engine-h200-reproducible", ("usual mode", "reproducible")),
        ("engine-h200-8b-4bit-held", "engine-h200-8b-4bit-packed", ("held in bfloat16", "kept in 4 bit")),
    )
}
CPU_MODES = ("decode-modes-cpu", "decode-modes-cpu-avx2")
WAITING = "waiting-cpu"
BUSY = "busy-cores-cpu"
SERVER, ONE_THREAD = "server-cpu", "server-cpu-one-thread"
EVAL_SPEED = "eval-speed-cpu"
EMBEDDINGS = "embeddings-cpu"
SERVERS = ("mlx_lm.server", "mlx_vlm.server", "vllm-mlx")
INTERACTIVE = "engine-h200-interactive"
SAME_BYTES = ("reproduce-h200-plain", "reproduce-h200-4-bit", "reproduce-h200-bfloat16")
LAYERS = ("decode-layers-0.6b", "decode-layers-8b")
INSTALLED = {"text": "`mlxrun`", "vision": "`mlxrun[vision]`"}
# Ollama's are those of its quickstart and of its page about Linux.
FIRST_STEPS = (
    ("install", "`curl -fsSL https://ollama.com/install.sh \\| sh`", "`pip install .`", "install_s"),
    (
        "a first answer",
        "`ollama run gemma3`, which downloads the model first",
        "`mlxrun chat`, with the built-in model; `mlxrun chat qwen3-4b-4bit` downloads another one first",
        "first_answer_s",
    ),
    ("the next start", "the same", "the same", "next_answer_s"),
    (
        "an answer over HTTP",
        "`curl` to port 11434: the installed service runs",
        "`mlxrun serve`, then `curl` to port 8000",
        "served_answer_s",
    ),
    ("a page to chat", "an app on macOS and Windows", "http://127.0.0.1:8000/ui", ""),
    ("models and servers", "`ollama ls`, `ollama ps`, `ollama stop`", "`mlxrun list`, `ps`, `stop`", ""),
    (
        "a service",
        "the installer makes one of the system; by hand: a user, a unit and three commands",
        "`mlxrun service install`, one of your user",
        "",
    ),
    ("an upgrade", "the install command again", "`pip install -U`, then `mlxrun service restart`", ""),
)
LOOKS = {
    "closed": "closed",
    "polled": "the requests of 50 pages",
    "open": "open in a Chromium on the same machine",
}


class Row(NamedTuple):
    """A row of README's table. `peer`: the side of the report that mlxrun is compared with."""

    text: str
    files: Sequence[str]
    workload: str
    measure: str
    peer: str = "mlx-lm"


README = (
    Row("32 prompts, one of 16k tokens: whole job (H200, 0.6B)", ENGINE["engine-h200"], "ragged", "wall_s"),
    Row("the same: peak memory", ENGINE["engine-h200"], "ragged", "peak_bytes"),
    Row(
        "p99 between tokens while a 16k prompt prefills (H200)",
        ENGINE["engine-h200"],
        "staggered",
        "long_gap_p99_s",
    ),
    Row(
        "32 prompts of equal length, 8B in 4 bit: decode (H200)",
        ENGINE["engine-h200-8b-4bit"],
        "uniform",
        "decode_tps",
    ),
    Row("the same with 0.6B in bfloat16", ENGINE["engine-h200"], "uniform", "decode_tps"),
    Row("one prompt, 0.6B in bfloat16: decode (H200)", ENGINE["engine-h200"], "single", "decode_tps"),
    Row(
        "16 streams of different prompts on two CPU cores: output",
        (SERVER,),
        "chat",
        "output_rate",
        "mlx_lm.server + preload",
    ),
    Row(
        "the same with nine tenths of all prompts shared",
        (SERVER,),
        "shared",
        "output_rate",
        "mlx_lm.server + preload",
    ),
)
TITLES = {"bf16": "bfloat16 (Qwen3)"}  # of models that were given as a folder
PEERS = {"mlx_lm.server + preload": "mlx_lm.server with OpenBLAS"}


def main() -> int:
    """Write the tables, and print the pages."""
    for page in PAGES:
        page.write_text(fill_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(page.relative_to(ROOT))
    return 0


def fill_tables(text: str) -> str:
    """The page with its tables made anew. KeyError for a table that nothing makes."""
    return BLOCK.sub(lambda found: found[1] + "\n".join(make_table(found[2])) + found[3], text)


def make_table(name: str) -> list[str]:
    """The lines of a table."""
    head, rows = TABLES[name]()
    return [head, "|---" * (head.count("|") - 1) + "|", *rows]


def _make_mode_table(second: str) -> Table:
    first, second, titles = MODES[second]
    return f"| workload | measure | {' | '.join(titles)} | × |", _list_mode_rows(first, second)


def _make_engine_table(name: str) -> Table:
    return "| workload | measure | mlxrun | mlx-lm | × |", _list_engine_rows(name)


def _make_score_table() -> Table:
    scores = load(VISUAL)["scores"]
    tasks = next(iter(scores.values()))
    return f"| task | lines | {' | '.join(scores)} |", [_make_score_row(task, scores) for task in tasks]


def _list_engine_rows(name: str) -> list[str]:
    report, rows = read(*ENGINE[name]), []
    for workload, prompts in PROMPTS.items():
        part, title = report["workloads"].get(workload), prompts
        for measure, words in MEASURES.items():
            if part is not None and part["ratio"].get(measure) is not None:
                values = [part["sides"][side]["median"][measure] for side in ("mlxrun", "mlx-lm")]
                cells = [format_figure(value, measure) for value in values]
                rows.append(
                    f"| {title} | {words} | {' | '.join(cells)} | {format_ratio(part['ratio'][measure])} |"
                )
                title = ""
    return rows


def _list_mode_rows(*files: str) -> Iterator[str]:
    modes = [read(name)["workloads"] for name in files]
    for workload in (name for name in PROMPTS if name in modes[1]):
        title = PROMPTS[workload]
        for measure in ("wall_s", "decode_tps", "ttft_mean_s", "peak_bytes"):
            before, now = (each[workload]["sides"]["mlxrun"]["median"][measure] for each in modes)
            ratio = now / before if measure == "decode_tps" else before / now
            cells = " | ".join(format_figure(value, measure) for value in (before, now))
            yield f"| {title} | {MEASURES[measure]} | {cells} | {format_ratio(ratio)} |"
            title = ""


def _list_server_rows() -> Iterator[str]:
    for workload, words in (("chat", "all different"), ("shared", "nine tenths shared")):
        row = _make_row(Row(words, (ONE_THREAD,), workload, "output_rate", "mlx_lm.server + preload"))
        yield row.replace(", mlx_lm.server with OpenBLAS", "")


def _list_server_ratios() -> Iterator[str]:
    """How many times better than each peer, with the preloaded BLAS and as they install."""
    workloads = read(SERVER)["workloads"]
    for workload, words in (("chat", "all different"), ("shared", "nine tenths shared")):
        for suffix, peers in ((PRELOADED, "with OpenBLAS"), ("", "as they install")):
            ours, *sides = (
                workloads[workload][name]["median"]
                for name in ("mlxrun", *(peer + suffix for peer in SERVERS))
            )
            output = " / ".join(format_ratio(ours["output_rate"] / side["output_rate"]) for side in sides)
            first = " / ".join(format_ratio(side["ttft_p95"] / ours["ttft_p95"]) for side in sides)
            yield f"| {words} | {peers} | {output} | {first} |"
            words = ""


def _list_eval_rows() -> Iterator[str]:
    report = load(EVAL_SPEED)
    for side, found in report["sides"].items():
        whole, start = (median(found[key]) for key in ("whole_s", "start_s"))
        ratios = report["ratios"].get(side, {})
        cells = [format_ratio(ratios[key]) if ratios else "" for key in ("whole", "items_per_s")]
        rate = f"{start:.1f} s | {found['items_per_s']:.2f}"
        yield f"| {side} | {whole:.1f} s | {cells[0]} | {rate} | {cells[1]} |"


def _list_embedding_rows() -> Iterator[str]:
    report = load(EMBEDDINGS)
    for side, found in report["sides"].items():
        clocks = ("processor_seconds", "seconds")
        cells = [f"{found['median'][key]:.2f} s | {format_ratio(found['ratio'][key])}" for key in clocks]
        yield f"| {side} | {' | '.join(cells)} |"


def _list_waiting_rows() -> Iterator[str]:
    sides = load(WAITING)["sides"]
    for side, found in sides.items():
        cells = [format_figure(found[name], name) for name in ("alone_s", "behind_s")]
        ratio = format_ratio(found["behind_s"] / found["alone_s"])
        yield f"| {side} | {' | '.join(cells)} | {ratio} | {format_figure(found['long_processor_s'], '_s')} |"


def _list_busy_rows() -> Iterator[str]:
    for row in load(BUSY)["rows"]:
        cells = [format_figure(seconds, "_s") for seconds in row["seconds"].values()]
        yield f"| {row['others']} | {' | '.join(cells)} | {format_ratio(row['ratio'])} |"


def _list_interactive_rows() -> Iterator[str]:
    found = read(INTERACTIVE)["workloads"]["interactive"]["sides"]["mlxrun"]["median"]
    cells = [format_figure(found[name], "_s") for name in ("alone", "behind", "after_cancel", "long_ttft")]
    yield f"| {' | '.join(cells)} |"


def _make_same_bytes_table() -> Table:
    models = [load(name) for name in SAME_BYTES]
    titles = [TITLES.get(m["models"][0]["title"], m["models"][0]["title"]) for m in models]
    head = " | ".join(f"{title}, {m['lines']:,} lines" for title, m in zip(titles, models, strict=True))
    return f"| bytes that differ | {head} |", _list_same_bytes_rows(models)


def _list_same_bytes_rows(models: Sequence[dict[str, Any]]) -> Iterator[str]:
    found = [report["models"][0] for report in models]
    for name in found[0]["conditions"]:
        notes = {each["conditions"][name]["note"] for each in found} - {""}
        cells = [str(each["conditions"][name]["bytes"]) for each in found]
        yield f"| {name}{f' ({min(notes)} at least)' if notes else ''} | {' | '.join(cells)} |"
    for name in found[0]["twins"]:
        cells = [
            f"{each['twins'][name]['differing']} of {each['twins'][name]['lines']} lines" for each in found
        ]
        yield f"| *twin: {name}* | {' | '.join(cells)} |"


def _list_cpu_mode_rows(name: str) -> Iterator[str]:
    report = load(name)
    for row in report["rows"]:
        cells = [f"{row['ms']['usual']:.2f} ms"]
        for mode in ("reproducible", "unchecked"):
            cells += [f"{row['ms'][mode]:.2f} ms", format_ratio(row["ratio"][mode])]
        yield f"| {report['device']['blas_kernel']} | {row['rows']} | {' | '.join(cells)} |"


def _list_layer_rows(name: str) -> Iterator[str]:
    report = load(name)
    for row in report["rows"]:
        times = " | ".join(f"{row[key]:.2f} ms" for key in ("library_ms", "fused_ms"))
        yield f"| {report['model']} | {row['rows']} | {times} | {format_ratio(row['gain'])} |"


def _list_memory_rows() -> list[str]:
    rows = []
    for name, found in read(MEMORY)["workloads"].items():
        peaks = [max(found[side]["load"], found[side]["run"]) for side in ("predicted", "measured")]
        cells = [format_figure(peak, "peak_bytes") for peak in peaks]
        rows.append(f"| {name} | {' | '.join(cells)} | {format_ratio(peaks[0] / peaks[1])} |")
    return rows


def _list_prompt_rows() -> list[str]:
    report = load(PROMPT_SIZES)
    return [
        f"| {agent} | `{found['url']}` | {found['tools']} | {found['prefix_tokens']:,} tokens "
        f"| {found['prompt_tokens']:,} tokens |"
        for agent, found in report["agents"].items()
    ]


def _read_install(kind: str) -> dict[str, Any]:
    report = load(INSTALL)
    return dict(report["kinds"][kind])


def _make_install_row(kind: str) -> str:
    found = _read_install(kind)
    size, seconds = (
        format_figure(found["bytes"], "peak_bytes"),
        format_figure(found["install_cpu_s"], "install_cpu_s"),
    )
    return f"| {INSTALLED[kind]} | {size} | {len(found['packages'])} | {seconds} |"


def _make_step_row(step: tuple[str, str, str, str]) -> str:
    *cells, key = step
    return f"| {' | '.join(cells)} | {format_figure(_read_install('text')[key], key) if key else ''} |"


def _list_ui_rows() -> Iterator[str]:
    sides = load(UI_COST)["sides"]
    for side, found in sides.items():
        ratio = f"{found['ratios']['cpu_ms_per_token']:.3f}" if "ratios" in found else ""
        cost = f"{100 * found['page_cost']:.2f} %" if ratio else ""
        yield f"| {LOOKS[side]} | {found['median']['cpu_ms_per_token']:.2f} ms | {ratio} | {cost} |"


def _make_score_row(task: str, scores: dict[str, Any]) -> str:
    cells = [
        f"{100 * found['score']:.1f} % [{', '.join(f'{100 * bound:.1f}' for bound in found['interval'])}]"
        for found in (of_model[task] for of_model in scores.values())
    ]
    return f"| {task} | {next(iter(scores.values()))[task]['lines']} | {' | '.join(cells)} |"


def _make_row(row: Row) -> str:
    part: dict[str, Any] = read(*row.files)["workloads"][row.workload]
    sides = part.get("sides", part)
    ours, peer = (sides[side]["median"][row.measure] for side in ("mlxrun", row.peer))
    is_rate = row.measure.endswith(("_tps", "_rate"))
    ratio = format_ratio(ours / peer if is_rate else peer / ours)
    cells = format_figure(ours, row.measure), format_figure(peer, row.measure)
    return f"| {row.text} | {cells[0]} | {cells[1]}, {PEERS.get(row.peer, row.peer)} | {ratio} |"


def format_figure(value: float, measure: str) -> str:
    """A figure with its unit. `measure`: a key of the reports, whose end names the unit."""
    if measure.endswith("_bytes"):
        return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"
    if measure.endswith("_s"):
        return (
            f"{value:.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"
        )
    return f"{value:,.0f} tok/s"


def format_ratio(ratio: float) -> str:
    """How many times better, with three digits at most."""
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


TABLES: dict[str, Callable[[], Table]] = {
    "readme": lambda: ("| measured | mlxrun | peer | × |", map(_make_row, README)),
    MEMORY: lambda: (
        "| model | predicted peak | measured peak | predicted / measured |",
        _list_memory_rows(),
    ),
    "decode-layers": lambda: (
        "| model | rows | the library's layers | fused layers | × |",
        chain.from_iterable(map(_list_layer_rows, LAYERS)),
    ),
    SERVER: lambda: ("| prompts | peers | output | TTFT p95 |", _list_server_ratios()),
    ONE_THREAD: lambda: ("| prompts | mlxrun | mlx_lm.server with OpenBLAS | × |", _list_server_rows()),
    WAITING: lambda: (
        "| steps | alone | behind the long prompt | × alone | processor time of the long prompt |",
        _list_waiting_rows(),
    ),
    BUSY: lambda: (
        "| other programs | all threads | as it is | × |",
        _list_busy_rows(),
    ),
    INTERACTIVE: lambda: (
        "| alone | behind a long prompt | as a long prompt is abandoned | the long prompt |",
        _list_interactive_rows(),
    ),
    "reproduce-h200": _make_same_bytes_table,
    EVAL_SPEED: lambda: (
        "| side | whole command | × | of which start | items a second without start | × |",
        _list_eval_rows(),
    ),
    EMBEDDINGS: lambda: ("| side | processor time | × | time | × |", _list_embedding_rows()),
    CPU_MODES[0]: lambda: (
        "| kernels | rows | usual mode | reproducible | × time | one forward a row | × time |",
        chain.from_iterable(map(_list_cpu_mode_rows, CPU_MODES)),
    ),
    VISUAL: _make_score_table,
    PROMPT_SIZES: lambda: (
        "| agent | endpoint | tools | system prompt and tools | first prompt |",
        _list_prompt_rows(),
    ),
    INSTALL: lambda: (
        "| `pip install` of | size | packages | processor time |",
        map(_make_install_row, INSTALLED),
    ),
    STEPS: lambda: ("| step | Ollama | mlxrun | measured, mlxrun |", map(_make_step_row, FIRST_STEPS)),
    UI_COST: lambda: ("| the page | the server's CPU for a token | × | of one page |", _list_ui_rows()),
    **{name: partial(_make_mode_table, name) for name in MODES},
    **{name: partial(_make_engine_table, name) for name in ENGINE},
}


if __name__ == "__main__":
    raise SystemExit(main())
