"""Tokenizes a huge text in a process of its own, which ends as soon as nobody waits for it.

A tokenizer cannot be interrupted. It takes seconds, and some hundred bytes of memory for each byte of a text.
The child has a lower priority than the server, and its memory is free again when it ends.
"""

from __future__ import annotations

import functools
import os
import struct
import subprocess
import sys
from array import array
from collections.abc import Sequence
from typing import Any, BinaryIO

from tokenizers import Encoding, Tokenizer

from mlxrun.core.errors import InternalError
from mlxrun.core.processes import start_module
from mlxrun.core.workers import end_by

Splits = tuple[tuple[int, int], ...]

NICENESS = 5
_HEAD = struct.Struct("<QQ??")  # bytes of the tokenizer and of the text, two options
_COUNTS = struct.Struct("<QQ")  # of token ids, and of splits


def tokenize_in_process(
    tokenizer: Any, text: str, *, add_special_tokens: bool
) -> tuple[tuple[int, ...], Splits]:
    """Return the token ids and splits of a text. `tokenizer`: a plain one (tokens.is_plain). Abandoned
    if nobody waits any more; InternalError if the process fails."""
    definition, raw = serialize(tokenizer.backend_tokenizer), text.encode()
    plain = bool(tokenizer.backend_tokenizer.encode_special_tokens)
    head = _HEAD.pack(len(definition), len(raw), add_special_tokens, plain)
    pipe = subprocess.PIPE
    with (
        start_module("mlxrun.api.text.tokens.tokenize_process", stdin=pipe, stdout=pipe) as process,
        end_by(process.kill),
    ):
        output = process.communicate(head + definition + raw)[0]
    if process.returncode != 0:
        cause = ChildProcessError(f"exit code {process.returncode}")
        raise InternalError("the prompt could not be tokenized: its process was ended", cause)
    count, pairs = _COUNTS.unpack_from(output)
    ids = array("I", output[_COUNTS.size : _COUNTS.size + 4 * count])
    flat = array("Q", output[_COUNTS.size + 4 * count :])
    return tuple(ids), tuple((flat[2 * i], flat[2 * i + 1]) for i in range(pairs))


@functools.lru_cache(maxsize=2)
def serialize(backend: Tokenizer) -> bytes:
    """The JSON of a tokenizer, as the child reads it."""
    definition: str = backend.to_str()
    return definition.encode()


def main(source: BinaryIO, target: BinaryIO) -> None:
    """Run the child: read one request, and write its answer."""
    size, length, add_special_tokens, plain = _HEAD.unpack(source.read(_HEAD.size))
    backend = Tokenizer.from_str(source.read(size).decode())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = plain
    text = source.read(length).decode()
    encoding = backend.encode(text, add_special_tokens=add_special_tokens)
    ids = encoding.ids
    splits = find_splits(backend, text, ids, encoding)
    target.write(_COUNTS.pack(len(ids), len(splits)))
    target.write(array("I", ids).tobytes())
    target.write(array("Q", [number for pair in splits for number in pair]).tobytes())
    target.flush()


def find_splits(
    backend: Tokenizer, text: str, ids: Sequence[int], encoding: Encoding
) -> tuple[tuple[int, int], ...]:
    """Find the tokens that split `text`: the parts before and after one are tokenized separately.

    Each is its index among the tokens, and its first character in `text`. A token at the start does not
    count.
    """
    contents = find_splitting_tokens(backend)[0]
    found = []
    for index, token in enumerate(ids):
        content = contents.get(token)
        if content is not None and index:
            start = int((encoding.token_to_chars(index) or (0, 0))[0])
            if start > 0 and text.startswith(content, start):
                found.append((index, start))
    return tuple(found)


@functools.lru_cache(maxsize=8)
def find_splitting_tokens(backend: Tokenizer) -> tuple[dict[int, str], int]:
    """Return the added tokens that match the raw text in any context, by id, and the length in characters of
    the longest added token."""
    added = backend.get_added_tokens_decoder()
    contents = {i: token.content for i, token in added.items() if not (token.normalized or token.single_word)}
    return contents, max((len(token.content) for token in added.values()), default=0)


if __name__ == "__main__":
    os.nice(NICENESS)
    main(sys.stdin.buffer, sys.stdout.buffer)
