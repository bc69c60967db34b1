# Everything a person or a machine runs here. `make help` lists the targets.
#
#   make demo                                what genkit does, in numbers and pictures (out/demo/)
#   make test                                the default tests
#   make TORCH="torch --index-url URL" demo  another torch build (the default suits CPU machines)

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The first Python >= 3.11 on the path.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
TORCH ?= torch==2.13.0
VENV ?= .venv
WORKERS ?= 2
PYTEST_ARGS ?=
SPHINXOPTS ?=

BIN := $(VENV)/bin
RUN := $(BIN)/python
PIP := $(RUN) -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed
INSTALLED_DOCS := $(VENV)/.installed-docs

# Small tensors lose 10-100x when two threads meet a busy second core: one thread per process, processes side by side.
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
export MPLBACKEND ?= Agg
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help setup demo test test-slow lint format types gallery bench oracles clean distclean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 12

setup: $(INSTALLED)  ## create .venv and install genkit with every CPU extra

# torch goes first and is then held fast, so that no dependency exchanges the light build for another one.
$(INSTALLED): pyproject.toml
	@test -n "$(PYTHON)" || { echo "genkit needs Python >= 3.11, and none is on the path: install one, or make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "setting up $(VENV): a few minutes the first time"
	@$(RUN) -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet --upgrade "pip>=25.1" "setuptools>=77" wheel
	$(PIP) install --quiet $(TORCH)
	$(RUN) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(VENV)/torch.txt
	$(PIP) install --quiet --constraint $(VENV)/torch.txt --editable ".[all]" --group dev
	touch $@

$(INSTALLED_DOCS): $(INSTALLED)
	$(PIP) install --quiet --constraint $(VENV)/torch.txt --group docs
	touch $@

demo: $(INSTALLED)  ## run every method's main job, pictures in out/demo/
	$(BIN)/genkit demo

test: $(INSTALLED)  ## the default tests
	$(RUN) -m pytest -m "not slow and not gpu" -n $(WORKERS) $(PYTEST_ARGS)

test-slow: $(INSTALLED)  ## the long tests
	$(RUN) -m pytest -m "slow and not gpu" -n $(WORKERS) --timeout 1200 $(PYTEST_ARGS)

lint: $(INSTALLED)  ## ruff: rules and format
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(INSTALLED)  ## let ruff fix and format
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# mypy does not know that pipelines/ is genkit.pipelines, so it reads a copy laid out as the wheel is. It keeps no cache:
# one beside a copy that is made anew each time gave errors that were not there, and a whole run takes 15 seconds.
types: $(INSTALLED)  ## mypy over genkit and genkit.pipelines
	rm -rf .typecheck
	mkdir -p .typecheck
	cp -Rp genkit .typecheck/genkit
	cp -Rp pipelines .typecheck/genkit/pipelines
	cd .typecheck && $(abspath $(RUN)) -m mypy --config-file ../pyproject.toml --no-incremental -p genkit

gallery: $(INSTALLED_DOCS)  ## build the site with the gallery into docs/_build/html
	$(RUN) -m sphinx -b html $(SPHINXOPTS) docs docs/_build/html

bench: $(INSTALLED)  ## measure ratios to peers and limits, table in out/bench.md
	$(RUN) benchmarks/run_all.py --out out/bench.md

# Independent implementations some tests compare with; those tests are skipped by name when one is absent.
oracles: $(INSTALLED)  ## install the optional test oracles that need a compiler or only carry data
	-$(PIP) install --quiet --no-build-isolation iisignature
	-$(PIP) install --quiet --no-deps arch

clean:  ## remove what builds and tests leave behind
	rm -rf build dist out .typecheck .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build docs/gallery docs/sg_execution_times.rst *.egg-info
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove the environment too
	rm -rf $(VENV)
