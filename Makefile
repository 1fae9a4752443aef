# make demo | make test. Both make .venv first and say what is missing before long work starts.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
HARDWARE ?= $(shell if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then echo gpu; else echo cpu; fi)

BIN := $(VENV)/bin
LOCK := requirements/$(if $(filter gpu,$(HARDWARE)),gpu.constraints,cpu.lock)
INSTALLED := $(VENV)/.installed-$(HARDWARE)
GPU_FLAG := $(if $(filter gpu,$(HARDWARE)),--gpu)
INSTALLED_FLAG = $(if $(wildcard $(INSTALLED)),--installed)
export PATH := $(abspath $(BIN)):$(PATH)
# Byte code is kept even where the environment forbids it: a hundred processes of the tests and the pipeline import torch
# or vLLM, and compiling those takes longer than most of them run.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help venv demo test lint types fast engine pipeline clean preflight-demo preflight-test

help:  ## Show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: preflight-demo venv  ## Train the predictor, serve with it, compare with plain vLLM (about 25 minutes on two cores)
	@echo "== 1/2  pipeline: prompts -> replies -> labels -> predictor -> registry (dvc repro)"
	dvc repro
	echo "== 2/2  serving: TetriServe and plain vLLM on the same requests"
	target=$$(python -m pipeline.target --print-path)
	tetri bench --model "$$target" --compare --port $(PORT) --workload mixed --num-requests 64 --rate 1.0 \
	  --source data/prepared/test.jsonl --report reports/demo.html --json reports/demo.json

test: preflight-test venv lint types fast engine  ## Lint, types and all tests (under 30 minutes)

lint: venv  ## ruff
	ruff check .
	ruff format --check .

types: venv  ## mypy
	mypy

fast: venv  ## Tests without the engine
	python -m pytest -m "not engine"

engine: venv  ## Tests with the real vLLM engine and a tiny OPT made on the spot
	python -m pytest -m engine

pipeline: venv  ## Only the predictor's pipeline (dvc repro)
	dvc repro

venv: $(INSTALLED)  ## Make the virtual environment

# CPU: everything is in the lock, so nothing is resolved (--no-deps). GPU: pip resolves under constraints, since the CUDA
# libraries differ between drivers. `requirements/check.py` runs `pip check` on the CPU environment and accepts the gaps
# that are left on purpose (torchvision and others; it says why) and no others.
$(INSTALLED): $(LOCK) pyproject.toml requirements/vllm-alias/pyproject.toml requirements/check.py
	@echo "== installing the $(HARDWARE) packages into $(VENV)"
	$(PYTHON) -m venv $(VENV)
	pip() { $(BIN)/python -m pip --disable-pip-version-check "$$@"; }
	if [ $(HARDWARE) = cpu ]; then
	  pip install --progress-bar off --no-deps --no-compile -r $(LOCK) | sed -u -n -E 's/^(Collecting|Installing collected).*/&/p' | cut -c1-100
	  pip install -q --no-deps --no-build-isolation ./requirements/vllm-alias
	  pip install -q --no-deps --no-build-isolation -e .
	  $(BIN)/python requirements/check.py
	else
	  pip install --progress-bar off -c $(LOCK) -e '.[gpu,demo,dev]'
	fi
	touch $@

preflight-demo:
	@$(PYTHON) serving_plugin/preflight.py demo --port $(PORT) $(GPU_FLAG) $(INSTALLED_FLAG)

preflight-test:
	@$(PYTHON) serving_plugin/preflight.py test $(GPU_FLAG) $(INSTALLED_FLAG)

clean:  ## Remove what the pipeline, tests and demo made (not .venv)
	rm -rf data models mlruns metrics plots reports logs .pytest_cache .mypy_cache .ruff_cache
