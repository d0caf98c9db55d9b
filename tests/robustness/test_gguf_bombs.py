"""GGUF files that lie: counts, lengths and places that cannot be, files that are cut or have wrong bits, and
headers that would take hours or all memory. Each is refused in a sentence, or loaded and computed.
"""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxrun.config.settings import Config, EngineSettings, ModelSettings
from mlxrun.core.errors import MAX_MESSAGE, ModelLoadError
from mlxrun.core.visible_text import make_message
from mlxrun.model.load.gguf import header, tokenizer
from mlxrun.model.load.gguf.header import read_header
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.model_loading import load_model
from tests.helpers import gguf_files
from tests.helpers.storm_counts import count, make_rng

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MEMORY = 100_000_000  # bytes that refusing a file may take


def pack_head(tensors: int, values: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, values)


def pack_string(text: str, size: int | None = None) -> bytes:
    """`size`: what the file says that the string has."""
    return struct.pack("<Q", len(text) if size is None else size) + text.encode()


def pack_list(name: str, kind: int, size: int) -> bytes:
    """The beginning of a value that is a list."""
    return pack_string(name) + struct.pack("<IIQ", 9, kind, size)


def pack_tensor(name: str, *shape: int, kind: int = 0, place: int = 0) -> bytes:
    return pack_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, place)


HUGE_STRING = pack_string("a") + struct.pack("<I", 8)
# What the file begins with, its size, and what is said of it.
BOMBS: dict[str, tuple[bytes, int, str]] = {
    "2^60 values": (pack_head(0, 1 << 60), 500, "0 tensors and 1152921504606846976 values"),
    "2^60 tensors": (pack_head(1 << 60, 0), 500, "1152921504606846976 tensors and 0 values"),
    "2^64 - 1 of both": (pack_head(2**64 - 1, 2**64 - 1), 24, "it would have 18446744073709551615 tensors"),
    "a million tensors": (pack_head(10**6, 0), 1 << 30, "it would have 1000000 tensors"),
    "a string of 2^63": (pack_head(0, 1) + HUGE_STRING + pack_string("x", 1 << 63), 500, "the file is cut"),
    "a string of 2^64": (pack_head(0, 1) + HUGE_STRING + pack_string("x", 2**64 - 1), 500, "file is cut"),
    "a key near 2^64": (pack_head(0, 1) + pack_string("x", 2**64 - 30), 500, "the file is cut"),
    "a string of 4 GB": (
        pack_head(0, 1) + HUGE_STRING + pack_string("x", 1 << 32),
        1 << 33,
        "it would have more than 67,108,864 bytes",
    ),
    "2^60 numbers": (pack_head(0, 1) + pack_list("a", 0, 1 << 60), 1 << 40, f"a list of {1 << 60} values"),
    "2^24 numbers": (pack_head(0, 1) + pack_list("a", 0, 1 << 24), 1 << 40, "a list of 16777216 values"),
    "2^24 strings": (pack_head(0, 1) + pack_list("a", 8, 1 << 24), 1 << 40, "a list of 16777216 values"),
    "lists of lists": (pack_head(0, 1) + pack_list("a", 9, 1) * 50_000, 1 << 21, "a list of lists"),
    "an unknown value": (pack_head(0, 1) + pack_string("a") + struct.pack("<I", 99), 500, "unknown type 99"),
    "2^32 dimensions": (
        pack_head(1, 0) + pack_string("t") + struct.pack("<I", 2**32 - 1),
        500,
        "'t' has 4294967295 dimensions",
    ),
    "dimensions of 2^63": (pack_head(1, 0) + pack_tensor("t", *[1 << 63] * 8), 500, "'t' does not lie"),
    "a dimension of 0": (pack_head(1, 0) + pack_tensor("t", 1 << 60, 0), 500, "'t' has no values"),
    "a place near 2^64": (
        pack_head(1, 0) + pack_tensor("t", 1, place=2**64 - 32),
        500,
        "'t' does not lie within the file",
    ),
    "one place for two": (
        pack_head(2, 0) + pack_tensor("t", 8) + pack_tensor("u", 8),
        500,
        "'u' begins inside another tensor",
    ),
    "a long name": (pack_head(1, 0) + pack_tensor("t" * 10**6, 0), 1 << 21, "ttt has no values"),
    "a name twice": (pack_head(2, 0) + pack_tensor("\x1b[31m\n", 1) * 2, 500, r"it has '\x1b[31m\n' twice"),
}  # fmt: skip


