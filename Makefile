# Builds, tests and shows the farm from a clean clone. `make help` lists the targets.

FARM_HOME ?= $(CURDIR)/.farm
export FARM_HOME
# Otherwise each of the thousands of processes that tests start would compile all its imports.
unexport PYTHONDONTWRITEBYTECODE
# A distribution's own Apptainer has priority over the one that `make apptainer` unpacks.
export PATH := $(PATH):$(FARM_HOME)/apptainer/usr/bin

BIN := .venv/bin
PYTHONS := python3.11 python3.12 python3.13 python3
# Named by content and path, so that an unchanged clone installs nothing twice and a moved one starts over.
RUNTIME := .venv/runtime-$(shell (pwd; cat requirements-runtime.lock pyproject.toml) | sha256sum | cut -c1-16)
STAMP := .venv/installed-$(shell (pwd; cat requirements.lock requirements-runtime.lock pyproject.toml) | sha256sum | cut -c1-16)
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

# The only package without a wheel, which needs a C compiler; reasoning-gym always imports it, for one family.
COMPILED := pycosat

.DEFAULT_GOAL := help
.PHONY: help runtime venv home apptainer rabbitmq promtool rpm demo train test test-unit test-changed soak test-vllm test-trainers test-environments test-agents test-protocols test-oracles test-web test-slurm test-helm test-ray test-pooler test-installers screenshots check docs reference lock clean

# Installs the pinned wheels of a lock, with one line per ten packages; by uv if it exists, which is much faster.
# Hashes are checked either way. uv does not read pip's configuration, so pip is tried if uv finds no packages.
define install
	@sed '/^$(COMPILED)==/,/[^\\]$$/d' $(1) >.venv/wheels.lock
	@n=$$(grep -c '^[A-Za-z0-9]' .venv/wheels.lock); echo "installing $(1) ($$n packages)"; \
	if command -v uv >/dev/null && VIRTUAL_ENV="$$(pwd)/.venv" uv pip install --no-deps --require-hashes -r .venv/wheels.lock; then exit 0; fi; \
	{ $(PIP) install --progress-bar off --no-deps --require-hashes -r .venv/wheels.lock 2>&1 || echo failed; } \
	  | tee .venv/install.log \
	  | { i=0; while read -r word name rest; do case "$$word" in \
	        Collecting|Processing) i=$$((i + 1)); [ $$((i % 10)) -ne 0 ] || echo "  $$i of $$n: $${name##*/}";; \
	        Installing) echo "  unpacking";; esac; done; }; \
	if [ "$$(tail -n 1 .venv/install.log)" = failed ]; then tail -n 20 .venv/install.log >&2; exit 1; fi
endef

# Names an unwritable folder and its owner, before a tool fails on it with a message of its own.
closed = $(shell path='$(1)'; while ! [ -e "$$path" ]; do path=$$(dirname "$$path"); done; \
  shut=$$(find "$$path" $(2) -type d ! -writable -print -quit); [ -z "$$shut" ] || stat -c '%n belongs to %U' "$$shut")
writable = $(if $(call closed,$(1),$(2)),$(error $(call closed,$(1),$(2)), and $(shell id -un) may not write to it: $(3)))
own_venv = $(call writable,$(CURDIR)/.venv,,run make as that user or in a clone of your own)

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

runtime: $(RUNTIME)  ## make .venv with the packages of requirements-runtime.lock and the farm: enough to run it
	@:

venv: $(STAMP)  ## the same with requirements.lock, which adds the packages for tests and checks
	@:

$(RUNTIME):
	$(own_venv)
	@set -e; python=; \
	for name in $(PYTHONS); do \
	  if $$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "make: Python 3.11, 3.12 or 3.13 is needed (Debian: apt-get install python3 python3-venv)" >&2; exit 1; fi; \
	if ! $$python -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "make: $$python cannot make environments (Debian: apt-get install python3-venv)" >&2; exit 1; fi; \
	if ! [ -e .venv/place ] || [ "$$(cat .venv/place)" != "$$(pwd)" ]; then \
	  echo "making .venv with $$python"; $$python -m venv --clear .venv; pwd >.venv/place; fi
	$(call install,requirements-runtime.lock)
	@echo "compiling $(COMPILED)"
	@sed -n '/^$(COMPILED)==/,/[^\\]$$/p' requirements-runtime.lock >.venv/compiled.lock
	@$(PIP) install -q --no-deps --require-hashes -r .venv/compiled.lock >.venv/compiled.log 2>&1 \
	  || { echo "no C compiler or no Python.h: $(COMPILED) is left out (reasoning-gym makes no zebra puzzles)"; \
	    $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	      | xargs -I {} sh -c 'echo "\"\"\"Stands in for a package that could not be compiled here.\"\"\"" >"{}/$(COMPILED).py"'; }
	@echo "installing the farm"
	@$(PIP) install -q --no-deps --no-build-isolation -e .
	@rm -f .venv/runtime-* && touch $@

