#!/usr/bin/env bash
# Stops the server that serve_mlxrun.sh started.
set -euo pipefail
source "$(dirname "$0")/mlxrun_paths.sh"

if [ ! -f "$PID_FILE" ]; then
  echo "mlxrun does not run"
  exit 0
fi
pid=$(cat "$PID_FILE")
kill "$pid" 2>/dev/null || true
for _ in $(seq 60); do
  kill -0 "$pid" 2>/dev/null || break
  sleep 0.5
done
kill -9 "$pid" 2>/dev/null || true
rm -f "$PID_FILE"
echo "mlxrun is stopped"
