# The two commands of the README are `make demo` and `make test`; everything else serves them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NODES ?= 10

.PHONY: help setup protos lint unit sim soak test demo image cluster-up cluster-shell cluster-down torch-test bench-recovery bench-slurm bench-standby bench-cancel bench-core test-long chaos clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

$(BIN)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || sh slurm/image/host-setup.sh \
	    "$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(BIN)/.ready ## virtual environment with everything that development and the tests need

protos: setup ## regenerate src/muster/v1 from protos/
	$(BIN)/python protos/generate.py

lint: setup ## ruff and strict mypy (also part of the tests)
	$(BIN)/python -Im pytest -q tests/unit/test_linters.py

unit: setup ## lint and unit tests: seconds, no container
	$(BIN)/python -Im pytest -n 2 tests/unit

SIMULATOR := $(BIN)/python -m muster.daemon.coordinator.simulator

sim: setup ## two thousand simulated worlds of faults, and planted bugs; one seed with its transcript: make sim SEED=7
ifdef SEED
	@$(SIMULATOR) --seed $(SEED)
else
	@$(BIN)/python -Im pytest -q tests/simulator/test_seeds.py
	@$(BIN)/python -Im pytest -q -n 2 tests/simulator/test_mutants.py
endif

SECONDS ?= 600
soak: setup ## simulated worlds for as long as it is given, never the same: make soak SECONDS=3600
	@$(SIMULATOR) --seconds $(SECONDS)

CLUSTER := $(BIN)/python -m muster.slurm.cluster

image: setup ## build the cluster's container image (three minutes from nothing, a second after a change)
	@sh slurm/image/host-setup.sh
	@$(BIN)/python -m muster.slurm.image build

cluster-up: image ## start a Slurm cluster of containers: make cluster-up NODES=10
	@$(CLUSTER) up --nodes $(NODES)

cluster-shell: ## a shell on the cluster's login node, as the ordinary user alice
	@$(CLUSTER) shell

cluster-down: ## remove the cluster, and what runs that died have left
	@$(CLUSTER) down
	@$(CLUSTER) down --stale

torch-test: image ## the tests that need PyTorch, inside the image
	@$(BIN)/python -m muster.slurm.image run -- python3 -m pytest -p no:cacheprovider tests/torch

demo: image ## a training job outlives a dead node, on one screen
	@$(BIN)/python -m muster.slurm.cluster.demo

# The image is built beside the unit tests: it mostly waits for packages.
test: setup ## everything that is promised: unit tests, simulated worlds, PyTorch inside the image, a real Slurm
	@$(MAKE) --no-print-directory image >$(VENV)/image.log 2>&1 & image=$$!; \
	    trap 'kill $$image 2>/dev/null' INT TERM; \
	    $(BIN)/python -Im pytest --timeout 120 -n 2 tests/unit; unit=$$?; \
	    wait $$image || { cat $(VENV)/image.log; exit 1; }; exit $$unit
	@$(BIN)/python -Im pytest --timeout 420 tests/simulator/test_seeds.py
	@$(BIN)/python -Im pytest --timeout 420 -n 2 tests/simulator/test_mutants.py
	@$(BIN)/python -m muster.slurm.image run -- python3 -m pytest -p no:cacheprovider tests/torch
	@$(BIN)/python -Im pytest --timeout 400 --durations 12 -n 2 --dist loadfile --no-loadscope-reorder tests/cluster

test-long: test ## what takes longer: ten minutes each of worlds never seen before, and of chaos on a real Slurm
	@$(SIMULATOR) --seconds 600
	@$(BIN)/python -m muster.slurm.cluster.chaos --minutes 10

MINUTES ?= 10
chaos: image ## random faults against two training jobs on a real Slurm: make chaos MINUTES=10
	@$(BIN)/python -m muster.slurm.cluster.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

bench-recovery: image ## time from each fault to the first step after it, on a cluster of containers
	@$(BIN)/python -m benchmarks.bench_recovery

bench-slurm: image ## what each call of the Slurm client costs, on a cluster of containers
	@$(BIN)/python -m benchmarks.bench_slurm

bench-standby: image ## how long nobody coordinates where a standby takes over, on a cluster of containers
	@$(BIN)/python -m benchmarks.bench_standby

bench-cancel: image ## how long `muster cancel` takes to free everything, on a cluster of containers
	@$(BIN)/python -m benchmarks.bench_cancel

bench-core: setup ## what the coordinator's decisions, its journal, a restart and a simulated world cost
	@$(BIN)/python -m benchmarks.bench_core
