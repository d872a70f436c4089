# Everything a checkout needs: `make demo`, `make test`, `make check`. Each sets itself up, with uv
# where it is installed and with python3's own venv and pip where it is not.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
UV     := $(shell command -v uv 2>/dev/null)

DISTRIBUTIONS := protos foundation messaging workloads parameters coordinator participant
EDITABLE      := $(patsubst %,-e ./%,$(DISTRIBUTIONS))

ifeq ($(UV),)
CREATE  = $(PYTHON) -m venv $(VENV)
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check
else
CREATE  = uv venv --quiet --allow-existing --python '>=3.11' $(VENV)
INSTALL = uv pip install --quiet --compile-bytecode --python $(BIN)/python
endif

# They need a Docker engine, where there is one.
CONTAINER_TESTS := tests/e2e/test_containers.py tests/e2e/test_compose.py \
	tests/e2e/test_launch_containers.py
# Half of the tests of integration.
COORDINATOR_TESTS := tests/integration/coordinator $(wildcard tests/integration/test_*.py)
# They run what the documents and the examples show, and the benchmarks.
DOCS_TESTS := $(patsubst %,tests/e2e/test_%.py,benchmarks demo examples gradient_page http_page \
	neural new_projects notebook parameter_server_page readme take_home tutorials)

# From the raw limits to what takes longest.
BENCHMARKS := baselines round_overhead gradient_steps pipeline messaging aggregation parameter_server recovery restart s3_store fleet large_model simulation learning
WITH_PEERS := round_overhead large_model

.PHONY: help demo test test-e2e test-docs test-integration test-integration-coordinator test-integration-others \
	test-code test-code-unit test-code-others test-containers kills simulate bench check format lint types protos protos-check dist lock setup setup-dev setup-torch clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

demo: setup  ## four participants train one model on real data through a real coordinator
	@$(BIN)/xain-coordinator demo

# All beside each other (make --jobs=7 --output-sync=target) keep two cores busy: some wait for
# processes and for the engine while the others compute. What waits most comes first.
test: test-containers test-e2e test-docs test-integration test-code  ## every test
test-integration: test-integration-coordinator test-integration-others
test-code: test-code-unit test-code-others

test-e2e: setup-dev
	$(BIN)/python -m pytest $(addprefix --ignore=,$(CONTAINER_TESTS) $(DOCS_TESTS)) tests/e2e

test-docs: setup-dev
	$(BIN)/python -m pytest $(DOCS_TESTS)

test-integration-coordinator: setup-dev
	$(BIN)/python -m pytest $(COORDINATOR_TESTS)

test-integration-others: setup-dev
	$(BIN)/python -m pytest $(addprefix --ignore=,$(COORDINATOR_TESTS)) tests/integration

test-code-unit: setup-dev
	$(BIN)/python -m pytest tests/unit

test-code-others: setup-dev
	$(BIN)/python -m pytest --ignore=tests/unit --ignore=tests/integration --ignore=tests/e2e

# STAND_INS=1: images are made where no registry can be reached. As a target of its own that would give
# its job to a part that comes later, and the tests with containers would be the last to begin.
test-containers: setup-dev
	$(if $(STAND_INS),tests/support/containers/stand_ins.sh $(VENV))
	$(BIN)/python -m pytest $(CONTAINER_TESTS)

simulate: setup-dev  ## simulate the whole system with SEEDS=1000 plans of faults (FIRST=0), or one: SEED=7
	@PYTHONPATH=tests $(BIN)/python -m simulation $(if $(SEED),--seed $(SEED),--first $(or $(FIRST),0) --seeds $(or $(SEEDS),1000))

kills: setup-dev  ## kill real processes until KILLS=100 have died (SEED=0: where to begin)
	KILLS=$(or $(KILLS),100) SEED=$(or $(SEED),0) $(BIN)/python -m pytest -q -k kills_change_nothing tests/e2e/test_kills.py

bench: setup-dev  ## every benchmark, some 30 minutes on two quiet cores (ANY_LOAD=1: on busy ones); PEERS=1 adds some 10
	@status=0; for name in $(BENCHMARKS); do \
		test -e benchmarks/$$name.py || continue; \
		peers=; case " $(if $(PEERS),$(WITH_PEERS)) " in *" $$name "*) peers=--peers;; esac; \
		echo "== $$name"; \
		$(BIN)/python benchmarks/$$name.py $$peers $(if $(QUICK),--quick) $(if $(ANY_LOAD),--any-load) || status=1; \
	done; echo 'The tables of docs/performance.md: $(BIN)/python benchmarks/tables.py'; exit $$status

check: format lint types protos-check test  ## what CI runs

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

lock:  ## refresh the hash-only locks (needs uv)
	uv lock --quiet
	uv export --quiet --frozen --all-packages --no-default-groups --group build --no-emit-workspace \
		--no-header --no-annotate --format requirements-txt -o requirements.lock
	uv export --quiet --frozen --all-packages --all-groups --no-emit-workspace \
		--no-header --no-annotate --format requirements-txt -o requirements-dev.lock
	uv export --quiet --frozen --only-group build --no-emit-workspace \
		--no-header --no-annotate --format requirements-txt -o requirements-build.lock
	uv export --quiet --frozen --package xain-coordinator --extra http --extra parameters --no-default-groups \
		--no-emit-workspace --no-header --no-annotate --format requirements-txt \
		-o requirements-coordinator.lock
	uv export --quiet --frozen --package xain-participant --extra tables --no-default-groups --no-emit-workspace \
		--no-header --no-annotate --format requirements-txt -o requirements-participant.lock
	uv export --quiet --frozen --package xain-participant --extra tables --extra bagging --no-default-groups \
		--no-emit-workspace --no-header --no-annotate --format requirements-txt \
		-o requirements-participant-bagging.lock
	uv export --quiet --frozen --package xain-participant --extra sparse --no-default-groups \
		--no-emit-workspace --no-header --no-annotate --format requirements-txt \
		-o requirements-participant-sparse.lock

setup: $(VENV)/.ready  ## the environment that running needs
setup-dev: $(VENV)/.ready-dev  ## and the one that testing needs

$(VENV)/.ready: requirements.lock $(wildcard */pyproject.toml)
	@echo 'Setting up $(VENV) (once) ...'
	@test -x $(BIN)/python || $(CREATE)
	@$(INSTALL) --require-hashes -r requirements.lock
	@$(INSTALL) --no-deps --no-build-isolation $(EDITABLE)
	@touch $@

$(VENV)/.ready-dev: requirements-dev.lock $(VENV)/.ready
	@echo 'Adding the test tools to $(VENV) (once) ...'
	@$(INSTALL) --require-hashes -r requirements-dev.lock
	@touch $@

# Without hashes: every platform has a build of its own, and the tests need any one of them.
setup-torch: $(VENV)/.ready-torch  ## and the one that the tests with PyTorch need
$(VENV)/.ready-torch: requirements-torch.txt $(VENV)/.ready-dev
	@echo 'Adding PyTorch to $(VENV) (once) ...'
	@$(INSTALL) -r requirements-torch.txt
	@touch $@

clean:  ## remove what the tools left behind (not your data)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
