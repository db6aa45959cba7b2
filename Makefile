# Targets of a checkout. `make` lists them. EXTRA=gpu installs the packages for NVIDIA GPUs instead of those for CPUs.
SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup sglang demo test check gpu lint type bench docs slurm sandbox browser

EXTRA ?= cpu
HOSTS ?= 1
TASK ?= work3
ENGINE ?= $(if $(filter latent,$(TASK)),sglang,vllm)
MODE ?= sync
STRATEGY ?= megatron
# Test processes. Complete runs wait for their own processes now and then, so 2 cores can serve 3 of them.
WORKERS ?= 3
PY := .venv/bin/python
# One thread per process: runs and tests start several processes, and more threads than cores are slower than one.
export OMP_NUM_THREADS ?= 1

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-7s %s\n", $$1, $$2}' Makefile

setup: ## create .venv (the other targets do this too)
	@EXTRA=$(EXTRA) scripts/setup.sh

demo: setup $(filter sglang,$(ENGINE)) ## train a tiny MoE with DAPO, print the accuracy before and after; ARGS='trainer.steps=10' sets keys; HOSTS=2 simulates two hosts; ENGINE=sglang; TASK=tool, TASK=game: several turns; TASK=agent: a program with OpenAI's client; TASK=see: images; TASK=distill: distillation from a teacher; TASK=dpo: DPO on pairs of responses; TASK=latent: DeepSeek-V3 with SGLang; MODE=async; STRATEGY=fsdp2: transformers' dense model
	@$(PY) scripts/demo.py --task $(TASK) --mode $(MODE) --strategy $(STRATEGY) --engine $(ENGINE) --hosts $(HOSTS) $(ARGS)

test: setup ## run the test suite; ARGS='tests/unit -k packing' selects a part
	@$(PY) -m pytest -q -n $(WORKERS) --dist loadscope --no-loadscope-reorder $(ARGS)

check: lint type ## lint, types and unit tests except slow ones: the inner loop
	@$(PY) -m pytest -q -n $(WORKERS) --dist loadscope --no-loadscope-reorder -m 'not slow' tests/unit $(ARGS)

gpu: EXTRA := $(shell command -v nvidia-smi >/dev/null && echo gpu || echo cpu)
gpu: setup ## run the tests and benchmarks that need a GPU, in stages; without one, list their requirements; ARGS='--stages vllm runs' selects
	@$(PY) -m tests.gpu $(ARGS)

sglang: setup ## create .venv-sglang, the environment of rollout.engine=sglang
	@EXTRA=$(EXTRA) scripts/setup_sglang.sh

lint: setup ## ruff: rules and format; hadolint: images
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@.venv/bin/hadolint docker/*.Dockerfile

type: setup ## mypy
	@$(PY) -m mypy

slurm: ## install SLURM and munge for the tests of job scripts (Debian, Ubuntu; as root)
	@scripts/setup_slurm.sh

sandbox: ## install bubblewrap, the sandbox for code written by models (Debian, Ubuntu; as root)
	@scripts/setup_sandbox.sh

browser: ## install Chromium for the tests of the report (Debian, Ubuntu; as root)
	@scripts/setup_browser.sh

docs: setup ## build the documentation site, build/docs/index.html; warnings are errors
	@$(PY) -c 'import myst_parser, pydata_sphinx_theme, sphinxcontrib.mermaid' 2>/dev/null || \
	  $(PY) -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@$(PY) -m sphinx --builder html --fail-on-warning --quiet $(ARGS) docs build/docs
	@echo build/docs/index.html

bench: setup ## run the benchmarks and print one table: ours, peer or limit, ratio
	@$(PY) -m benchmarks $(ARGS)
