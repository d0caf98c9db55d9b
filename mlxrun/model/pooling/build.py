"""Builds the runner that computes the vectors of a loaded model, and compares batches with each text
alone."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlxrun.config.settings import Config
from mlxrun.core.errors import ModelLoadError
from mlxrun.core.request import Request, SamplingParams
from mlxrun.core.step_plan import MAX_ROWS, PoolingBatch
from mlxrun.model.load.loader import check_digests
from mlxrun.model.load.model_files import list_weight_files, read_json
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.load.tensor_files import name_file_errors, read_tensors
from mlxrun.model.load.weight_check import is_float, load_checked_weights
from mlxrun.model.pooling.encoders import BertEncoder, ModernBertEncoder, rename_weight
from mlxrun.model.pooling.pooled_model import ANSWERS, is_sigmoid, read_sentence_config
from mlxrun.model.pooling.pooler import HEADS, AnswerHead, EmbeddingHead, RelevanceHead, VectorHead
from mlxrun.model.pooling.pooling_runner import (
    DecoderStates,
    EncoderStates,
    PoolingCheck,
    PoolingRunner,
    TokenStates,
)
from mlxrun.model.run.hidden_hook import OTHER_TOLERANCE, find_hidden_hook
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.prompt_inputs import TEXT_ONLY

log = logging.getLogger(__name__)
TRIAL_LENGTHS = (3, 12, 23)
TOLERANCE = 1e-3  # largest difference of float32 vectors that counts as rounding, of their largest number
# Tensors that checkpoints have beside the encoder, and that no vector depends on.
_UNUSED = re.compile(r"(^|\.)(position_ids|token_type_ids)$|^(cls|lm_head|decoder|predictions)\.")


def build_decoder_runner(config: Config, info: LoadedModelInfo, caller: ModelCaller) -> PoolingRunner:
    """The runner of a text model whose weights are loaded. ModelLoadError if it gives no hidden states, or if
    its chunks differ from the whole."""
    assert info.pooled is not None
    hook = find_hidden_hook(caller)
    if hook is None:
        raise ModelLoadError(f"{info.folder}: mlx-lm's model does not give the states of tokens")
    chunk = config.scheduler.chunk or MAX_ROWS
    states = DecoderStates(caller, hook, chunk if config.engine.reproducible else 0)
    dtype = caller.prefill(mx.array([[1]]), caller.make_cache(), 0, TEXT_ONLY).dtype
    head: VectorHead
    with name_file_errors(info.folder):
        if info.pooled.task == "score":
            head = AnswerHead(caller, hook, [info.tokenizer.get_vocab()[word] for word in ANSWERS], dtype)
        else:
            head = EmbeddingHead(read_sentence_config(info.folder, config.model))
        return _choose_rows(config, info, states, head, dtype)


def build_encoder_runner(config: Config, info: LoadedModelInfo) -> PoolingRunner:
    """The runner of an encoder, with its weights loaded. ModelLoadError if they do not fit."""
    assert info.pooled is not None
    dtypes = {"bfloat16": mx.bfloat16, "float16": mx.float16}
    dtype = dtypes.get(config.model.dtype, mx.float32)
    head: VectorHead
    with name_file_errors(info.folder):
        model, tensors = load_encoder(info.folder, info.config, dtype)
        if info.pooled.task == "score":
            own = read_json(info.folder / "config_sentence_transformers.json")
            head = RelevanceHead(info.config, tensors, is_sigmoid(info.config, own))
        else:
            head = EmbeddingHead(read_sentence_config(info.folder, config.model))
        runner = _choose_rows(config, info, EncoderStates(model), head, dtype)
    check_digests(config.model, info)
    return runner


def _choose_rows(
    config: Config, info: LoadedModelInfo, states: TokenStates, head: VectorHead, dtype: mx.Dtype
) -> PoolingRunner:
    """A runner of many texts at once, if each gets the vector that it gets alone; else of one at a time."""
    assert info.pooled is not None
    runner = PoolingRunner(states, head, MAX_ROWS, info.pooled.max_tokens)
    lone = PoolingRunner(states, head, 1, info.pooled.max_tokens)
    size = min(TRIAL_LENGTHS[-1], info.pooled.max_tokens)
    vocabulary = len(info.tokenizer)
    requests = [
        Request(
            f"trial-{n}", tuple((7 * at + n) % vocabulary for at in range(min(n, size))), SamplingParams()
        )
        for n in TRIAL_LENGTHS
    ]
    alone = np.stack([compute_vectors(lone, [request], 1 << 20)[0] for request in requests])
    limit = float((TOLERANCE if dtype == mx.float32 else OTHER_TOLERANCE) * np.abs(alone).max())

    def compare(name: str, vectors: Sequence[np.ndarray[Any, Any]]) -> PoolingCheck:
        return PoolingCheck(name, float(np.abs(np.stack(vectors) - alone).max()), limit)

    chunked = compare("texts in chunks", [compute_vectors(lone, [each], 5)[0] for each in requests])
    if not chunked.passed:
        raise ModelLoadError(
            f"{info.folder}: mlx-lm's model differs by the size of chunks: no embeddings of it"
        )
    lone.checks = (chunked,)
    if config.engine.reproducible:
        return lone
    together = compare("texts together", compute_vectors(runner, requests, 15))
    lone.checks = runner.checks = (chunked, together)
    if together.passed:
        return runner
    log.warning("%s: texts are embedded one by one, as padding changes their vectors", info.name)
    return lone


def compute_vectors(
    runner: PoolingRunner, requests: Sequence[Request], tokens: int
) -> list[np.ndarray[tuple[int], np.dtype[np.float32]]]:
    """The vectors of texts as one batch, in slices of `tokens` tokens."""
    batch = PoolingBatch(tuple(requests))
    while (found := runner.advance(batch, tokens)) is None:
        pass
    return [np.frombuffer(data, dtype="<f4") for data in found]


def load_encoder(
    folder: Path, config: Mapping[str, Any], dtype: mx.Dtype
) -> tuple[nn.Module, dict[str, mx.array]]:
    """The encoder, and the tensors of a head in float32. ModelLoadError if weights are missing."""
    tensors: dict[str, mx.array] = {}
    for file in list_weight_files(folder):
        tensors |= read_tensors(file)
    whole = sorted(name for name in tensors if not (is_float(tensors[name]) or _UNUSED.search(name)))
    if whole and not config.get("quantization"):
        raise ModelLoadError(f"{folder}: {whole[0]} is of type {tensors[whole[0]].dtype}, not a floating one")
    if config.get("quantization"):
        raise ModelLoadError(f"{folder}: quantized encoders are not supported; use the original weights")
    head = {name: value.astype(mx.float32) for name, value in tensors.items() if name.startswith(HEADS)}
    weights = {
        rename_weight(name): value.astype(dtype)
        for name, value in tensors.items()
        if name not in head and not _UNUSED.search(name)
    }
    try:
        encoder = ModernBertEncoder if config["model_type"] == "modernbert" else BertEncoder
        model: nn.Module = encoder(config)
    except KeyError as error:
        raise ModelLoadError(f"{folder}/config.json: {error.args[0]} is missing") from error
    wanted = dict(tree_flatten(model.parameters()))
    unknown = sorted(weights.keys() - wanted.keys())
    if unknown:
        log.warning("%s: %d tensors are not used, such as %s", folder, len(unknown), unknown[0])
    load_checked_weights(model, {name: weights[name] for name in wanted if name in weights}, folder)
    model.eval()
    mx.eval(model.parameters(), head)
    return model, head
