# The two commands of the README are `make demo` and `make test`; everything else serves them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NODES ?= 10
TOPOLOGY ?= tree
# Debian of the test cluster: forky has Slurm 26.05, trixie has Slurm 24.11.
SUITE ?= forky
RELEASE := $(VENV)/release-tools

# Where this is set, each Python process that a test starts would compile all of Muster that it imports, and each process of
# pytest-xdist would rewrite all tests in each run.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: beside-cluster help setup protos lint unit sim soak fuzz test demo image cluster-up cluster-shell cluster-down torch-test adapters-test deepspeed-test object-store-test bench-recovery bench-slurm bench-standby bench-start bench-cancel bench-checkpoint bench-core bench-cli bench-daemon bench-placement bench-sampler bench-see bench-stragglers bench-trust bench-tls bench-gpu gpu-test test-long chaos figures lock audit sbom dist clean

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

# A watchdog tells which test is slow once a part of the run exceeds its --budget; it fails nothing. --timeout ends a test
# that hangs, and is far above what any test takes on a busy machine.
PYTEST := $(BIN)/python -Im pytest --timeout 900
UNIT := $(PYTEST) --budget 120 -n 3 --dist worksteal tests/unit

unit: setup ## lint and unit tests: a minute or so, no container
	@$(UNIT)

SIMULATOR := $(BIN)/python -m muster.simulator
SEEDS := $(PYTEST) --budget 105 tests/simulator/test_seeds.py
PLANTED_BUGS := $(PYTEST) --budget 60 -n 2 --dist worksteal tests/simulator/test_planted_bugs.py

sim: setup ## two thousand simulated worlds of faults, and planted bugs; one seed with its transcript: make sim SEED=7
ifdef SEED
	@$(SIMULATOR) --seed $(SEED)
else
	@$(SEEDS)
	@$(PLANTED_BUGS)
endif

SECONDS ?= 600
soak: setup ## simulated worlds for as long as it is given, never the same: make soak SECONDS=3600
	@$(SIMULATOR) --seconds $(SECONDS)

FUZZ = $(BIN)/python -m fuzzing $(if $(TARGET),--target $(TARGET))
fuzz: setup ## ten minutes of hostile input for each parser and server; one: make fuzz TARGET=job_spec SECONDS=60
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	@$(if $(INPUT),,$(FUZZ) --seconds 120 --planted)
	@$(FUZZ) --seconds $(SECONDS) $(if $(INPUT),--input $(INPUT))

CLUSTER := $(BIN)/python -m muster.slurm.testcluster

image: setup ## build the cluster's container image for the tests (three minutes from nothing, a second after a change)
	@sh slurm/image/host-setup.sh
	@$(BIN)/python -m muster.slurm.image build --suite $(SUITE)

cluster-up: image ## start a Slurm cluster of containers: make cluster-up NODES=10 TOPOLOGY=block
	@$(CLUSTER) up --nodes $(NODES) --topology $(TOPOLOGY) --suite $(SUITE)

cluster-shell: ## a shell on the cluster's login node, as the ordinary user alice
	@$(CLUSTER) shell

cluster-down: ## remove the cluster, and what runs that died have left
	@$(CLUSTER) down
	@$(CLUSTER) down --stale

TORCH := $(BIN)/python -m muster.slurm.image run -- python3 -m pytest -p no:cacheprovider --budget 400 tests/torch

torch-test: image ## the tests that need PyTorch, inside the image
	@$(TORCH)

# The libraries are large: they have an environment of their own, and no part of make test waits for them.
ADAPTERS := $(VENV)/adapters
$(ADAPTERS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ADAPTERS)
	$(ADAPTERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[adapters]' pytest pytest-asyncio
	@touch $@

adapters-test: $(ADAPTERS)/.ready ## train with PyTorch Lightning, transformers, Accelerate and optimizers of 8 bits themselves
	@$(ADAPTERS)/bin/python -Im pytest -p no:cacheprovider tests/adapters -m long

# Its build looks for PyTorch, and compiles its operators only if it is not told not to.
DEEPSPEED := $(VENV)/deepspeed
$(DEEPSPEED)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DEEPSPEED)
	$(DEEPSPEED)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch]' pytest pytest-asyncio \
	    setuptools wheel
	DS_BUILD_OPS=0 $(DEEPSPEED)/bin/pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt \
	    deepspeed
	@touch $@

deepspeed-test: $(DEEPSPEED)/.ready ## train with DeepSpeed's engine
	@$(DEEPSPEED)/bin/python -Im pytest -p no:cacheprovider tests/adapters/test_deepspeed.py -m long

