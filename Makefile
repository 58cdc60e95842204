# Two commands: `make demo` and `make test`. Each sets up what it needs, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types tests mutants docs clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(VENV)/installed ## make .venv with agro and its development tools

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "agro needs Python 3.11 or newer as '$(PYTHON)' (found: $$($(PYTHON) --version 2>&1)); say which: make PYTHON=/path/to/python3.11 …"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "agro needs the venv module of $(PYTHON) (Debian: apt-get install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup ## train a small model from nothing: warm-up, fresh samples, then the store alone
	$(BIN)/python -m agro.demo --out runs/demo

test: lint types tests ## all checks

lint: setup ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## mypy
	$(BIN)/mypy

tests: setup ## pytest
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

mutants: setup ## change the code of objectives, step, sampler and draw in one place at a time: does a test fail?
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[mutation]'
	$(BIN)/python benchmarks/mutation/run.py

docs: setup ## the guide and the reference as pages in build/docs
	$(BIN)/python -m mkdocs build --strict --quiet

clean: ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info
