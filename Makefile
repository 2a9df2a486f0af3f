# Quire's verbs. Each sets up what it needs, so `make demo` is all that a fresh machine has to be told.
# Needed beforehand: Python 3.11 or later with venv and pip, and make.

PYTHON    ?= python3
VENV      := .venv
BIN       := $(VENV)/bin
READY     := $(VENV)/.ready
DOCS      := $(VENV)/.ready-docs
FLEET     := $(VENV)/.ready-fleet
# Of the twenty thousand modules Python compiles those that are imported. To compile all takes most of an installation.
INSTALL   := $(BIN)/python -m pip --disable-pip-version-check -qq install --no-compile
MINUTES   ?= 10
# Torch 2.11's, which a GPU may have; .venv has a later one.
OTHER_TRITON := .venv-triton-3.6
# With VENV= in .venv's place: a Python that has torch for CUDA, Transformers, pytest and hypothesis.
GPU_PYTHON = $(if $(VENV),$(BIN)/python,$(PYTHON))

# OpenMP threads that wait otherwise spin, and where cores are busy with something else a small model
# then runs five to ten times slower. Benchmarks choose for themselves.
demo test test-all test-fleet test-triton test-transformers fuzz fuzz-http clients: export OMP_WAIT_POLICY ?= PASSIVE

# Tests start some hundred processes; each would compile the sources anew where this is set.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-gpu test-fleet test-triton triton-3.6 test-transformers check fuzz fuzz-http clients lint format types size bench \
  bench-gpu docs package setup clean

help: ## print this list
	@echo "make VERB   (Python: $(PYTHON); another one: make VERB PYTHON=python3.12)"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-17s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(READY) ## the shipped model's text and memory with each of the four strategies
	@$(BIN)/quire compare

test: $(READY) ## run the tests, in as many processes as there are cores
	@$(BIN)/pytest -n logical --dist loadfile

test-all: $(READY) ## the tests, and the whole of what they sample: minutes for attention on each instruction set
	@$(BIN)/pytest -n logical --dist loadfile -m "not ray"

test-gpu: $(if $(VENV),$(READY)) ## what a GPU can be tested with (installing nothing: make test-gpu VENV= PYTHON=python3)
	@$(GPU_PYTHON) -m benchmarks.gpu.run --checks $(if $(ONLY),--only $(ONLY)) $(OPTIONS)

test-triton: $(READY) triton-3.6 ## each kernel compiled for a GPU that is not here, by Triton 3.6 too
	@$(BIN)/pytest -n 2 --dist load -m "" tests/attention/triton/test_triton_compiled.py -k hopper

triton-3.6: $(READY)
	@test -d $(OTHER_TRITON)/triton || $(INSTALL) --no-deps --target $(OTHER_TRITON) triton==3.6.0 || \
	  { rm -rf $(OTHER_TRITON); echo "Triton 3.6.0 could not be fetched, so nothing is compiled by it." >&2; }

test-transformers: $(READY) ## Transformers' own generation tests with each strategy's cache (SOURCE=checkout MODELS="llama t5")
	@$(BIN)/python tests/transformers_own/run.py $(if $(SOURCE),--source $(SOURCE)) $(MODELS)

test-fleet: $(FLEET) ## a fleet on a real Ray Serve: replicas that are killed, hang and are replaced
	@$(BIN)/pytest tests/fleet_ray -m ray

check: lint types test ## lint, types and test, one after the other

fuzz: $(READY) ## random use of the accounting and the scheduler (make fuzz MINUTES=60 SEED=1)
	@$(BIN)/python tests/fuzz.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

fuzz-http: $(READY) ## random requests to a server (make fuzz-http MINUTES=60 SEED=1)
	@$(BIN)/python tests/fuzz_http.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

clients: $(READY) ## other people's clients, each installed apart, against a server
	@$(BIN)/python tests/clients/environments.py
	@$(BIN)/pytest tests/clients -m ""

lint: $(READY) ## rules and layout of the source (ruff), of docstrings, and of links into the source
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check . || { echo "To lay it out: make format" >&2; exit 1; }
	@$(BIN)/python tools/check_docstrings.py
	@$(BIN)/python tools/check_links.py

format: $(READY) ## lay the source out, and mend what can be mended mechanically
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/python tools/check_links.py --fix

types: $(READY) ## types (mypy, strict)
	@$(BIN)/mypy

size: ## lines of each module, the longest first
	@find src -name '*.py' -exec wc -l {} + | sort -rn | awk ' \
	  $$2 == "total" { next } \
	  { print; lines += $$1 } \
	  END { printf "%8d lines in %d modules\n", lines, NR - 1 }'

bench: $(READY) ## run every benchmark and print its tables
	@set -e; for file in benchmarks/*/bench_*.py; do \
	  module=$$(echo "$${file%.py}" | tr / .); \
	  echo "== python -m $$module"; $(BIN)/python -m $$module; \
	done

bench-gpu: $(if $(VENV),$(READY)) ## the same, and then its speeds (some parts: make bench-gpu ONLY=decode,prefill)
	@$(GPU_PYTHON) -m benchmarks.gpu.run $(if $(ONLY),--only $(ONLY)) $(OPTIONS)

docs: $(DOCS) ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html is ready."

package: $(READY) ## build a wheel and an sdist into dist/, and check what an index would show
	@$(INSTALL) -c constraints.txt -e '.[package]'
	@$(BIN)/python -m build --no-isolation
	@$(BIN)/twine check --strict dist/*

setup: $(READY) ## make .venv, with Quire and its tools
	@echo "$(VENV) is ready."

clean: ## remove all that these verbs have made, .venv too
	@rm -rf $(VENV) $(OTHER_TRITON) site build dist quire.svg .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests tools examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp says that .venv holds what these two files ask for. What failed half-way is simply repeated;
# after a change of these files only the difference is installed. For another Python: make clean first.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "There is no $(PYTHON) here. Install Python 3.11 or later, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) --version 2>&1); Quire needs 3.11 or later. Name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  echo "[1/3] Making $(VENV) with $$($(PYTHON) --version)."; $(PYTHON) -m venv --clear $(VENV); }
	@echo "[2/3] Installing torch, the large one: about a minute, more on a slow line."
	@$(INSTALL) -c constraints.txt torch
	@echo "[3/3] Installing Quire, transformers and the tools: about a minute."
	@$(INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

$(FLEET): $(READY)
	@echo "Installing Ray: half a minute."
	@$(INSTALL) -c constraints.txt -e '.[fleet]'
	@touch $@

$(DOCS): $(READY)
	@echo "Installing mkdocs: a few seconds."
	@$(INSTALL) -c constraints.txt -e '.[docs]'
	@touch $@
