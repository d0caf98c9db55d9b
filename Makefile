# make demo: runs the job and makes its report.  make test: all checks.  Either may come first; both make .venv when it is missing.
PYTHON ?= python3
BIN := .venv/bin
# A file's tests stay together: they share models and servers.
PYTEST_ARGS ?= -n auto --maxprocesses 4 --dist loadfile
BENCH_ARGS ?=
REPRODUCE_ARGS ?=

.PHONY: demo test test-all test-slice test-examples test-product test-mac test-fast clients pin-clients lint format bench bench-gpu reproduce plots cast pictures \
  generate docs clean system-packages wheel check-wheel formula container
.DEFAULT_GOAL := test

demo: .venv/.installed
	$(BIN)/mlxrun batch jobs/eval.jsonl
	@echo "Open the report in a browser: $$($(BIN)/mlxrun report jobs/eval.jsonl)"

test: lint clients
	$(BIN)/pytest -q $(PYTEST_ARGS)

# Everything: the sweeps too, and all the examples of generated cases.
test-all: lint clients
	$(BIN)/pytest -q $(PYTEST_ARGS) -m '' --hypothesis-profile full

# One of SLICES parts of the sweeps: by default the one of the day, of which pytest prints how to run it again.
SLICES ?= 40
SLICE ?= auto/$(SLICES)
test-slice: .venv/.installed-dev
	$(BIN)/pytest -q $(PYTEST_ARGS) -m sweep --sweep-slice $(SLICE)

# All tests but the sweeps, with all the examples of generated cases.
test-examples: lint clients
	$(BIN)/pytest -q $(PYTEST_ARGS) --hypothesis-profile full

# What matters most in the product's own environment: its threads of BLAS, its kernels, its lengths of steps.
PRODUCT := helpers/test_environment.py parity/test_text.py parity/test_prefix_cache_engine.py parity/test_speculation.py engine/test_engine.py \
  jobs/run/test_job_run.py server/test_app.py
test-product: .venv/.installed-dev
	env -u OPENBLAS_NUM_THREADS -u OPENBLAS_CORETYPE TEST_ENVIRONMENT=product $(BIN)/pytest -q $(PYTEST_ARGS) -m 'not sweep and not slow' $(addprefix tests/,$(PRODUCT))

# As far as Linux can show a Mac: no /proc, and a Metal device that is there and refuses to compute.
test-mac: .venv/.installed-dev
	$(BIN)/pytest -q $(PYTEST_ARGS) --pretend-mac

# The quick tests: no servers, no kills, no evals, no generated cases, and no sweeps over families, formats and fields.
test-fast: .venv/.installed-dev
	$(BIN)/pytest -q $(PYTEST_ARGS) -m 'not thorough and not slow and not sweep'

# The client libraries of tests/clients, which must not share an environment with mlxrun: exactly the versions of
# requirements/ and package-lock.json.
NODE := tests/clients/node
clients: $(patsubst %,.venv-clients/%/.installed,openai2 openai3 harnesses ray-serve) $(NODE)/node_modules/.installed

# The evaluation harnesses load mlxrun's adapters by its entry points, so it is installed beside them.
.venv-clients/harnesses/.installed: pyproject.toml

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m tools.docs_site.prose

bench: .venv/.installed
	$(BIN)/mlxrun bench engine $(BENCH_ARGS)

# On a machine with a GPU: all figures of README and docs/ that come from one.
bench-gpu: .venv/.installed
	$(BIN)/python -m benchmarks gpu $(BENCH_ARGS)

# The same lines under conditions that may change no byte of an answer. With OpenBLAS' kernels for x86 processors
# without AVX-512 most sums depend on the number of threads, so that a condition which lets it differ is found out.
KERNELS := $(shell grep -qsm1 ' avx2 ' /proc/cpuinfo && echo OPENBLAS_CORETYPE=Haswell)
reproduce: .venv/.installed-dev
	$(KERNELS) $(BIN)/python -m benchmarks reproduce $(REPRODUCE_ARGS)

