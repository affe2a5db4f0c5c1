# Two commands do everything: `make serve` and `make test`. Both make .venv from the lock files
# first, and make it anew when a lock file has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEMO := examples/demo_model/checkpoint
MODEL ?= $(DEMO)
HOST ?= 127.0.0.1
PORT ?= 8000
# The demo's device pool holds a quarter of the rows of a long prompt, so that offloading shows;
# another model takes what the machine has.
DEMO_FLAGS := --device-pool-tokens 2560 --host-pool-gib 0.25 --max-model-len 16384 \
    --max-num-seqs 8 --max-num-batched-tokens 256
SERVE_FLAGS ?= $(if $(filter $(DEMO),$(MODEL)),--served-model-name demo $(DEMO_FLAGS))
WORKERS ?= 2
PYTEST_FLAGS ?=
DOCUMENT_TOKENS ?= 20000
# torch of the lock files; its CUDA wheel pins triton, which a CPU build doesn't bring.
TORCH := 2.13.0
TRITON := 3.7.1

.PHONY: serve test test-document pytest lint format bench lock clean

serve: $(VENV)/.package
	$(BIN)/echokv serve $(MODEL) --host $(HOST) --port $(PORT) $(SERVE_FLAGS)

test: lint pytest

# One thread a worker: with two they would fight over two cores.
pytest: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_FLAGS)

# The long-document test at full length; `make test` runs it with 6,000 tokens.
test-document: $(VENV)/.dev
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest tests/e2e/test_document.py \
	    --document-tokens $(DOCUMENT_TOKENS) $(PYTEST_FLAGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.package
	$(BIN)/echokv bench throughput $(DEMO) --num-prompts 8 --input-len 512 --output-len 32 \
	    $(DEMO_FLAGS) --output-json build/throughput.json

$(VENV)/.locked: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    "echokv needs Python 3.11 or newer, for instance: make PYTHON=python3.12")'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -r requirements.lock
	touch $@

$(VENV)/.package: $(VENV)/.locked pyproject.toml
	$(PIP) install --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.package requirements-dev.lock
	$(PIP) install -r requirements-dev.lock
	touch $@

# Resolve anew within pyproject.toml's bounds. CUDA libraries stay out of the locks, as torch's own
# wheel pins them where it needs them; but for NVRTC, which compiles our kernels in CI.
FREEZE := build/lock/bin/python -m pip freeze --all --exclude pip --exclude echokv
KEPT_PINS := nvidia-cuda-nvrtc\|cuda-bindings\|cuda-pathfinder
CLEAN_PINS := sed -e 's/+cpu$$//' -e '/^\($(KEPT_PINS)\)=/b' -e '/^nvidia-/d' -e '/^cuda-/d'
lock:
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install "torch==$(TORCH)" setuptools .
	(echo "# Serving. Made by 'make lock'."; $(FREEZE) | $(CLEAN_PINS) | grep -v '^triton=') \
	    > requirements.lock
	build/lock/bin/pip install "torch==$(TORCH)" "triton==$(TRITON)" ".[bench,dev]"
	(echo "# Tests, linters and benchmarks, with what serving needs. Made by 'make lock'."; \
	    $(FREEZE) | $(CLEAN_PINS)) > requirements-dev.lock

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
