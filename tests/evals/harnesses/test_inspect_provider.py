"""Inspect's tasks, unchanged, with the embedded model over HTTP and with mlxrun's provider in Inspect's own
process. The answers of the server are the oracle of those in the process."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.config.settings import Config, EngineSettings, ModelSettings
from tests.helpers.harness_scripts import run_harness_script
from tests.helpers.served_model import make_image_part, run_model_server

pytestmark = pytest.mark.slow
CONFIG = Config(engine=EngineSettings(reproducible=True), model=ModelSettings(context_length=2048))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What scripts/run_inspect_tasks.py has found, with the settings of CONFIG in its process too."""
    picture = make_image_part("red")["image_url"]["url"]
    with run_model_server(CONFIG) as served:
        given = {"url": f"{served.url}/v1", "picture": picture}
        return run_harness_script("run_inspect_tasks.py", given, tmp_path_factory.mktemp("inspect"))


@pytest.mark.parametrize("part", ["tasks", "requests"])
def test_answers_in_the_process_are_those_over_http(found: Any, part: str) -> None:
    assert found["local"][part] == found["http"][part]


def test_a_lost_field_is_seen(found: Any) -> None:
    """The twin: without its stop sequences a request has another answer."""
    assert found["broken"]["stop"] != found["http"]["requests"]["stop"]


def test_tasks_have_scores(found: Any) -> None:
    tasks = found["http"]["tasks"]
    assert tasks["sums"]["metrics"] == {"match": 0.5} and tasks["images"]["metrics"] == {"includes": 1.0}
    assert [sample["scores"] for sample in tasks["sums"]["samples"]] == [["C"]] * 3 + [["I"]] * 3
    for name in ("agent", "choices"):  # for which the embedded model is too small
        assert tasks[name]["samples"][0]["scores"] == ["I"]


def test_a_tool_is_called_and_its_result_is_answered(found: Any) -> None:
    roles = [message[0] for message in found["local"]["tasks"]["agent"]["samples"][0]["messages"]]
    assert roles[:4] == ["user", "assistant", "tool", "assistant"]
    call = found["local"]["tasks"]["agent"]["samples"][0]["messages"][1][3]
    assert call == [["fetch_weather", {"place": "Dublin"}, None]]


def test_settings_are_honoured(found: Any) -> None:
    requests = found["local"]["requests"]
    texts = {
        name: [one[0][1] for one in each["choices"]] for name, each in requests.items() if "choices" in each
    }
    assert texts["stop"] == ["4"] and texts["schema"] == ['{"sky": "sunny"}']
    assert len(texts["n"]) == len(set(texts["n"])) == 3
    assert texts["n"][0] == texts["seed"][0], "the first choice has the seed of the request"
    assert requests["max_tokens"]["choices"][0][:2] == [["assistant", "4", [], []], "max_tokens"]
    assert not texts["bias"][0].startswith("4")
    (message, reason, *_), usage = requests["reasoning"]["choices"][0], requests["reasoning"]["usage"]
    assert (message[1], reason) == ("47", "stop") and "42 + 5 = 47" in message[2][0] and usage[2] > 0
    logprobs = requests["logprobs"]["choices"][0][2]["content"]
    prompt = requests["prompt_logprobs"]["choices"][0][3]["content"]
    assert "12 + 30" in "".join(token["token"] for token in prompt) and all(
        token["logprob"] <= 0 for token in prompt
    )
    assert "".join(token["token"] for token in logprobs) == "42" and len(logprobs[0]["top_logprobs"]) == 2


def test_a_full_context_is_an_answer_and_a_refusal_an_error(found: Any) -> None:
    requests = found["local"]["requests"]
    assert requests["too_long"][0] == "model_length"
    assert requests["refused"] == ["ModelGenerateError", True]


def test_the_provider_itself(found: Any) -> None:
    """Equal requests without a seed differ, and are the same in the next evaluation; settings without a
    counterpart are refused by name."""
    own = found["own"]
    assert own["wild"][0] != own["wild"][1] and own["again"] == own["wild"]
    assert [text.partition(":")[0] for text in own["refused"]] == ["effort", "modalities"]
    assert own["tokens"] == own["count"] == 10
