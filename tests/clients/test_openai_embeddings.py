"""OpenAI's own client on a tiny embedding model: embeddings, their errors, and jobs of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI

from mlxrun.cli.main import main
from mlxrun.config.settings import Config, ModelSettings
from tests.helpers.pooling_models import TEXTS, build_pooling_model
from tests.helpers.served_model import ModelServer, run_model_server

GOLDEN = json.loads((Path(__file__).parents[1] / "helpers" / "golden" / "embeddings.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pooling_model("qwen3", tmp_path_factory.mktemp("model") / "tiny-embedding")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ModelServer]:
    with run_model_server(Config(model=ModelSettings(path=str(folder)))) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: ModelServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as found:
        yield found


def test_embeddings(client: OpenAI) -> None:
    """The client asks for base64 by itself, and decodes it."""
    found = client.embeddings.create(model="text-embedding-3-small", input=list(TEXTS), user="me")
    assert np.abs(np.array([item.embedding for item in found.data]) - GOLDEN["qwen3"]).max() < 1e-4
    assert found.model == "tiny-embedding" and found.usage.total_tokens == found.usage.prompt_tokens > 0
    plain = client.embeddings.create(model="x", input=TEXTS[0], encoding_format="float")
    assert np.allclose(plain.data[0].embedding, found.data[0].embedding, atol=1e-5)


def test_token_ids_and_dimensions(client: OpenAI) -> None:
    short = client.embeddings.create(model="x", input=[[8, 10, 12], [9]], dimensions=7)
    assert [len(item.embedding) for item in short.data] == [7, 7]
    assert abs(float(np.linalg.norm(short.data[0].embedding)) - 1) < 1e-5


def test_a_field_by_extra_body(client: OpenAI) -> None:
    found = client.embeddings.create(model="x", input="the cat", extra_body={"prompt_name": "query"})
    assert len(found.data[0].embedding) == 32


def test_errors(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="dimensions: 99 is more"):
        client.embeddings.create(model="x", input="the", dimensions=99)
    with pytest.raises(openai.BadRequestError, match="generates no text"):
        client.chat.completions.create(model="x", messages=[{"role": "user", "content": "hi"}])


def write_job(path: Path) -> Path:
    """Two lines of embeddings, in both formats of a line, and one that is refused."""
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": list(TEXTS)}},
        {"id": "b", "url": "/v1/embeddings", "input": TEXTS[1], "encoding_format": "base64"},
        {"id": "c", "url": "/v1/embeddings", "input": ["a " * 300]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_records(path: Path) -> dict[str, Any]:
    return {record["custom_id"]: record for record in map(json.loads, path.read_text().splitlines())}


def test_a_job_gives_the_same_bytes_again(folder: Path, tmp_path: Path) -> None:
    """A command's job: output records, an error record, nothing to do again, and --fresh with equal bytes."""
    job = write_job(tmp_path / "job.jsonl")
    options = ["--set", f"model.path={folder}", "--set", "engine.reproducible=true"]
    assert main(["batch", str(job), *options]) == 1
    output = tmp_path / "job.out.jsonl"
    first = output.read_bytes()
    records = read_records(output)
    assert records.keys() == {"a", "b"}
    body = records["a"]["response"]["body"]
    vectors = np.array([item["embedding"] for item in body["data"]])
    assert np.abs(vectors - GOLDEN["qwen3"]).max() < 1e-4
    manifest = json.loads((tmp_path / "job.out.jsonl.run" / "manifest.json").read_text())
    assert manifest["counts"]["done"] == 2 and manifest["tokens"]["prompt"] > 0
    assert main(["batch", str(job), *options]) == 1, "all is done: the engine is not started"
    assert output.read_bytes() == first
    lines = output.read_text().splitlines()
    output.write_text(lines[0] + "\n")
    assert main(["batch", str(job), *options]) == 1, "the lost record is computed again"
    assert read_records(output) == records
    assert main(["batch", str(job), *options, "--fresh"]) == 1
    assert read_records(output) == records
