# Everything a checkout needs. `make` alone lists the targets. EXTRA=gpu sets up for NVIDIA GPUs instead of CPU.
SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup sglang demo test gpu lint type bench slurm sandbox

EXTRA ?= cpu
HOSTS ?= 1
ENGINE ?= vllm
TASK ?= work3
MODE ?= sync
# Of the test suite. Runs from end to end wait for each other's processes now and then: one more than two cores are busy with.
WORKERS ?= 3
PY := .venv/bin/python
# One thread per process: the runs and the tests start several, and threads that fight for cores are slower than one.
export OMP_NUM_THREADS ?= 1

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-7s %s\n", $$1, $$2}' Makefile

setup: ## make .venv ready (the other targets do it by themselves)
	@EXTRA=$(EXTRA) scripts/setup.sh

demo: setup $(filter sglang,$(ENGINE)) ## warm-start a tiny MoE, improve it with DAPO, accuracy before and after; ARGS='trainer.steps=10' sets keys; HOSTS=2: two pretended; ENGINE=sglang; TASK=tool, TASK=game: several turns; MODE=async
	@$(PY) scripts/demo.py --task $(TASK) --mode $(MODE) --engine $(ENGINE) --hosts $(HOSTS) $(ARGS)

test: setup ## the whole test suite; ARGS='tests/unit -k packing' narrows it
	@$(PY) -m pytest -q -n $(WORKERS) --dist loadscope --no-loadscope-reorder $(ARGS)

gpu: EXTRA := $(shell command -v nvidia-smi >/dev/null && echo gpu || echo cpu)
gpu: setup ## tests and benchmarks that need a GPU; without one, what each of them needs; ARGS as for test
	@code=0; $(PY) -m pytest tests/gpu -q -ra --no-fold-skipped $(ARGS) || code=$$?; \
	$(PY) -m benchmarks --gpu --save || code=$$?; exit $$code

sglang: setup ## make .venv-sglang ready, the environment of rollout.engine=sglang
	@scripts/setup_sglang.sh

lint: setup ## ruff: rules and format
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

type: setup ## mypy
	@$(PY) -m mypy

slurm: ## install SLURM and munge for the test of job scripts (Debian, Ubuntu; as root)
	@scripts/setup_slurm.sh

sandbox: ## install bubblewrap, the sandbox of code that models write (Debian, Ubuntu; as root)
	@scripts/setup_sandbox.sh

bench: setup ## benchmarks, one table: ours, peer or limit, ratio
	@$(PY) -m benchmarks $(ARGS)
