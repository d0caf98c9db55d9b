#!/usr/bin/env bash
# Installs mlxrun into an environment of its own.
set -euo pipefail
source "$(dirname "$0")/mlxrun_paths.sh"

[ -d "$MLXRUN_VENV" ] || uv venv "$MLXRUN_VENV" --python 3.12
uv pip install --python "$MLXRUN_VENV/bin/python" "$MLXRUN_SOURCE"
"$MLXRUN_VENV/bin/mlxrun" --version
