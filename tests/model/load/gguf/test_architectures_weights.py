"""A GGUF file gives the answers of the checkpoint that it was made of, with the weights that its types
hold.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.gguf import architectures
from tests.helpers import engine_driver, gguf_files, text_models
from tests.helpers.oracle import Answer, text_answer

IDS = tuple(text_models.prompts(7, [40])[0])
COUNT = 12


def make(tmp_path: Path, family: str, kind: str = "F32", **config: Any) -> tuple[Path, Path]:
    """The checkpoint and the GGUF file."""
    folder = gguf_files.build_folder(tmp_path / "original", family, **config)
    return folder, gguf_files.convert(folder, tmp_path / "model.gguf", kind)


def run(file: Path, **options: Any) -> Any:
    engine = engine_driver.make_real_engine(file, load_check=False, **options)
    return engine_driver.run_requests(engine, [engine_driver.make_text_request("a", IDS, max_tokens=COUNT)])[
        "a"
    ]


def check(file: Path, answer: Answer, **options: Any) -> None:
    engine_driver.check_answer(run(file, **options), answer, COUNT)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "F32"),
        ("llama", "Q4_0"),
        ("llama", "Q4_1"),
        ("llama", "Q8_0"),
        ("qwen2", "F16"),
        ("qwen3", "BF16"),
        ("qwen3", "Q8_0"),
        ("smollm3", "Q4_1"),
    ],
)
def test_answers_are_those_of_the_checkpoint(tmp_path: Path, family: str, kind: str) -> None:
    folder, file = make(tmp_path, family, kind)
    check(file, text_answer(folder, IDS, COUNT))


def test_a_tied_embedding_is_the_head(tmp_path: Path) -> None:
    folder, file = make(tmp_path, "qwen3", "Q8_0", tie_word_embeddings=True)
    check(file, text_answer(folder, IDS, COUNT))


def test_quantized_weights_stay_so_where_they_are_to(tmp_path: Path) -> None:
    """The same answers without dequantizing, from weights that are quantized in memory."""
    folder, file = make(tmp_path, "llama", "Q4_0")
    model = engine_driver.get_runner(engine_driver.make_real_engine(file, dequantize="never"))._caller.model
    assert model.layers[0].self_attn.q_proj.weight.dtype == mx.uint32
    check(file, text_answer(folder, IDS, COUNT), dequantize="never")


def test_rows_that_were_not_permuted_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: rotary pairs of the other convention give other answers."""
    folder, file = make(tmp_path, "llama")
    monkeypatch.setattr(architectures, "ARCHITECTURES", {"llama": {"rope_traditional": False}})
    with pytest.raises(AssertionError):
        check(file, text_answer(folder, IDS, COUNT))


ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def make_scaled(tmp_path: Path) -> tuple[Path, Path]:
    """A model with Llama 3.1's rotary scaling, whose GGUF file has its factors as a tensor."""
    original = 64
    scaling = ROPE | {"original_max_position_embeddings": original}
    folder = gguf_files.build_folder(tmp_path / "original", "llama", rope_scaling=scaling)
    factors = []
    for i in range(8):
        wave = 2 * math.pi * 10_000 ** (i / 8)
        smooth = (original / wave - 1) / 3
        factors.append(
            8.0 if wave > original else 1.0 if wave < original / 4 else 1 / ((1 - smooth) / 8 + smooth)
        )
    data = np.array(factors, "<f4")
    file = gguf_files.convert(
        folder, tmp_path / "model.gguf", more={"rope_freqs.weight": ("F32", (8,), data.tobytes())}
    )
    return folder, file


def test_scaled_rotary_periods_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, file = make_scaled(tmp_path)
    answer = text_answer(folder, IDS, COUNT)
    check(file, answer)
    monkeypatch.setattr(architectures, "scale_rope", lambda *given: None)  # mutation
    with pytest.raises(AssertionError):
        check(file, answer)


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    _, file = make(tmp_path, "llama")
    data = file.read_bytes()
    file.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"vit.1.ffn_up.weight"))
    with pytest.raises(ModelLoadError, match=r"missing weights: model\.layers\.1\.mlp\.up_proj\.weight"):
        run(file)


def test_a_tensor_that_the_architecture_does_not_have_is_named(tmp_path: Path) -> None:
    folder = gguf_files.build_folder(tmp_path / "original", "llama")
    more = {"blk.1.attn_sinks.weight": ("F32", (4,), np.zeros(4, "<f4").tobytes())}
    file = gguf_files.convert(folder, tmp_path / "model.gguf", more=more)
    with pytest.raises(ModelLoadError, match=r"not in model.*blk\.1\.attn_sinks\.weight"):
        run(file)


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    _, file = make(tmp_path, "llama")
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ModelLoadError, match=r"model\.gguf"):
        run(file)


def test_what_mlx_makes_of_blocks_of_q6_k(tmp_path: Path) -> None:
    """Contract: MLX's values of these blocks are those that the format defines, rounded to float16."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (8, 210), dtype=np.uint8)
    scale = rng.uniform(1e-3, 2e-3, (8, 1)).astype("<f2")
    blocks[:, 208:] = scale.view("u1")
    low, high = blocks[:, :128].reshape(8, 2, 64), blocks[:, 128:192].reshape(8, 2, 32)
    steps = blocks[:, 192:208].view("i1").reshape(8, 2, 8, 1).astype("f4")
    quants = np.concatenate(
        [
            (low[:, :, :32] & 15) | (high & 3) << 4,
            (low[:, :, 32:] & 15) | (high >> 2 & 3) << 4,
            (low[:, :, :32] >> 4) | (high >> 4 & 3) << 4,
            (low[:, :, 32:] >> 4) | (high >> 6) << 4,
        ],
        axis=2,
    ).reshape(8, 2, 8, 16)
    wanted = (scale.astype("f4").reshape(8, 1, 1, 1) * steps * (quants.astype("f4") - 32)).reshape(8, 256)
    file = gguf_files.write_gguf(
        tmp_path / "q6.gguf",
        {"general.architecture": "llama"},
        {"a.weight": ("Q6_K", (8, 256), blocks.tobytes())},
    )
    found = mx.load(str(file))["a.weight"]
    assert found.dtype == mx.float16
    assert np.array_equal(np.array(found), wanted.astype("f2"))
