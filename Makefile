# Everything a person needs: `make run` and `make test` set up what is missing by themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TOOLS  := $(VENV)/.development
# Tests wait more than they work.
WORKERS := $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2) * 5 / 2 )))
# The time limit of a test is in pyproject.toml; some suites need another one: `$(call limit,SECONDS)`.
limit = --timeout=$(1) -o faulthandler_timeout=$$(( $(1) + 60 ))
# The clients of the server, which nothing else needs.
CLIENTS := tests/clients/.venv
HEAVY   := tests/clients/heavy/.venv
BROWSER := $(VENV)/.browser
# The page, built from web/.
PAGE        := src/hermes/server/web/index.html
PAGE_SOURCE := $(shell find web -type f -not -path '*/node_modules/*' -not -path '*/.node/*')

# Tests start hundreds of interpreters: each module is compiled once, not in each of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup run model dist test test-clients test-clients-heavy test-web captures screenshots docs test-docs test-long test-crash test-cluster test-cluster-long soak check format lock sbom bench bench-guard bench-web source-metrics eval-local clean help
.DEFAULT_GOAL := help

help:
	@echo "make run | dist | test | test-clients | test-clients-heavy | test-web | captures | screenshots | docs | test-docs | test-long | test-crash | test-cluster | test-cluster-long | soak | check | format | lock | sbom | bench | bench-guard | bench-web | source-metrics | eval-local | setup | clean"

setup: $(STAMP) $(TOOLS) $(PAGE)

# The environment is made anew when the lists of dependencies change; otherwise this is free.
$(STAMP): pyproject.toml requirements.lock scripts/setup src/hermes/local/runtime.txt
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh scripts/setup
	@touch $@

# What nobody needs who only runs it.
$(TOOLS): pyproject.toml requirements.lock scripts/setup-development scripts/test-model.txt | $(STAMP)
	@VENV="$(VENV)" sh scripts/setup-development
	@touch $@

$(PAGE): $(PAGE_SOURCE) scripts/build-web scripts/node | $(STAMP)
	@VENV="$(VENV)" sh scripts/build-web

# The page is built while the model comes.
run: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=2 model $(PAGE)
	@echo "Command  from another terminal: $(CURDIR)/$(BIN)/hermes   (or: export PATH=$(CURDIR)/$(BIN):\$$PATH)" >&2
	@exec $(BIN)/hermes gateway run $(ARGS)

model: $(STAMP)
	@$(BIN)/python -m hermes.cli.install_model

# A wheel with the page in it, and a source distribution, for `pipx install dist/*.whl` or `uv tool install dist/*.whl`.
dist: setup
	@test -f $(PAGE) || { echo "The page could not be built, and a wheel without it is not wanted." >&2; exit 1; }
	@VENV="$(VENV)" sh scripts/build-dist


test: setup
	@$(BIN)/python -m pytest -m "not long and not cluster" -n $(WORKERS) --dist worksteal $(ARGS)

test-clients: setup $(CLIENTS)/.installed
	@$(CLIENTS)/bin/python -m pytest -c tests/clients/pytest.ini -n auto --dist loadscope --no-loadscope-reorder tests/clients $(ARGS)

$(CLIENTS)/.installed: pyproject.toml scripts/setup-clients tests/clients/node/package-lock.json
	@PYTHON="$(PYTHON)" VENV="$(CLIENTS)" sh scripts/setup-clients
	@touch $@

# Clients that need a gigabyte and a minute to start: Semantic Kernel, CrewAI, Open WebUI.
test-clients-heavy: setup $(HEAVY)/.installed
	@$(HEAVY)/bin/python -m pytest -c tests/clients/pytest.ini $(call limit,600) -n auto --dist loadfile tests/clients/heavy $(ARGS)

$(HEAVY)/.installed: pyproject.toml scripts/setup-clients-heavy
	@PYTHON="$(PYTHON)" VENV="$(HEAVY)" sh scripts/setup-clients-heavy
	@touch $@

# The page in a real browser.
test-web: setup $(BROWSER)
	@sh scripts/node npm run --prefix web --silent check
	@$(BIN)/python -m pytest -n 4 --dist worksteal tests/web $(ARGS)

$(BROWSER): scripts/setup-browser | setup
	@sh scripts/setup-browser
	@touch $@

# The terminal texts of docs/captures, the pictures of docs/images, and how quick and how heavy the page is.
captures: setup
	@$(BIN)/python scripts/captures.py $(ARGS)

screenshots: setup $(BROWSER)
	@$(BIN)/python scripts/screenshots.py $(ARGS)

bench-web: setup $(BROWSER)
	@$(BIN)/python -m bench.page $(ARGS)

# The site of the documentation, in build/docs; a link that leads nowhere ends it.
docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet && echo "Documentation  build/docs/index.html" >&2

# Every command and snippet of README.md and docs/ (`HERMES_DOCS_MODEL=embedded`: asked of the embedded model).
test-docs: docs
	@$(BIN)/python -m pytest $(call limit,300) -n 2 --dist worksteal tests/docs $(ARGS)

test-long: setup
	@$(BIN)/python -m pytest $(call limit,3600) -m "long and not cluster" -n auto $(ARGS)

test-crash: setup
	@HERMES_CRASH_ROUNDS=300 HERMES_SERVER_CRASH_ROUNDS=200 $(BIN)/python -m pytest $(call limit,3600) tests/crash -n auto --dist worksteal $(ARGS)

# Three replicas on PostgreSQL and NATS under mixed load: 100 random faults, or 1,000 and a stall of a minute; outages of half a
# minute. A failure prints its seed; HERMES_CLUSTER_SEED repeats it.
test-cluster: setup
	@sh scripts/in-own-network $(BIN)/python -m pytest $(call limit,1200) -m "cluster and not long" -n 2 --dist worksteal tests/cluster_faults $(ARGS)

test-cluster-long: setup
	@HERMES_CLUSTER_FAULTS=1000 sh scripts/in-own-network $(BIN)/python -m pytest $(call limit,10800) -m cluster -n 2 --dist worksteal tests/cluster_faults $(ARGS)

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
source-metrics: setup
	@$(BIN)/python -m bench.source_metrics

# How well the installed local model does what it is asked, for real, in a scratch folder.
eval-local: setup model
	@$(BIN)/python -m evals $(ARGS)

clean:
	@rm -rf $(VENV) $(CLIENTS) $(HEAVY) tests/clients/node/node_modules web/node_modules web/.node src/hermes/server/web .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist bench/.cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