$(STAMP): | $(RUNTIME)
	$(own_venv)
	$(call install,requirements.lock)
	@rm -f .venv/installed-* && touch $@

home:
	$(call writable,$(FARM_HOME),-maxdepth 0,set FARM_HOME to a folder of your own)

apptainer: home  ## unpack Apptainer under $(FARM_HOME)/apptainer, if the machine has none
	@if apptainer --version >/dev/null 2>&1 || singularity --version >/dev/null 2>&1; then :; \
	else \
	  mkdir -p '$(FARM_HOME)' && log='$(FARM_HOME)/apptainer.log'; echo "fetching Apptainer into $(FARM_HOME)/apptainer"; \
	  bash workers/sandboxes/apptainer.sh '$(FARM_HOME)/apptainer' >"$$log" 2>&1 \
	    || echo "no Apptainer here (see $$log): the namespace sandbox is used instead"; \
	fi

# Only root may start an installed RabbitMQ, but its unpacked files work.
rabbitmq: home  ## unpack RabbitMQ under $(FARM_HOME)/rabbitmq for the tests, if the machine has none
	@if ls -d /usr/lib/rabbitmq/lib/rabbitmq_server-* >/dev/null 2>&1 && command -v erl >/dev/null && command -v epmd >/dev/null; then :; \
	else \
	  mkdir -p '$(FARM_HOME)' && log='$(FARM_HOME)/rabbitmq.log'; \
	  [ -d '$(FARM_HOME)/rabbitmq' ] || echo "fetching RabbitMQ into $(FARM_HOME)/rabbitmq"; \
	  bash tests/services/servers/rabbitmq.sh '$(FARM_HOME)/rabbitmq' >"$$log" 2>&1 \
	    || echo "no RabbitMQ here (see $$log): its tests are left out"; \
	fi

promtool: home  ## unpack Prometheus's promtool under $(FARM_HOME)/prometheus for the tests, if the machine has none
	@command -v promtool >/dev/null || [ -x '$(FARM_HOME)/prometheus/usr/bin/promtool' ] || { \
	  mkdir -p '$(FARM_HOME)' && log='$(FARM_HOME)/prometheus.log'; echo "fetching promtool into $(FARM_HOME)/prometheus"; \
	  bash tests/services/servers/debian_packages.sh '$(FARM_HOME)/prometheus' prometheus >"$$log" 2>&1 \
	    || echo "no promtool here (see $$log): its test is left out"; }

rpm: home  ## unpack rpm under $(FARM_HOME)/rpm for the tests, if the machine has none
	@command -v rpmbuild >/dev/null || [ -x '$(FARM_HOME)/rpm/usr/bin/rpmbuild' ] || { \
	  mkdir -p '$(FARM_HOME)' && log='$(FARM_HOME)/rpm.log'; echo "fetching rpm into $(FARM_HOME)/rpm"; \
	  bash tests/services/servers/debian_packages.sh '$(FARM_HOME)/rpm' rpm rpm-common librpm9 librpmbuild9 librpmio9 librpmsign9 \
	    liblua5.3-0 libfsverity0 libpopt0 libdw1 libelf1 libmagic1 libmagic-mgc >"$$log" 2>&1 || echo "no rpm here (see $$log): its tests are left out"; }

demo: runtime apptainer  ## run a batch of rollouts on a farm on this machine; ARGS="..." goes to examples/demo.py
	@$(BIN)/python -m examples.demo $(ARGS)

train: runtime apptainer home  ## train a tiny policy with a farm and a real vLLM on the CPU (3.4 GB once); ARGS="..." goes to examples/training
	@bash examples/training/environment.sh '$(FARM_HOME)/vllm'
	@$(BIN)/python -m examples.training --python '$(FARM_HOME)/vllm/.venv/bin/python' $(ARGS)

# Tests mostly wait for processes, so more run than there are cores; ARGS="-n 0" runs one after the other.
# RERUN=0: failed tests are not rerun at the end. LONG=1: also runs attacks on rewards and on whole farms, as in CI.
RERUN ?= 1
SIDE_BY_SIDE := -n $$((2 * $$(nproc) + 2)) --maxprocesses 8
test: venv apptainer rabbitmq promtool rpm  ## run unit, contract and integration tests; LONG=1 adds acceptance tests; ARGS="..." goes to pytest
	@RERUN=$(RERUN) $(BIN)/python -m pytest $(SIDE_BY_SIDE) $(if $(LONG)$(findstring tests/,$(ARGS)),,--ignore tests/acceptance) $(ARGS)

