#!/usr/bin/env bash
# Installs the newest mlxrun into the environment that install_mlxrun.sh made.
set -euo pipefail
source "$(dirname "$0")/mlxrun_paths.sh"

if [ -d "$MLXRUN_SOURCE/.git" ]; then git -C "$MLXRUN_SOURCE" pull --ff-only; fi
uv pip install --python "$MLXRUN_VENV/bin/python" --upgrade --reinstall-package mlxrun "$MLXRUN_SOURCE"
"$MLXRUN_VENV/bin/mlxrun" --version
