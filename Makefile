# make demo: runs the job.  make test: all checks.  Either may come first; both make .venv when it is missing.
PYTHON ?= python3
BIN := .venv/bin
# A file's tests stay together: they share models and servers.
PYTEST_ARGS ?= -n auto --maxprocesses 4 --dist loadfile
BENCH_ARGS ?=

.PHONY: demo test test-fast lint format bench plots cast generate clean
.DEFAULT_GOAL := test

demo: .venv/.installed
	$(BIN)/mlxrun batch jobs/eval.jsonl

test: lint
	$(BIN)/pytest -q $(PYTEST_ARGS)

# The quick tests: no servers, no kills, and no sweeps over the families of models.
APART := parity clients robustness server bench benchmarks tools model/snapshot model/test_probe.py \
  structured/test_matcher.py engine/test_engine_real_models.py helpers/test_fixtures.py
test-fast: .venv/.installed-dev
	$(BIN)/pytest -q $(PYTEST_ARGS) -m 'not slow and not sweep' $(addprefix --ignore=tests/,$(APART))

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.installed
	$(BIN)/mlxrun bench engine $(BENCH_ARGS)

# Draws docs/images from benchmarks/results. `cast` records the killed and resumed job again first.
plots: .venv/.installed-plots
	$(BIN)/python -m benchmarks.plots

cast: .venv/.installed-plots
	$(BIN)/python -m benchmarks.plots.record
	$(BIN)/python -m benchmarks.plots

# Everything that is made from mlxrun/config/settings.py; tests fail when one of these is stale.
generate: .venv/.installed
	$(BIN)/python -m mlxrun.config.generate

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find mlxrun tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: what is installed is as new as pyproject.toml. The dev install covers the plain one.
$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mlxrun needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e .
	@touch $@

.venv/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[dev]'
	@touch .venv/.installed $@

.venv/.installed-plots: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[plots]'
	@touch .venv/.installed $@