test-unit: venv  ## run the tests that need no server and no sandbox; ARGS="..." goes to pytest
	@RERUN=$(RERUN) $(BIN)/python -m pytest $(SIDE_BY_SIDE) tests/unit $(ARGS)

BASE ?= main
test-changed: venv apptainer rabbitmq promtool rpm  ## run the tests that a change since BASE=main can affect; ARGS="--list" only lists the files
	@RERUN=$(RERUN) $(BIN)/python -m tests.changed --base $(BASE) $(SIDE_BY_SIDE) $(ARGS)

# One after the other, as they look for faults over time, not for faults under load.
SOAK_MINUTES ?= 10
soak: venv apptainer rabbitmq  ## run the long forms of tests, each for about SOAK_MINUTES=10; ARGS="..." goes to pytest
	@FARM_SOAK_MINUTES=$(SOAK_MINUTES) $(BIN)/python -m pytest -n 0 -m soak --timeout 0 $(ARGS)

# One server for all its tests, so no workers; FARM_VLLM_PYTHON lets pytest collect them. TRL also trains on it, if
# `make test-trainers` has installed it. The timeout is for busy machines: an hour per test.
TRAINERS_PYTHON := $(FARM_HOME)/trainers/.venv/bin/python
test-vllm: venv home  ## run the engine contract and more on a real vLLM on the CPU (3.4 GB once); ARGS="..." goes to pytest
	@bash examples/training/environment.sh '$(FARM_HOME)/vllm'
	@FARM_VLLM_PYTHON='$(FARM_HOME)/vllm/.venv/bin/python' FARM_TRAINERS_PYTHON='$(wildcard $(TRAINERS_PYTHON))' \
	  $(BIN)/python -m pytest -n 0 --timeout 3600 tests/vllm $(ARGS)

# Their packages conflict with our pins and with each other; FARM_TRAINERS_PYTHON lets pytest collect the tests.
test-trainers: venv home  ## test the trainer adapters with the trainers' own packages, on the CPU (2 GB once); ARGS="..." goes to pytest
	@bash tests/trainers/environment.sh '$(FARM_HOME)/trainers'
	@FARM_TRAINERS_PYTHON='$(TRAINERS_PYTHON)' $(BIN)/python -m pytest -n 0 --timeout 900 tests/trainers $(ARGS)

# Each package in its own environment, in the cache of $(FARM_HOME); FARM_TEST_ENVIRONMENTS lets pytest collect the tests.
test-environments: venv apptainer  ## test the environment adapters with the real packages (1 GB once); ARGS="..." goes to pytest
	@FARM_TEST_ENVIRONMENTS=1 $(BIN)/python -m pytest -n 0 --timeout 3600 tests/environments $(ARGS)

# Each program as its package, in the cache of $(FARM_HOME); FARM_TEST_AGENTS lets pytest collect the tests.
test-agents: venv apptainer  ## test the shipped agents with the real programs (4 GB once); ARGS="..." goes to pytest
	@bash tests/agents/environment.sh '$(BIN)/farm'
	@FARM_TEST_AGENTS=1 $(BIN)/python -m pytest -n 0 --timeout 3600 tests/agents $(ARGS)

# Each system in its own environment; FARM_TEST_PROTOCOLS, their folder, lets pytest collect the tests.
test-protocols: venv home  ## test the protocols of other systems with their own clients (3 GB once); ARGS="..." goes to pytest
	@bash tests/protocols/environment.sh '$(FARM_HOME)/protocols'
	@FARM_TEST_PROTOCOLS='$(FARM_HOME)/protocols' $(BIN)/python -m pytest -n 0 --timeout 900 tests/protocols $(ARGS)

# Each package in its own environment; FARM_TEST_ORACLES, their folder, lets pytest collect the tests.
test-oracles: venv home apptainer  ## compare the farm's parsers with the code of the formats' own projects (4.3 GB once); ARGS="..." goes to pytest
	@bash tests/oracles/environment.sh '$(FARM_HOME)/oracles'
	@bash tests/oracles/tool_calls_environment.sh '$(FARM_HOME)/oracles/tool_calls'
	@bash tests/oracles/judges_environment.sh '$(FARM_HOME)/oracles/judges'
	@FARM_TEST_ORACLES='$(abspath $(FARM_HOME))/oracles' $(BIN)/python -m pytest -n 0 --timeout 3600 tests/oracles $(ARGS)

