# The paths of mlxrun's four scripts: those of SiliconBench's config.sh where they lie beside it.
SCRIPT_DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if [ -f "$SCRIPT_DIR/config.sh" ]; then
  source "$SCRIPT_DIR/config.sh"
  MLXRUN_SOURCE="${MLXRUN_SOURCE:?set it to the path or the git URL of mlxrun}"
else
  MLXRUN_SOURCE="${MLXRUN_SOURCE:-$SCRIPT_DIR/../..}"
fi
MLXRUN_HOME="${MLXRUN_HOME:-${FRAMEWORKS_DIR:-$HOME/.cache/mlxrun-silicon}}"
MLXRUN_VENV="${MLXRUN_VENV:-${VENVS_DIR:-$MLXRUN_HOME}/mlxrun}"
MLXRUN_PORT="${MLXRUN_PORT:-8011}"
MLXRUN_MODEL="${MLX_MODEL:-embedded}"
PID_FILE="$MLXRUN_HOME/mlxrun_server.pid"
LOG_FILE="$MLXRUN_HOME/mlxrun_server.log"
mkdir -p "$MLXRUN_HOME"
