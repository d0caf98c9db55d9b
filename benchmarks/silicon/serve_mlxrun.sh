#!/usr/bin/env bash
# Starts the server in the background, and waits until it serves requests.
set -euo pipefail
source "$(dirname "$0")/mlxrun_paths.sh"

if [ -f "$PID_FILE" ] && kill -0 "$(cat "$PID_FILE")" 2>/dev/null; then
  echo "mlxrun runs already (pid $(cat "$PID_FILE")); stop it first" >&2
  exit 1
fi
nohup "$MLXRUN_VENV/bin/mlxrun" serve --port "$MLXRUN_PORT" --set "model.path=$MLXRUN_MODEL" >"$LOG_FILE" 2>&1 &
pid=$!
echo "$pid" >"$PID_FILE"
for _ in $(seq 600); do
  if ! kill -0 "$pid" 2>/dev/null; then
    echo "the server has ended; the end of $LOG_FILE:" >&2
    tail -20 "$LOG_FILE" >&2
    rm -f "$PID_FILE"
    exit 1
  fi
  # /health is 503 while the model loads. The process is asked for first: another server may hold the port.
  if curl -sf "http://127.0.0.1:$MLXRUN_PORT/health" >/dev/null; then
    echo "mlxrun is ready on port $MLXRUN_PORT (pid $pid)"
    exit 0
  fi
  sleep 0.5
done
echo "the server was not ready after 300 s; see $LOG_FILE" >&2
exit 1