def refuse(read: Callable[[], object]) -> str:
    """How a file is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError) as caught:
            read()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MEMORY, peak
    text = str(caught.value)
    assert len(text.encode()) <= MAX_MESSAGE and text.isprintable(), text[:3000]
    count("GGUF bombs refused")
    return text


@pytest.mark.parametrize("name", BOMBS)
def test_a_header_that_lies_is_refused(name: str, tmp_path: Path) -> None:
    start, size, said = BOMBS[name]
    file = tmp_path / "m.gguf"
    file.write_bytes(start)
    os.truncate(file, size)  # zeros, which take no place on the disk
    text = refuse(lambda: read_header(file))
    assert text.startswith(f"{file}: the header of the GGUF file cannot be read: "), text
    assert said in text.replace("t" * 90, ""), text


def write_lists(file: Path, lists: int, numbers: int) -> Path:
    """A header of lists of zeros, which take no place on the disk."""
    with file.open("wb") as target:
        target.write(pack_head(0, lists))
        for at in range(lists):
            target.write(pack_list(f"k{at}", 0, numbers))
            target.seek(numbers, os.SEEK_CUR)
        target.truncate(target.tell() + 64)
    return file


def test_many_lists_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_lists(tmp_path / "m.gguf", 9, 1 << 19)
    assert "4,194,304 are the most of all lists" in refuse(lambda: read_header(file))
    monkeypatch.setattr(header, "_MAX_ITEMS", 1 << 60)
    assert len(read_header(file).metadata) == 9  # the mutation twin


def build(folder: Path, family: str = "llama", **extra: Any) -> Path:
    """A small GGUF file of this family with further metadata."""
    gguf_files.build_folder(folder / "model", family, **SIZES)
    return gguf_files.convert(folder / "model", folder / "m.gguf", "Q8_0", **extra)


def load(file: Path) -> None:
    """Load it as all commands do."""
    config = Config(model=ModelSettings(path=str(file)), engine=EngineSettings(load_check=False))
    load_model(config, load_model_info(config.model, weights=True))


SENTENCEPIECE = {
    "tokenizer__ggml__model": "llama",
    "tokenizer__ggml__eos_token_id": 0,
    "tokenizer__ggml__padding_token_id": 0,
    "tokenizer__ggml__token_type": [1] * 3,
    "tokenizer__ggml__scores": [0.0] * 3,
}
NAN = float("nan")
METADATA: dict[str, tuple[dict[str, Any], str]] = {
    "a long token": (
        {**SENTENCEPIECE, "tokenizer__ggml__tokens": ["a", "b", "a" * 100_000]},
        "a token has 100,000 characters, 1,024 are the most",
    ),
    "a merge of one": ({"tokenizer__ggml__merges": ["a"]}, "merges has 'a', which is not a pair"),
    "a merge of three": ({"tokenizer__ggml__merges": ["a b c"]}, "merges has 'a b c', which is not a pair"),
    "no heads": ({"llama__attention__head_count": 0}, "head_count is 0, which must be more than 0"),
    "2^32 layers": ({"llama__block_count": 2**32 - 1}, "num_hidden_layers is 4294967295, but the weights"),
    "a base of NaN": ({"llama__rope__freq_base": NAN}, "the model computes NaN"),
    "an epsilon of NaN": ({"llama__attention__layer_norm_rms_epsilon": NAN}, "the model computes NaN"),
    "a long architecture": ({"general__architecture": "x" * 10**6}, "a GGUF file of the architecture 'xxx"),
    "a long splitter": ({"tokenizer__ggml__pre": "x" * 10**6}, "tokenizer.ggml.pre is 'xxx"),
    "an end beyond": ({"tokenizer__ggml__eos_token_id": 2**32 - 1}, "eos_token_id is 4294967295, of 300"),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_that_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    extra, said = METADATA[name]
    file = build(tmp_path, **extra)
    assert said in refuse(lambda: load(file))


def test_a_long_token_is_not_tried_without_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation twin: the library looks at each of its parts."""
    tokens = ["a", "b", "a" * 2000]
    file = build(tmp_path, **SENTENCEPIECE, tokenizer__ggml__tokens=tokens)
    assert "a token has 2,000 characters" in refuse(lambda: load(file))
    monkeypatch.setattr(tokenizer, "_LONGEST", 1 << 60)
    load(file)