# Draws docs/images from benchmarks/results. `cast` records the killed and resumed job again first.
plots: .venv/.installed-plots
	$(BIN)/python -m benchmarks.plots

cast: .venv/.installed-plots
	$(BIN)/python -m benchmarks.plots.record
	$(BIN)/python -m benchmarks.plots

# Photographs reports and the page of a server for docs/images, in a headless Chromium.
pictures: .venv/.installed
	$(BIN)/python -m benchmarks.report_pictures
	$(BIN)/python -m benchmarks.ui_pictures

# Everything that is made from mlxrun/config/settings.py, the settings of suites and the tables of fields; tests fail when one of these is stale.
generate: .venv/.installed
	$(BIN)/python -m tools.config_files
	$(BIN)/python -m tools.family_results
	$(BIN)/python -m tools.machine_tables
	$(BIN)/python -m tools.field_reference
	$(BIN)/python -m tools.grafana_dashboard

# The documentation site, in site/: a broken link or anchor, or a page that no menu has, is an error.
docs: .venv/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open site/index.html in a browser."

# What tests need beside Python: OpenBLAS, without which float32 is 30 times slower on Linux, and a browser for reports.
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
PACKAGES := libopenblas0-pthread bubblewrap $(shell command -v chromium chromium-browser google-chrome >/dev/null || echo chromium) \
  $(shell command -v clang++-19 clang++ >/dev/null || echo clang-19)
system-packages:
	@if command -v apt-get >/dev/null; then $(SUDO) apt-get update -qq && $(SUDO) apt-get install -qq -y --no-install-recommends $(PACKAGES); \
	  else echo 'make system-packages: there is no apt-get here; nothing is installed'; fi

# What a release is made of, in dist/. RELEASE_URL is where its files will be found.
RELEASE_URL ?= file://$(CURDIR)/dist
wheel: .venv/.installed-dev
	rm -rf dist
	$(BIN)/uv build -q --out-dir dist

check-wheel: wheel
	$(BIN)/python -m tools.release.check_wheel dist

formula: check-wheel
	$(BIN)/python -m tools.release.formula dist $(RELEASE_URL)

# BACKEND: cpu or cuda. Any program with docker's options may build it.
CONTAINER ?= docker
BACKEND ?= cpu
container: wheel
	$(CONTAINER) build -f packaging/Containerfile --build-arg BACKEND=$(BACKEND) -t mlxrun:$(BACKEND) dist

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find mlxrun tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# uv takes seconds for what takes pip minutes; where the package index is configured for pip only, pip does it.
install = $(BIN)/uv pip install -q --python $(1)/bin/python $(2) || $(BIN)/python -m pip --python $(1)/bin/python install -q $(2)

# Stamps: what is installed is as new as pyproject.toml. The dev install covers the plain one.
$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mlxrun needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q uv || true

.venv/.installed: pyproject.toml | $(BIN)/python
	$(call install,.venv,-e '.[vision]')
	@touch $@

.venv/.installed-dev: pyproject.toml | $(BIN)/python
	$(call install,.venv,-e '.[dev]')
	@touch .venv/.installed $@

.venv/.installed-plots: pyproject.toml | $(BIN)/python
	$(call install,.venv,-e '.[plots]')
	@touch .venv/.installed $@

.venv-clients/%/.installed: tests/clients/requirements/%.txt | .venv/.installed-dev
	$(BIN)/python -m venv --clear --without-pip $(@D)
	$(call install,$(@D),-r $<)
	@touch $@

$(NODE)/node_modules/.installed: $(NODE)/package-lock.json
	@if command -v npm >/dev/null; then npm ci --loglevel=error --prefix $(NODE) && touch $@; \
	  else echo 'make clients: there is no npm here; the tests with Node are skipped'; fi

# Pins again what tests/clients/requirements/*.in ask for.
pin-clients: .venv/.installed-dev
	for name in openai2 openai3 harnesses ray-serve; do $(BIN)/uv pip compile -q --universal --no-annotate --no-header \
	  --python-version 3.11 tests/clients/requirements/$$name.in -o tests/clients/requirements/$$name.txt; done