# They need another python-dateutil than the rest. Without these versions pip tries one of boto3 after the other, which
# takes minutes. They are not in constraints.txt, because each change of it builds the images from nothing; no
# release installs them, so `make audit` does not ask about them.
S3 := $(VENV)/s3
S3_PINS := aiobotocore==3.10.0 boto3==1.43.117 botocore==1.43.117
$(S3)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(S3)
	{ grep -v '^python-dateutil==' constraints.txt; printf '%s\n' $(S3_PINS); } >$(S3)/constraints.txt
	$(S3)/bin/pip install --quiet --disable-pip-version-check -c $(S3)/constraints.txt -e '.[s3]' 'moto[server]' \
	    pytest pytest-asyncio pytest-timeout
	@touch $@

object-store-test: $(S3)/.ready ## flushes to an S3 server on loopback that throttles, fails and does not answer
	@$(S3)/bin/python -Im pytest -p no:cacheprovider tests/s3 -m long

# The image is built beside the virtual environment, with the host's own Python: it needs nothing else. It lacks what only
# the tests need.
demo: ## a training job outlives a dead node, on one screen; on Slurm 24.11: make demo SUITE=trixie
	@sh slurm/image/host-setup.sh
	@PYTHONPATH=src $(PYTHON) -m muster.slurm.image demo --suite $(SUITE) & image=$$!; \
	    trap 'kill $$image 2>/dev/null' INT TERM; \
	    $(MAKE) --no-print-directory setup; setup=$$?; \
	    wait $$image && exit $$setup
	@$(BIN)/python -m muster.slurm.testcluster.demo --suite $(SUITE)

# The image is built beside the unit tests: it mostly waits for packages. The cluster tests mostly wait for Slurm, so the
# simulated worlds and the PyTorch tests run beside them, with the time that they leave. What failed is printed last.
test: setup ## everything that is promised: unit tests, simulated worlds, PyTorch inside the image, a real Slurm
	@$(MAKE) --no-print-directory image >$(VENV)/image.log 2>&1 & image=$$!; \
	    trap 'kill $$image 2>/dev/null' INT TERM; \
	    $(UNIT); unit=$$?; \
	    wait $$image || { cat $(VENV)/image.log; exit 1; }; exit $$unit
	@nice -n 19 $(MAKE) --no-print-directory beside-cluster >$(VENV)/beside.log 2>&1 & beside=$$!; \
	    trap 'kill $$beside 2>/dev/null' INT TERM; \
	    { $(PYTEST) --budget 860 -n 3 --dist worksteal tests/cluster; echo $$? >$(VENV)/cluster.status; } | tee $(VENV)/cluster.log; \
	    wait $$beside; beside=$$?; cat $(VENV)/beside.log; \
	    read cluster <$(VENV)/cluster.status; \
	    [ $$cluster = 0 ] || sed -n '/^=* short test summary/,$$p' $(VENV)/cluster.log; \
	    exit $$((cluster | beside))

beside-cluster:
	@$(TORCH)
	@$(SEEDS)
	@$(PLANTED_BUGS)

test-long: test $(RELEASE)/.ready ## what takes longer: repetitions of unit tests, Slurm's own rules, the cluster tests on Slurm 24.11, ten minutes each of worlds never seen before, and of chaos on a real Slurm
	@$(PYTEST) -n 2 -m 'long and not alone' tests/unit tests/cluster
	@$(PYTEST) -m alone tests/cluster
	@$(PYTEST) -n 2 --suite trixie tests/cluster
	@$(PYTEST) --suite trixie -m long $(addprefix tests/cluster/test_,slurm_rules.py slurm_contract.py slurm_faults.py confinement.py)
	@$(PYTEST) -n 2 -m hypothesis --hypothesis-profile long tests/unit
	@$(TORCH) -m long
	@$(MAKE) --no-print-directory adapters-test
	@$(MAKE) --no-print-directory deepspeed-test
	@$(MAKE) --no-print-directory object-store-test
	@$(SIMULATOR) --seconds 600
	@$(BIN)/python -m muster.slurm.testcluster.chaos --minutes 10

MINUTES ?= 10
chaos: image ## random faults against two training jobs on a real Slurm: make chaos MINUTES=10
	@$(BIN)/python -m muster.slurm.testcluster.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

bench-recovery: image ## time from each fault to the first step after it, on a cluster of containers
	@$(BIN)/python -m benchmarks.bench_recovery --suite $(SUITE) --json build/recovery.json

figures: setup ## the README's picture and table of recoveries, from what bench-recovery measured last
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[report]'
	@$(BIN)/python -m benchmarks.recovery_figures

