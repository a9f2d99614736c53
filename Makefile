# Builds, tests and shows the farm from a clean clone. `make help` lists the targets.

FARM_HOME ?= $(CURDIR)/.farm
export FARM_HOME
# A distribution's own Apptainer comes first; ours is the fallback that `make apptainer` unpacks.
export PATH := $(PATH):$(FARM_HOME)/apptainer/usr/bin

BIN := .venv/bin
PYTHONS := python3.11 python3.12 python3.13 python3
# Named by content and place, so an unchanged clone installs nothing twice and a moved one starts afresh.
STAMP := .venv/installed-$(shell (pwd; cat requirements.lock pyproject.toml) | sha256sum | cut -c1-16)
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -q

# The one package without a wheel that needs a C compiler; reasoning-gym imports it always and uses it for one family.
COMPILED := pycosat

.DEFAULT_GOAL := help
.PHONY: help venv apptainer rabbitmq demo test test-vllm check lock clean

help:  ## what there is
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

venv: $(STAMP)  ## .venv with every package of requirements.lock, and the farm itself
	@:

$(STAMP):
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
	@echo "installing requirements.lock"
	@sed '/^$(COMPILED)==/,/[^\\]$$/d' requirements.lock >.venv/wheels.lock
	@sed -n '/^$(COMPILED)==/,/[^\\]$$/p' requirements.lock >.venv/compiled.lock
	@$(PIP) install --no-deps --require-hashes -r .venv/wheels.lock
	@$(PIP) install --no-deps --require-hashes -r .venv/compiled.lock >.venv/compiled.log 2>&1 \
	  || { echo "no C compiler or no Python.h: $(COMPILED) is left out (reasoning-gym makes no zebra puzzles)"; \
	    $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	      | xargs -I {} sh -c 'echo "\"\"\"Stands in for a package that could not be compiled here.\"\"\"" >"{}/$(COMPILED).py"'; }
	@$(PIP) install --no-deps --no-build-isolation -e .
	@rm -f .venv/installed-* && touch $@

apptainer:  ## Apptainer under $(FARM_HOME)/apptainer, where the machine has none
	@if apptainer --version >/dev/null 2>&1 || singularity --version >/dev/null 2>&1; then :; \
	else \
	  mkdir -p '$(FARM_HOME)' && log='$(FARM_HOME)/apptainer.log'; echo "fetching Apptainer into $(FARM_HOME)/apptainer"; \
	  bash workers/sandboxes/apptainer.sh '$(FARM_HOME)/apptainer' >"$$log" 2>&1 \
	    || echo "no Apptainer here (see $$log): the namespace sandbox is used instead"; \
	fi

# What a distribution installs only root may start, but its files will do.
rabbitmq:  ## RabbitMQ under $(FARM_HOME)/rabbitmq for the tests, where the machine has none
	@if ls -d /usr/lib/rabbitmq/lib/rabbitmq_server-* >/dev/null 2>&1 && command -v erl >/dev/null && command -v epmd >/dev/null; then :; \
	else \
	  mkdir -p '$(FARM_HOME)' && log='$(FARM_HOME)/rabbitmq.log'; \
	  [ -d '$(FARM_HOME)/rabbitmq' ] || echo "fetching RabbitMQ into $(FARM_HOME)/rabbitmq"; \
	  bash tests/services/rabbitmq.sh '$(FARM_HOME)/rabbitmq' >"$$log" 2>&1 \
	    || echo "no RabbitMQ here (see $$log): its tests are left out"; \
	fi

demo: venv apptainer  ## a farm on this machine plays a batch of rollouts; ARGS="..." goes to examples/demo.py
	@$(BIN)/python -m examples.demo $(ARGS)

# One more at a time than there are cores, as tests mostly wait for processes; ARGS="-n 0" is one after the other.
test: venv apptainer rabbitmq  ## every test; ARGS="..." goes to pytest
	@$(BIN)/python -m pytest -n $$(($$(nproc) + 1)) --maxprocesses 8 $(ARGS)

# One server for all its tests, so no workers; FARM_VLLM_PYTHON is what lets pytest see them at all.
test-vllm: venv  ## the engine contract and more on a real vLLM on the CPU (3.4 GB once); ARGS="..." goes to pytest
	@bash tests/vllm/environment.sh '$(FARM_HOME)/vllm'
	@FARM_VLLM_PYTHON='$(FARM_HOME)/vllm/.venv/bin/python' $(BIN)/python -m pytest -n 0 --timeout 900 tests/vllm $(ARGS)

check: venv  ## formatting, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Hashes come from the package index alone: a wheel that only one machine has would not install on the next.
lock: venv  ## requirements.lock from pyproject.toml; ARGS="--upgrade" takes newer versions
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"], sep="\n")' \
	  | env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null CUSTOM_COMPILE_COMMAND='make lock' \
	    $(BIN)/pip-compile pyproject.toml - --quiet \
	    --no-config --generate-hashes --allow-unsafe --strip-extras --no-annotate \
	    --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --output-file requirements.lock $(ARGS)

clean:  ## removes what was built here; keeps $(FARM_HOME)
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
