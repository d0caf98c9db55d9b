"""The command `mlxrun-lm-eval`: lm-evaluation-harness' own command, with the model `mlxrun`.

The harness (0.4.13) looks `--model` up in a table of its own and loads no plugins. So this command adds the
model to that table, and then starts the harness.
"""

from __future__ import annotations

import sys

from mlxrun.core.errors import MlxrunError
from mlxrun.core.terminal import print_line

MODEL = "mlxrun.evals.harnesses.lm_eval_model:LmEvalModel"


def main() -> int:
    """Run `lm_eval` with the arguments of the command line. Exit codes are those of mlxrun's own commands."""
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ModuleNotFoundError as error:
        return fail(f"{error}; pip install 'lm-eval[api]'", 2)
    if "mlxrun" not in model_registry:
        model_registry.register("mlxrun", target=MODEL)
    try:
        cli_evaluate()
    except MlxrunError as error:
        return fail(str(error), error.exit_code)
    return 0


def fail(text: str, code: int) -> int:
    """Print an error of the command, and return its exit code."""
    print_line(f"mlxrun-lm-eval: {text}", sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
