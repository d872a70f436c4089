# Everything a checkout needs: `make demo`, `make test`, `make check`. Each sets itself up, with uv
# where it is installed and with python3's own venv and pip where it is not.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
UV     := $(shell command -v uv 2>/dev/null)

DISTRIBUTIONS := protos foundation membership messaging workloads parameters coordinator participant session
EDITABLE      := $(patsubst %,-e ./%,$(DISTRIBUTIONS))

ifeq ($(UV),)
CREATE  = $(PYTHON) -m venv $(VENV)
# Most modules of PyTorch and of the test tools are never imported: the first import compiles a module.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
else
CREATE  = uv venv --quiet --allow-existing --python '>=3.11' $(VENV)
INSTALL = uv pip install --quiet --python $(BIN)/python
endif

# From the raw limits to what takes longest.
BENCHMARKS := baselines round_overhead scripted gradient_steps pipeline messaging aggregation parameter_server recovery restart s3_store fleet large_model tls closed_flood simulation launch_serve learning
WITH_PEERS := round_overhead large_model simulation

.PHONY: help demo test kills session-kills enrolment-kills simulate bench check format lint types protos protos-check dist sbom audit lock setup setup-dev setup-torch clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

demo: setup  ## four participants train one model on real data through a real coordinator
	@$(BIN)/xain-coordinator demo

test: setup-dev  ## every test; both cores, all parts beside each other
	@$(BIN)/python tests/run.py

# A part of them: make test-unit, test-others (both: test-code), test-integration, test-e2e, test-docs,
# test-containers.
test-%: setup-dev
	@$(BIN)/python tests/run.py $*

simulate: setup-dev  ## simulate the whole system with SEEDS=1000 plans of faults (FIRST=0), or one: SEED=7
	@PYTHONPATH=tests $(BIN)/python -m simulation $(if $(SEED),--seed $(SEED),--first $(or $(FIRST),0) --seeds $(or $(SEEDS),1000))

kills: setup-dev  ## kill real processes until KILLS=100 have died (SEED=0: where to begin)
	KILLS=$(or $(KILLS),100) SEED=$(or $(SEED),0) $(BIN)/python -m pytest -q -k kills_change_nothing tests/e2e/test_kills.py

session-kills: setup-dev  ## the same for the script of a server, between any two lines of it
	KILLS=$(or $(KILLS),100) SEED=$(or $(SEED),0) $(BIN)/python -m pytest -q tests/e2e/test_session_kills.py

enrolment-kills: setup-dev  ## the same for enrolment: join, renew, revoke, until KILLS=100 have died
	KILLS=$(or $(KILLS),100) SEED=$(or $(SEED),0) $(BIN)/python -m pytest -q tests/e2e/test_enrolment_kills.py

bench: setup-dev  ## every benchmark, some 30 minutes on two quiet cores (ANY_LOAD=1: on busy ones); PEERS=1 adds some 10
	@status=0; for name in $(BENCHMARKS); do \
		test -e benchmarks/$$name.py || continue; \
		peers=; case " $(if $(PEERS),$(WITH_PEERS)) " in *" $$name "*) peers=--peers;; esac; \
		echo "== $$name"; \
		$(BIN)/python benchmarks/$$name.py $$peers $(if $(QUICK),--quick) $(if $(ANY_LOAD),--any-load) || status=1; \
	done; echo 'The tables of docs/performance.md: $(BIN)/python benchmarks/tables.py'; exit $$status

check: format lint types protos-check test  ## what CI runs: all but `make demo`

format: setup-dev
	$(BIN)/ruff format --check .

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/buf lint protos

types: setup-dev
	$(BIN)/mypy

protos: setup-dev  ## regenerate the protobuf modules from the .proto files
	PYTHON=$(abspath $(BIN))/python PATH="$(abspath $(BIN)):$$PATH" protos/generate.sh

protos-check: setup-dev
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && mkdir "$$scratch/fresh" && \
	{ PYTHON=$(abspath $(BIN))/python PATH="$(abspath $(BIN)):$$PATH" protos/generate.sh "$$scratch/fresh" 2>"$$scratch/log" || \
		{ cat "$$scratch/log" >&2; exit 1; }; } && \
	for file in $$( (cd "$$scratch/fresh" && find . -type f; cd "$(abspath protos/src)" && find . -name '*_pb2*.py' -o -name '*_pb2*.pyi') | sort -u); do \
		diff -u "protos/src/$$file" "$$scratch/fresh/$$file" || \
			{ echo 'generated modules are not those of the .proto files: run make protos, and delete those without one'; exit 1; }; \
	done

