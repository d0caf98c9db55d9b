"""The config that a GGUF file's metadata stands for, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny.byte_tokenizer import EOS
from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ConfigError, ModelLoadError
from mlxrun.model.load.gguf.architectures import check_tensor_types, make_config
from mlxrun.model.load.gguf.header import read_header
from mlxrun.model.load.model_info import load_model_info
from tests.helpers import gguf_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.build_folder(tmp_path_factory.mktemp("gguf") / "model", "llama")


def convert(folder: Path, tmp_path: Path, **extra: Any) -> Path:
    return gguf_files.convert(folder, tmp_path / "tiny-model.gguf", **extra)


def test_the_config_is_that_of_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    config = make_config(read_header(convert(folder, tmp_path)))
    assert (
        config.items()
        >= {
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "vocab_size": 300,
            "tie_word_embeddings": False,
            "rope_traditional": True,
            "rope_scaling": None,
            "eos_token_id": [EOS],
        }.items()
    )


YARN, LINEAR = {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (
            {"scaling__type": "yarn", "scaling__factor": 4.0},
            YARN | {"original_max_position_embeddings": 4096},
        ),
        (
            {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__original_context_length": 9},
            YARN | {"original_max_position_embeddings": 9},
        ),
        ({"scaling__factor": 4.0}, LINEAR),
        ({"scale_linear": 4.0}, LINEAR),
        ({"scaling__factor": 0.0}, None),
        ({"scaling__type": "none", "scaling__factor": 4.0}, None),
    ],
)
def test_scaled_positions(
    folder: Path, tmp_path: Path, given: dict[str, Any], wanted: dict[str, Any] | None
) -> None:
    """As llama.cpp reads them (llama_model::load_hparams)."""
    extra = {f"llama__rope__{key}": value for key, value in given.items()}
    config = make_config(read_header(convert(folder, tmp_path, **extra)))
    assert config["rope_scaling"] == wanted


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"general__architecture": "mamba"}, "architecture 'mamba'; those of llama, smollm3, qwen2, qwen3"),
        ({"split__count": 3}, "one of several files"),
        ({"llama__expert_count": 8}, r"llama\.expert_count is set"),
        ({"llama__rope__scaling__type": "longrope"}, "rope scaling 'longrope'"),
        ({"llama__rope__dimension_count": 8}, "only a part of each head"),
        ({"llama__block_count": None}, r"no llama\.block_count"),
        ({"llama__attention__head_count": 0}, r"head_count is 0, which must be more than 0"),
        ({"llama__attention__head_count_kv": [2, 1]}, r"head_count_kv is \[2, 1\]"),
        ({"tokenizer__ggml__model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"tokenizer__ggml__pre": "chameleon"}, "tokenizer.ggml.pre is 'chameleon'"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    folder: Path, tmp_path: Path, extra: dict[str, Any], said: str
) -> None:
    """Before any weight is read: the model info needs none."""
    file = convert(folder, tmp_path, **extra)
    with pytest.raises(ModelLoadError, match=rf"tiny-model\.gguf: .*{said}"):
        load_model_info(ModelSettings(path=str(file)))


def test_types_that_mlx_reads_wrongly_are_refused(folder: Path, tmp_path: Path) -> None:
    file = convert(folder, tmp_path, more={"blk.0.x.weight": ("Q4_K", (1, 256), b"\0" * 144)})
    with pytest.raises(ModelLoadError, match="tensors are of type Q4_K; GGUF files of F32"):
        check_tensor_types(read_header(file))


def test_the_model_info_of_a_file(folder: Path, tmp_path: Path) -> None:
    """Name, limits, template and digests; the digests change with the weights and with the tokenizer."""
    infos = []
    for number, extra in enumerate(
        [{}, {"llama__rope__freq_base": 5000.0}, {"tokenizer__ggml__eot_token_id": 5}]
    ):
        (tmp_path / str(number)).mkdir()
        infos.append(
            load_model_info(ModelSettings(path=str(convert(folder, tmp_path / str(number), **extra))))
        )
    info = infos[0]
    assert (info.name, info.context_length, info.vision) == ("tiny-model", 4096, False)
    assert info.chat_template is not None and info.eos_ids == {EOS} and infos[2].eos_ids == {EOS, 5}
    assert len({each.digests["model"] for each in infos}) == 3
    assert infos[0].digests["tokenizer"] == infos[1].digests["tokenizer"] != infos[2].digests["tokenizer"]


def test_gguf_files_are_text_models(folder: Path, tmp_path: Path) -> None:
    path = str(convert(folder, tmp_path))
    with pytest.raises(ModelLoadError, match=r"model\.kind: vision, but GGUF files"):
        load_model_info(ModelSettings(path=path, kind="vision"))
    with pytest.raises(ConfigError, match=r"neither a folder nor a \.gguf file"):
        load_model_info(ModelSettings(path=str(folder / "config.json")))
