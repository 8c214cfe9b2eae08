# `make run` and `make test` set up a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# No command that a target runs updates prices in the background.
export BROKER_OFFLINE := 1

.PHONY: run test test-slow test-exhaustive coverage test-sky testbed test-frameworks mutation torture lint audit fuzz format docs bench bench-peer clean help

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(INSTALLED): pyproject.toml tests/constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "broker needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint tests/constraints.txt --editable '.[dev]'
	touch $@

run: $(INSTALLED) ## rehearse a spot training job on this machine, with one preemption and recovery
	$(BIN)/broker rehearse task_templates/ddp.yaml

# Four workers on two cores: many tests wait for processes or timers, while another test computes.
PYTEST := $(BIN)/python -m pytest -n 4 --dist worksteal

test: $(INSTALLED) ## all tests except the longest
	$(PYTEST)

test-slow: $(INSTALLED) ## longer tests: more histories and kills of the simulation, combined strategies
	$(PYTEST) -m 'long and not exhaustive'

test-exhaustive: $(INSTALLED) ## hours: all histories, kills at all effects, all templates, fresh examples of all properties
	$(PYTEST) -m exhaustive
	$(PYTEST) -m hypothesis --hypothesis-profile explore

# Tests that start no training and no command line: a few minutes. `make coverage TESTS=tests` includes all of `make test`.
TESTS ?= $(addprefix tests/,access advisor agent app catalog clouds jobs lab optimizer pipelines provision runtime spot state storage task)
coverage: $(INSTALLED) ## lines of broker/ that the fast tests execute in process
	mkdir -p build
	$(BIN)/python -m coverage run -m pytest $(TESTS)
	$(BIN)/python -m coverage report --sort=cover

testbed: $(INSTALLED) ## jobs on real hosts over ssh, in isolated network namespaces (Linux, as root)
	$(BIN)/python -m tests.testbed.registry
	$(BIN)/python -m tests.testbed.world $(CURDIR)/$(BIN)/python -m pytest tests/testbed -m "$(or $(MARKS),not exhaustive)"

test-frameworks: $(INSTALLED) ## other frameworks' templates, killed and preempted on two local nodes: NAMES="jax torchrun"
	$(BIN)/python -m tests.frameworks $(NAMES)

mutation: $(INSTALLED) ## 300 small faults, one at a time, in a copy of the product: which of them do the tests detect?
	$(BIN)/python -m tests.mutation --count 300 --seed 1 --resume build/mutation/results.jsonl

torture: $(INSTALLED) ## jobs under faults of processes, disks, clocks and networks: MINUTES=60 BED=both SEED=1
	$(BIN)/python -m tests.torture --minutes $(or $(MINUTES),60) --bed $(or $(BED),both) $(if $(SEED),--seed $(SEED))

lint: $(INSTALLED) ## format, lint and strict types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --python-version 3.10 trainers broker/agent/agent*.py & other=$$!; $(BIN)/mypy; all=$$?; wait $$other && exit $$all

audit: $(INSTALLED) ## bandit over the code, pip-audit over what is installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint tests/constraints.txt --editable '.[audit]'
	$(BIN)/python -m tests.security.audit

fuzz: $(INSTALLED) ## run every fuzz target for MINUTES (10), with SEED (1)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary :all: --constraint tests/constraints.txt atheris || \
		echo "atheris has no wheel for this Python: inputs are mutations of seeds, not guided by coverage"
	$(BIN)/python -m tests.fuzz all --minutes $(or $(MINUTES),10) --seed $(or $(SEED),1)

format: $(INSTALLED) ## format all files
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(INSTALLED) ## build the documentation in build/site; warnings are errors
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint tests/constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(INSTALLED) ## planning speed, as ratios within one run
	$(BIN)/python -m tests.bench.bench_plan
	$(BIN)/python -m tests.bench.bench_dag --quick

bench-peer: $(INSTALLED) ## compare prices, speed and balancers with SkyPilot, in a separate venv
	test -x .venv-peer/bin/python || $(PYTHON) -m venv .venv-peer
	.venv-peer/bin/python -m pip install --quiet --disable-pip-version-check 'skypilot>=0.14,<0.15'
	$(BIN)/python -m tests.bench.peer.bench_peer --peer .venv-peer/bin/python
	$(BIN)/python -m tests.bench.peer.bench_balancer --peer .venv-peer/bin/python

test-sky: $(INSTALLED) ## tests with a real SkyPilot API server, in a separate venv
	test -x .venv-sky/bin/python || $(PYTHON) -m venv .venv-sky
	.venv-sky/bin/python -m pip install --quiet --disable-pip-version-check 'skypilot>=0.14,<0.15'
	BROKER_TEST_SKY_PYTHON=$(CURDIR)/.venv-sky/bin/python $(BIN)/python -m pytest tests/sky

clean: ## remove everything that `make` created
	rm -rf $(VENV) .venv-peer .venv-sky build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .fuzz
