"""LoRA adapters chosen by `model`: with OpenAI's and Anthropic's clients, and in job lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anthropic
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from mlxrun.cli.main import main
from mlxrun.config.settings import Config, EngineSettings, ModelSettings
from mlxrun.model.load.model_files import EMBEDDED
from tests.helpers.lora_adapters import make_adapter
from tests.helpers.served_model import HELLO, ModelServer, run_model_server

NAMES = ("embedded", "embedded:one", "two")  # two is named alone, as clients of vLLM do


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: str(make_adapter(EMBEDDED, root / name, seed, scale=30.0))
        for seed, name in enumerate(("one", "two"))
    }


@pytest.fixture(scope="module")
def served(paths: dict[str, str]) -> Iterator[ModelServer]:
    with run_model_server(
        Config(model=ModelSettings(adapters=paths), engine=EngineSettings(load_check=False))
    ) as server:
        yield server


@pytest.fixture(scope="module")
def openai_client(served: ModelServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic_client(served: ModelServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=served.url, api_key="-", max_retries=0) as client:
        yield client


def ask(client: OpenAI, name: str) -> tuple[str, str | None]:
    found = client.chat.completions.create(model=name, messages=HELLO, max_tokens=12, temperature=0)  # type: ignore[call-overload]
    return found.model, found.choices[0].message.content


def test_each_surface_takes_the_adapter_that_model_names(
    openai_client: OpenAI, anthropic_client: Anthropic, paths: dict[str, str], tmp_path: Path
) -> None:
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda name: ask(openai_client, name), NAMES))
    assert [model for model, _ in answers] == ["embedded", "embedded:one", "embedded:two"]
    texts = [text for _, text in answers]
    assert len(set(texts)) == 3
    for name, text in zip(NAMES, texts, strict=True):
        message = anthropic_client.messages.create(
            model=name,
            max_tokens=12,
            messages=HELLO,  # type: ignore[arg-type]
            extra_body={"temperature": 0},
        )
        response = openai_client.responses.create(
            model=name, input="What is 12 + 30?", max_output_tokens=12, temperature=0
        )
        assert [block.text for block in message.content if block.type == "text"] == [text]
        assert response.output_text == text
    job, out = tmp_path / "job.jsonl", tmp_path / "out.jsonl"
    body = {"messages": HELLO, "max_tokens": 12, "temperature": 0}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body | {"model": name}}
        for name in (*NAMES, "embedded:three")
    ]
    job.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sets = [f"--set=model.adapters.{name}={path}" for name, path in paths.items()]
    main(["batch", str(job), "-o", str(out), "--set=engine.load_check=false", *sets])
    records = {record["custom_id"]: record for record in map(json.loads, out.read_text().splitlines())}
    found = [records[name]["response"]["body"]["choices"][0]["message"]["content"] for name in NAMES]
    assert found == texts
    (error,) = map(json.loads, (tmp_path / "out.errors.jsonl").read_text().splitlines())
    assert error["custom_id"] == "embedded:three" and "embedded:one" in json.dumps(error)


def test_models_have_their_parent(openai_client: OpenAI) -> None:
    listed = {model.id: getattr(model, "parent", None) for model in openai_client.models.list().data}
    assert listed == {"embedded": None, "embedded:one": "embedded", "embedded:two": "embedded"}
    assert openai_client.models.retrieve("two").id == "embedded:two"


@pytest.mark.parametrize("name", ["embedded:three", "three", "gpt-4o"])
def test_other_names_are_refused(openai_client: OpenAI, anthropic_client: Anthropic, name: str) -> None:
    said = "the names are embedded, embedded:one, embedded:two"
    with pytest.raises(openai.NotFoundError, match=said):
        ask(openai_client, name)
    with pytest.raises(anthropic.NotFoundError, match=said):
        anthropic_client.messages.create(model=name, max_tokens=1, messages=HELLO)  # type: ignore[arg-type]
