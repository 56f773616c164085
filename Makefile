# Everything a person needs: `make run` and `make test` set up what is missing by themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Tests wait about as much as they work.
WORKERS := $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2) * 3 / 2 )))
# The clients of the server, which nothing else needs.
CLIENTS := tests/clients/.venv
HEAVY   := tests/clients/heavy/.venv

# Tests start hundreds of interpreters: each module is compiled once, not in each of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup run test test-clients test-clients-heavy test-long test-crash soak check format lock sbom bench bench-guard house eval-local clean help
.DEFAULT_GOAL := help

help:
	@echo "make run | test | test-clients | test-clients-heavy | test-long | test-crash | soak | check | format | lock | sbom | bench | bench-guard | house | eval-local | setup | clean"

setup: $(STAMP)

# The environment is made anew when the lists of dependencies change; otherwise this is free.
$(STAMP): pyproject.toml requirements.lock scripts/setup scripts/local-runtime.txt scripts/test-model.txt
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh scripts/setup
	@touch $(STAMP)

run: setup
	@$(BIN)/python -m hermes.cli.install_model
	@exec $(BIN)/hermes gateway run $(ARGS)

test: setup
	@$(BIN)/python -m pytest -m "not long" -n $(WORKERS) --dist worksteal $(ARGS)

test-clients: setup $(CLIENTS)/.installed
	@$(CLIENTS)/bin/python -m pytest -c tests/clients/pytest.ini -n auto --dist loadscope tests/clients $(ARGS)

$(CLIENTS)/.installed: pyproject.toml scripts/setup-clients tests/clients/node/package-lock.json
	@PYTHON="$(PYTHON)" VENV="$(CLIENTS)" sh scripts/setup-clients
	@touch $@

# Clients that need a gigabyte and a minute to start: Semantic Kernel, CrewAI, Open WebUI.
test-clients-heavy: setup $(HEAVY)/.installed
	@$(HEAVY)/bin/python -m pytest -c tests/clients/pytest.ini -n auto --dist loadfile tests/clients/heavy $(ARGS)

$(HEAVY)/.installed: pyproject.toml scripts/setup-clients-heavy
	@PYTHON="$(PYTHON)" VENV="$(HEAVY)" sh scripts/setup-clients-heavy
	@touch $@

test-long: setup
	@$(BIN)/python -m pytest -m long -n auto $(ARGS)

test-crash: setup
	@HERMES_CRASH_ROUNDS=300 HERMES_SERVER_CRASH_ROUNDS=200 $(BIN)/python -m pytest tests/crash -n auto --dist worksteal $(ARGS)

# One server under mixed traffic for ten minutes (`ARGS="--minutes 2"`): nothing grows, and nothing is left over.
soak: setup
	@$(BIN)/python -m soak $(ARGS)

check: setup
	@$(BIN)/ruff format --check src tests bench evals soak scripts
	@$(BIN)/ruff check src tests bench evals soak scripts
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python scripts/audit.py

# Find versions and hashes for what pyproject.toml asks for; those on record stay (`ARGS=--upgrade` takes the newest).
lock:
	@PYTHON="$(PYTHON)" sh scripts/lock $(ARGS)

# What Hermes is made of, as CycloneDX.
sbom: setup
	@$(BIN)/python scripts/sbom.py dist/hermes.cdx.json

format: setup
	@$(BIN)/ruff format src tests bench evals soak scripts
	@$(BIN)/ruff check --fix src tests bench evals soak scripts

bench: setup
	@$(BIN)/python -m bench $(ARGS)

# Instructions per token, against the figure on record (`ARGS=--update` puts a new one there). Needs valgrind.
bench-guard: setup
	@$(BIN)/python -m bench.guard $(ARGS)

# How large and how tangled the source is, against what it is meant to be.
house: setup
	@$(BIN)/python -m bench.house

# How well the installed local model does what it is asked, for real, in a scratch folder.
eval-local: setup
	@$(BIN)/python -m hermes.cli.install_model
	@$(BIN)/python -m evals $(ARGS)

clean:
	@rm -rf $(VENV) $(CLIENTS) $(HEAVY) tests/clients/node/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist bench/.cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