bench-slurm: image ## what each call of the Slurm client costs, on a cluster of containers
	@$(BIN)/python -m benchmarks.bench_slurm --suite $(SUITE)

bench-standby: image ## how long nobody coordinates when a standby takes over, on a cluster of containers
	@$(BIN)/python -m benchmarks.bench_standby

bench-start: image ## from the submission to the first step, beside torchrun without Muster; fewer rounds: ARGS="--rounds 3"
	@$(BIN)/python -m benchmarks.bench_start $(ARGS)

bench-cancel: image ## how long `muster cancel` takes to free everything, on a cluster of containers
	@$(BIN)/python -m benchmarks.bench_cancel

bench-checkpoint: setup ## what memory checkpoints cost at real sizes, beside other libraries; a quick look: ARGS="--gib 0.25 --rounds 3 --no-peers"
	@$(BIN)/python -m benchmarks.bench_checkpoint $(ARGS)

bench-core: setup ## what the coordinator's decisions, its journal, a restart and a simulated world cost
	@$(BIN)/python -m benchmarks.bench_core

bench-daemon: setup ## what the node daemon costs, beside Prometheus' node exporter; ARGS=--planned-swap: that, too
	@$(BIN)/python -m benchmarks.bench_daemon $(ARGS)

bench-placement: image ## how good and how fast the map from ranks to nodes is, against the exact optimum and other orders
	@$(BIN)/python -m benchmarks.bench_placement

bench-tls: image ## what TLS costs a recovery: pairs of the same fault on two clusters of containers
	@$(BIN)/python -m benchmarks.bench_tls

bench-cli: image ## how long the commands of users take on a login node
	@$(BIN)/python -m benchmarks.bench_cli

bench-sampler: setup ## what the order of a billion samples costs
	@$(BIN)/python -m benchmarks.bench_sampler

bench-see: setup ## what it costs to see what a job does
	@$(BIN)/python -m benchmarks.bench_see $(ARGS)

bench-stragglers: image ## how soon a slow rank is named, whom a clean run names, and what that costs
	@$(BIN)/python -m muster.slurm.image run -- python3 -m benchmarks.bench_stragglers

# For a machine with a GPU. Its own python3 has PyTorch, and Muster with what it needs.
gpu-test: ## the tests that need an NVIDIA GPU, with the site's own python3
	@$(PYTHON) -m pytest -p no:cacheprovider tests/gpu tests/torch/test_checkpoint_gang.py tests/torch/test_late_copies.py -k 'gpu or cuda'

bench-gpu: ## what a snapshot, at once and overlapped, and the step timer cost on a GPU, with the site's own python3
	@$(PYTHON) -m benchmarks.bench_gpu

bench-trust: setup ## what callers without rights cost
	@$(BIN)/python -m benchmarks.bench_trust

# The tools of a release have an environment of their own, with locked hashes: they are no part of the development tools.
$(RELEASE)/.ready: release/tools.lock
	@rm -rf $(RELEASE)
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

# --universal: for each Python and machine that pyproject.toml allows. constraints.txt: a release has the versions that
# the tests ran with. PyTorch is the site's own.
COMPILE := $(RELEASE)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
    --no-annotate --no-emit-index-url
lock: $(RELEASE)/.ready ## renew the locked hashes of a release, for the versions of constraints.txt
	@$(COMPILE) --strip-extras --extra coordinator --extra daemon --constraints constraints.txt \
	    --output-file release/requirements.lock pyproject.toml
	@$(COMPILE) --output-file release/tools.lock release/tools.in

audit: $(RELEASE)/.ready ## known vulnerabilities of what is locked: asks an advisory database over the network
	@$(RELEASE)/bin/python -m release.audit $(AUDIT_OPTIONS)

sbom: $(RELEASE)/.ready ## build/sbom.json (CycloneDX): what a release installs, with licences and dependencies
	@rm -rf $(VENV)/locked
	@mkdir -p build
	@$(PYTHON) -m venv --without-pip $(VENV)/locked
	@$(RELEASE)/bin/pip --python $(VENV)/locked/bin/python install --quiet --disable-pip-version-check --require-hashes \
	    -r release/requirements.lock
	@$(RELEASE)/bin/cyclonedx-py environment --output-reproducible --validate --pyproject pyproject.toml \
	    --output-file build/sbom.json $(VENV)/locked/bin/python
	@echo build/sbom.json

dist: $(RELEASE)/.ready ## the wheel of HEAD in dist/: another build of the same commit gives the same bytes
	@rm -rf dist
	@$(RELEASE)/bin/python -m release.build_wheel dist
	@cp release/requirements.lock dist/
	@cd dist && sha256sum *.whl *.lock | tee SHA256SUMS
