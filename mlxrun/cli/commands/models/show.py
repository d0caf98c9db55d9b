"""`mlxrun show`: describes a model from its small files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxrun.cli.options import find_model
from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.errors import ModelLoadError
from mlxrun.core.terminal import print_json, print_line

if TYPE_CHECKING:
    from mlxrun.model.load.model_info import LoadedModelInfo

FORMAT = 1


@click.command(
    epilog="""\b
Examples:
  mlxrun show qwen3-8b-4bit                 a model of the hub; its weights are not downloaded
  mlxrun show ./my-model                    a folder, or a .gguf file
  mlxrun show embedded --json

\b
`result` is that of the model's family in docs/models.md: whether the engine computes it exactly as the
library does. `mlxrun doctor MODEL` checks the weights themselves.
"""
)
@click.argument("model", metavar="MODEL")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str, as_json: bool) -> None:
    """Show what a model is: its architecture, size, context and licence."""
    from mlxrun.cli.run_setup import name_model_errors, read_model
    from mlxrun.config.settings import ModelSettings

    path = find_model(model)
    with name_model_errors("MODEL"):
        info = read_model(ModelSettings(path=path), weights=False, announce=False)
    facts = dict(_list_facts(path, info))
    if as_json:
        print_json({"format": FORMAT, "model": path, **facts})
        return
    print_line(path)
    for name, value in facts.items():
        shown = format_rounded(value) if name == "weights" and isinstance(value, int) else value
        print_line(f"  {name:<13} {f'{shown:,} tokens' if name == 'context' else shown}")


def _list_facts(path: str, info: LoadedModelInfo) -> Iterator[tuple[str, str | int]]:
    from mlxrun.model.doctor import describe_use
    from mlxrun.model.load.model_files import list_weight_files

    family, kind = str(info.config.get("model_type")), "vision" if info.vision else "text"
    yield "architecture", f"{family}, {describe_use(info)}"
    yield "result", find_family_result(family, kind)
    yield "context", info.context_length
    if files := list_weight_files(info.folder):
        yield "weights", sum(file.stat().st_size for file in files)
    quantization = info.config.get("quantization")
    if isinstance(quantization, dict) and "bits" in quantization:
        bits = " and ".join(map(str, _list_bits(quantization)))
        yield "quantization", f"{bits} bits, groups of {quantization.get('group_size')}"
    yield from _ask_hub(path, bool(files))
    if info.generates:
        yield "chat template", "yes" if info.chat_template is not None else "no: only prompts, no messages"
    yield "folder", str(info.folder)


def _list_bits(quantization: dict[str, Any]) -> list[int]:
    """The bits of all layers: the usual ones, and those of layers that have their own."""
    layers = (value for value in quantization.values() if isinstance(value, dict))
    return sorted({each["bits"] for each in (quantization, *layers) if "bits" in each})


def find_family_result(family: str, kind: str) -> str:
    """Find the result of a family in docs/models.md, with that of audio, or the page of other models. `kind`:
    text or vision."""
    import mlxrun.model
    from mlxrun.model.pooling.pooled_model import ENCODER_TYPES

    if family == "whisper" or family in ENCODER_TYPES:
        page = "transcription" if family == "whisper" else "embeddings"
        return f"docs/{page}.md says what it is compared with"
    results = json.loads((Path(mlxrun.model.__file__).parent / "families.json").read_text(encoding="utf-8"))
    found = results[kind].get(family, "not known: the family is not in docs/models.md")
    audio = results["audio"].get(family) if kind == "vision" else None
    return f"{found}; audio: {audio}" if audio is not None else str(found)


def _ask_hub(path: str, has_weights: bool) -> Iterator[tuple[str, str]]:
    """What only the hub knows, of a model of the hub; nothing without a network."""
    from mlxrun.model.load.hub import is_hub_id, look_up

    if not is_hub_id(path):
        return
    try:
        found = look_up(path)
    except ModelLoadError:
        return
    yield "licence", found.licence or "none is named"
    if not has_weights:
        yield "download", format_rounded(found.missing)