def test_a_head_with_a_wrong_bit_in_its_name_is_refused(tmp_path: Path) -> None:
    """Without its head the model would be taken for one whose embedding is the head."""
    file = build(tmp_path)
    name = pack_string("output.weight")
    file.write_bytes(file.read_bytes().replace(name, name[:-1] + b"u"))
    assert "weights that are not in model mlx_lm.models.llama" in refuse(lambda: load(file))


class CountedTokens:
    """Stands for a tokenizer of the library. `calls`: how many tokens each call has added."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def add_tokens(self, tokens: list[Any]) -> None:
        self.calls.append(len(tokens))

    add_special_tokens = add_tokens


def test_many_control_tokens_are_added_at_once(tmp_path: Path) -> None:
    """Each call of the library looks at all that were added before: 8,000 calls took half a minute."""
    kinds = {"tokenizer.ggml.token_type": [3, 4] * 500}
    backend = CountedTokens()
    read = read_header(gguf_files.write_gguf(tmp_path / "m.gguf", kinds, {}))
    tokenizer._add_special_tokens(read, [f"<{i}>" for i in range(1000)], backend)
    assert backend.calls == [500, 500]


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """Its whole header byte by byte, and its tensors in steps."""
    values = {"general.architecture": "llama", "a.list": [1, 2, 3], "a.words": ["one", ""], "a.share": 0.5}
    small = gguf_files.write_gguf(tmp_path / "s.gguf", values, {"x": ("F32", (2, 3), bytes(24))})
    whole = small.read_bytes()
    for size in range(len(whole) - 8):  # the rest is padding
        small.write_bytes(whole[:size])
        refuse_cut(lambda: read_header(small))
    file = build(tmp_path)
    whole = file.read_bytes()
    load(file)
    for size in range(3000, len(whole), 997):
        file.write_bytes(whole[:size])
        refuse_cut(lambda: load(file))


def refuse_cut(read: Callable[[], object]) -> None:
    with pytest.raises(ModelLoadError, match="the header of the GGUF file cannot be read: "):
        read()
    count("cut GGUF files refused")


def flip_bits(folder: Path, seed: int, night: int, rounds: int) -> None:
    """Wrong bits and bytes, most of them in numbers of the header: such a file is refused or computed."""
    rng = make_rng(seed, night)
    file = build(folder, rng.choice(["llama", "qwen2", "qwen3", "smollm3"]))
    whole = file.read_bytes()
    end = whole.rindex(b"blk.0.") + 60
    for _ in range(rounds):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 8])):
            at = rng.choice([rng.randrange(0, 1200), rng.randrange(end), rng.randrange(end - 1000, end)])
            data[at] = rng.choice([data[at] ^ 1 << rng.randrange(8), 0, 127, 128, 255])
        file.write_bytes(data)
        try:
            load(file)
            count("GGUF files with wrong bits loaded")
        except ModelLoadError as error:
            assert len(make_message(str(error)).encode()) <= MAX_MESSAGE
            count("GGUF files with wrong bits refused")


def test_more_heads_than_numbers(tmp_path: Path) -> None:
    """The library divides by the size of a head, which is 0 here."""
    file = build(tmp_path, "qwen2")
    data = bytearray(file.read_bytes())
    key = b"qwen2.attention.head_count"
    at = data.index(key) + len(key) + 4  # behind the type
    data[at : at + 4] = struct.pack("<I", 1 << 20)
    file.write_bytes(data)
    refuse(lambda: load(file))


def test_wrong_bits(tmp_path: Path) -> None:
    flip_bits(tmp_path, 1, 0, 40)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(40))
def test_many_wrong_bits(tmp_path: Path, seed: int, night: int) -> None:
    flip_bits(tmp_path, seed, night, 200)
