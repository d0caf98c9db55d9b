"""The config of LiteLLM's proxy in docs/clients.md: its key, and its models in LiteLLM's own router."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from mlxrun.config.server_settings import ServerSettings
from mlxrun.config.settings import Config
from tests.helpers.served_model import run_model_server

ROOT = Path(__file__).parents[2]
KEY = "sesame-0123456789"
ROUTE = """
import json, sys
from litellm import Router

models = json.load(sys.stdin)
router = Router(model_list=models)
question = [{"role": "user", "content": "What is 12 + 30?"}]
names = [model["model_name"] for model in models]
print(json.dumps([router.completion(name, messages=question).choices[0].message.content for name in names]))
"""


def read_config() -> dict[str, Any]:
    """The config of the page."""
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    (text,) = (each for each in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "model_list" in each)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def test_the_proxy_starts_only_with_a_master_key() -> None:
    """LiteLLM reads it in `general_settings` only, and newer ones refuse to start without one."""
    config = read_config()
    assert config["general_settings"] == {"master_key": "os.environ/LITELLM_MASTER_KEY"}
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    assert 'LITELLM_MASTER_KEY="sk-$(openssl rand -hex 32)"' in page


def test_its_models_answer() -> None:
    models = read_config()["model_list"]
    with run_model_server(Config(server=ServerSettings(port=0, api_keys={"litellm": KEY}))) as server:
        for model in models:
            url = model["litellm_params"]["api_base"]
            assert url.startswith("http://127.0.0.1:8000")
            model["litellm_params"]["api_base"] = url.replace("http://127.0.0.1:8000", server.url)
        done = subprocess.run(
            [ROOT / ".venv-clients" / "openai2" / "bin" / "python", "-c", ROUTE],
            input=json.dumps(models),
            env={**os.environ, "MLXRUN_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ["42"] * len(models)