dist: setup  ## wheels in dist/: one file for a site, and those of all distributions
	@$(BIN)/python deploy/dist.py dist

sbom: setup  ## what an installation consists of, as CycloneDX, in dist/sbom.json
	@mkdir -p dist && $(BIN)/python deploy/sbom.py > dist/sbom.json && echo dist/sbom.json

audit:  ## known holes in the locked packages (asks an index over the network, by pip-audit)
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && $(PYTHON) -m venv "$$scratch/venv" && \
	"$$scratch/venv/bin/pip" install --quiet pip-audit && \
	for lock in locks/requirements-coordinator.lock locks/requirements-participant.lock locks/requirements-s3.lock; do \
		"$$scratch/venv/bin/pip-audit" --require-hashes --disable-pip -r $$lock || exit 1; \
	done

lock:  ## refresh the hash-only locks (needs uv)
	uv lock --quiet
	uv export --quiet --frozen --all-packages --no-default-groups --group build --no-emit-workspace \
		--no-header --no-annotate --format requirements-txt -o locks/requirements.lock
	uv export --quiet --frozen --all-packages --all-groups --no-emit-workspace \
		--no-header --no-annotate --format requirements-txt -o locks/requirements-dev.lock
	uv export --quiet --frozen --only-group build --no-emit-workspace \
		--no-header --no-annotate --format requirements-txt -o locks/requirements-build.lock
	uv export --quiet --frozen --package xain-coordinator --extra export --extra http --extra parameters --no-default-groups \
		--no-emit-workspace --no-header --no-annotate --format requirements-txt \
		-o locks/requirements-coordinator.lock
	uv export --quiet --frozen --package xain-participant --extra tables --no-default-groups --no-emit-workspace \
		--no-header --no-annotate --format requirements-txt -o locks/requirements-participant.lock
	uv export --quiet --frozen --package xain-participant --extra tables --extra bagging --no-default-groups \
		--no-emit-workspace --no-header --no-annotate --format requirements-txt \
		-o locks/requirements-participant-bagging.lock
	uv export --quiet --frozen --package xain-participant --extra sparse --no-default-groups \
		--no-emit-workspace --no-header --no-annotate --format requirements-txt \
		-o locks/requirements-participant-sparse.lock
	uv export --quiet --frozen --package xain-workloads --extra s3 --no-default-groups \
		--no-emit-workspace --no-header --no-annotate --format requirements-txt -o locks/requirements-s3.lock

setup: $(VENV)/.ready  ## the environment that running needs
setup-torch: $(VENV)/.ready-torch  ## PyTorch in it, for neural workloads
setup-dev: $(VENV)/.ready-dev  ## PyTorch and what testing needs in it

$(VENV)/.ready: locks/requirements.lock $(wildcard */pyproject.toml)
	@echo 'Setting up $(VENV) (once) ...'
	@test -x $(BIN)/python || $(CREATE)
	@$(INSTALL) --require-hashes -r locks/requirements.lock
	@$(INSTALL) --no-deps --no-build-isolation $(EDITABLE)
	@touch $@

# Without hashes: every platform has a build of its own, and any one of them will do.
$(VENV)/.ready-torch: locks/requirements-torch.txt $(VENV)/.ready
	@echo 'Adding PyTorch to $(VENV) (once) ...'
	@$(INSTALL) -r locks/requirements-torch.txt
	@touch $@

$(VENV)/.ready-dev: locks/requirements-dev.lock locks/requirements-s3.lock locks/requirements-frameworks.txt $(VENV)/.ready-torch
	@echo 'Adding the test tools to $(VENV) (once) ...'
	@$(INSTALL) --require-hashes -r locks/requirements-dev.lock
	@$(INSTALL) --require-hashes -r locks/requirements-s3.lock
	@$(INSTALL) -r locks/requirements-frameworks.txt
	@touch $@

clean:  ## remove what the tools left behind (not your data)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