# The browser is not a Python package: apt-get install chromium. FARM_WEB_PACKAGES lets pytest collect the tests.
test-web: venv home apptainer  ## test the page in a real Chromium: views, live numbers, keys, accessibility (150 MB once); ARGS="..." goes to pytest
	@bash tests/web/environment.sh '$(FARM_HOME)/web'
	@FARM_WEB_PACKAGES='$(FARM_HOME)/web/packages' $(BIN)/python -m pytest -n 0 --timeout 900 tests/web $(ARGS)

test-slurm: venv home  ## test a farm on a real Slurm of four node daemons; needs slurmctld, slurmd, slurm-client, munge; ARGS="..."
	@FARM_TEST_SLURM=1 $(BIN)/python -m pytest -n 0 --timeout 3600 tests/slurm $(ARGS)

test-pooler: venv  ## test the store and a farm behind a real PgBouncer in transaction mode; needs pgbouncer; ARGS="..." goes to pytest
	@FARM_TEST_POOLER=1 $(BIN)/python -m pytest -n 0 --timeout 900 tests/pooler $(ARGS)

test-helm: venv home  ## test the Helm chart with Helm's own engine and the schemas of Kubernetes (350 MB once); ARGS="..."
	@bash tests/helm/environment.sh '$(FARM_HOME)/helm'
	@FARM_HELM_PACKAGES='$(FARM_HOME)/helm/packages' $(BIN)/python -m pytest -n 0 --timeout 900 tests/helm $(ARGS)

test-ray: venv home  ## test nodes of a farm on a local Ray cluster of two nodes (260 MB once); ARGS="..."
	@bash tests/ray/environment.sh '$(FARM_HOME)/ray'
	@FARM_RAY_PACKAGES='$(abspath $(FARM_HOME))/ray/packages' $(BIN)/python -m pytest -n 0 --timeout 3600 tests/ray $(ARGS)

# Base trees of Debian, and of Ubuntu if UBUNTU_ARCHIVE is the reachable address of its packages.
test-installers: venv home apptainer  ## test packages of Debian, Ubuntu, pip and npm on their own bases: apt, postgres, sshd, sudo; needs mmdebstrap and npm (2 GB once); ARGS="..."
	@bash tests/installers/environment.sh '$(FARM_HOME)/installers'
	@FARM_TEST_INSTALLERS='$(abspath $(FARM_HOME))/installers' $(BIN)/python -m pytest -n 0 --timeout 3600 tests/installers $(ARGS)

screenshots: venv home apptainer  ## make screenshots of each view of the page in docs/screenshots
	@bash tests/web/environment.sh '$(FARM_HOME)/web'
	@mkdir -p docs/screenshots
	@FARM_SCREENSHOTS='$(CURDIR)/docs/screenshots' FARM_WEB_PACKAGES='$(FARM_HOME)/web/packages' \
	  $(BIN)/python -m pytest -q -n 0 --timeout 900 tests/web -k is_accessible

check: venv docs  ## check formatting, lint, types, import contracts, links of the documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.sizes

# Not --quiet: warnings that are not printed are not counted, and a dead link would pass.
docs: venv  ## build docs/ as pages in build/docs; fails on a dead link or anchor
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

reference: venv  ## write the generated parts of docs/reference from the code
	@$(BIN)/python -m testkit.reference_pages

# Hashes come only from the package index: a wheel that only one machine has would not install on the next.
COMPILE = env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null CUSTOM_COMPILE_COMMAND='make lock' \
	$(BIN)/pip-compile pyproject.toml - --extra farm --quiet --no-config --generate-hashes --allow-unsafe --strip-extras --no-annotate \
	--no-emit-index-url --no-emit-find-links --no-emit-trusted-host
# Those of the group `dev` that install the farm itself, or that only other Python versions require.
BUILD := async-timeout editables hatchling

lock: venv  ## write both locks from pyproject.toml; ARGS="--upgrade" takes newer versions
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"], sep="\n")' \
	  | $(COMPILE) --output-file requirements.lock $(ARGS)
	sed -n 's/^\([A-Za-z0-9._-]*==[^ ]*\).*/\1/p' requirements.lock >.venv/pins.txt
	printf '%s\n' $(BUILD) | $(COMPILE) --constraint .venv/pins.txt --output-file requirements-runtime.lock

clean:  ## remove everything built here; keep $(FARM_HOME)
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
