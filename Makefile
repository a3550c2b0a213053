# The verbs of this house, for people and for CI. Needs only Python >= 3.11 with venv; everything
# else goes into .venv, at the versions in constraints.txt.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Which vLLM: 0.32 where nothing is said, whose CPU build is on package indexes. VLLM=0.33 is made on top of it.
VLLM   ?=
VLLM_BASE := .venv-vllm
VLLM_ENV  := $(VLLM_BASE)$(addprefix -,$(VLLM))

# How many examples `make law` tries per law.
EXAMPLES ?= 20000
# How many runs `make simulate` makes, and of how many requests each.
RUNS ?= 10000
REQUESTS ?= 200

# How long `make fuzz` fuzzes each decoder.
SECONDS ?= 30

# How long `make soak` goes on.
MINUTES ?= 10

# pip takes these for the build environment too (the first name up to pip 25.2, the second since).
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help env vllm-env demo test test-core test-rest lint types imports check format bench law compatibility families faults fuzz soak load e2e e2e-inside e2e-live e2e-core e2e-full \
        gpu serve vllm-startup kubernetes browser mutants package package-serve peers docs sbom simulate clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

env: $(READY) ## create or update .venv (every other target does it when needed)

demo: $(READY) ## transfer caches between two multi-process engines, and verify every cell
	@$(BIN)/kvferry demo

# The core and what stands on it alone: no process is started, no heavy dependency is loaded.
CORE := tests/core tests/wire tests/requirements tests/test_everything.py tests/test_sweep.py \
        tests/test_packings.py tests/test_sabotage.py tests/test_public.py \
        src/kvferry/core src/kvferry/models src/kvferry/wire src/kvferry/errors.py

test: test-core test-rest ## the quick test suite, doctests included: the core first, then the rest

test-core: $(READY) ## the core tests: planning, checking, wire format
	@echo "==> tests: the core"
	@$(BIN)/pytest $(CORE)

test-rest: $(READY) ## the tests that need processes, sockets or more time
	@echo "==> tests: the rest"
	@$(BIN)/pytest $(addprefix --ignore=,$(CORE))

lint: $(READY) ## ruff: rules and formatting
	@echo "==> lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(READY) ## mypy, strict on src
	@echo "==> types"
	@$(BIN)/mypy

imports: $(READY) ## the import rule: arrows point inward
	@echo "==> imports"
	@$(BIN)/lint-imports --no-logo

check: lint types imports test-core ## before a commit: lint, types, imports and the core tests

format: $(READY) ## format files so that `make lint` passes
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

# Where the environment with vLLM has been made, its own worker takes part.
BENCH := $(if $(wildcard $(VLLM_ENV)/.ready),$(VLLM_ENV)/bin/python,$(BIN)/python) -m benchmarks.rivals

bench: $(READY) ## time the core, first contact, every transfer mode, and whole fetches
	@$(BIN)/python -m benchmarks.core
	@$(BIN)/python -m benchmarks.meeting
	@$(BENCH) --json benchmarks/bench.json
	@$(BIN)/python -m benchmarks.runtime

law: $(READY) ## the long property run (EXAMPLES=20000)
	@echo "==> laws, $(EXAMPLES) examples each"
	@KVFERRY_LAW_EXAMPLES=$(EXAMPLES) $(BIN)/pytest -s -m "" tests/test_everything.py tests/core/test_digest.py

# CI runs RUNS=200 REQUESTS=50; a failing seed says which command plays it again.
simulate: $(READY) ## check every guarantee in RUNS seeded runs of the runtime in virtual time, and that planted bugs are found
	@echo "==> simulation: planted bugs, and how many seeds it took to find each"
	@$(BIN)/pytest -q -s -m "" -k planted tests/testing/test_simulation.py
	@echo "==> simulation: $(RUNS) runs of $(REQUESTS) requests"
	@$(BIN)/python -m tests.support.simulation --runs $(RUNS) --requests $(REQUESTS)

compatibility: $(READY) ## write docs/compatibility.md: plan every model at twenty pairs, and compare with an oracle
	@$(BIN)/python tools/compatibility.py

families: $(READY) ## transfer every model family between processes at six pairs of TP sizes
	@echo "==> families"
	@$(BIN)/pytest -m "" tests/processes/test_families.py

faults: $(READY) ## kill, suspend and restart processes, send forged tickets and malformed messages
	@echo "==> faults"
	@$(BIN)/pytest -m "" tests/faults tests/channel

# The schemas take 110 MB: they are fetched when they are asked for.
kubernetes: $(READY) ## validate examples/kubernetes against Kubernetes' schemas
	@$(BIN)/python -m pip install --quiet -c constraints.txt kubernetes-validate
	@$(BIN)/kubernetes-validate --strict examples/kubernetes/prefill-decode.yaml

# SCREENSHOTS=folder keeps a picture of each page, at two widths, light and dark.
browser: $(READY) ## test the pages of --html in Chromium: keyboard, touch, text, axe
	@$(BIN)/python tests/browser/chromium.py
	@$(BIN)/python -m pip install --quiet -c constraints.txt playwright axe-playwright-python
	@KVFERRY_SCREENSHOTS=$(SCREENSHOTS) $(BIN)/pytest -m "" tests/browser

# Coverage-guided; the corpus that it leaves in tests/fuzz is replayed by `make test`.
fuzz: $(READY) ## coverage-guided fuzzing of every decoder, SECONDS=30 each
	@$(BIN)/python -m pip install --quiet --only-binary=:all: -c constraints.txt atheris || { \
		echo "atheris comes as a wheel for x86-64 Linux only: fuzz there." >&2; exit 1; }
	@$(BIN)/python -m tests.fuzz.fuzz all $(SECONDS)

soak: $(READY) ## MINUTES=10 of loads with killed and suspended processes and forged messages
	@echo "==> soak, $(MINUTES) minutes"
	@KVFERRY_SOAK_MINUTES=$(MINUTES) $(BIN)/pytest -s -m "" tests/soak

load: $(READY) ## 2,000 concurrent requests, every kind of cache, each mode on one host: no leak, no lost request
	@echo "==> load"
	@$(BIN)/pytest -s -m "" tests/load

# Inside vLLM: kernels, allocator, engine core without a model.
INSIDE       := $(VLLM_ENV)/bin/python -m tests.vllm
INSIDE_FILES := $(filter-out %/test_faults.py,$(wildcard tests/vllm/test_*.py))

FAULT_PARTS  := $(foreach part,llama gemma3 "not+llama+and+not+gemma3",'tests/vllm/test_faults.py -k $(subst +, ,$(part))')

# What a new series of vLLM is most likely to break.
CORE_FILES := $(wildcard tests/vllm/test_scheduler*.py tests/vllm/test_describe_*.py) \
              $(patsubst %,tests/vllm/test_%.py,geometry kernels layout_check multi_connector plugin prefix_cache read_back)

# Then between whole engines.
e2e: e2e-inside e2e-live ## real vLLM on a CPU, tokens compared with a single engine's: the part that CI runs (VLLM=0.33: that version)

vllm-env: $(VLLM_ENV)/.ready ## create or update the environment with vLLM (VLLM=0.33: that version)

e2e-live: $(VLLM_ENV)/.ready ## the part of `make e2e` between whole engines
	@echo "==> e2e: between engines"
	@$(VLLM_ENV)/bin/python -m pytest -m chosen -p no:cacheprovider tests/e2e

e2e-inside: $(VLLM_ENV)/.ready ## the part of `make e2e` inside one process: vLLM's engine core, kernels and allocator
	@echo "==> e2e: inside vLLM"
	@$(INSIDE) $(INSIDE_FILES) $(FAULT_PARTS)

e2e-core: $(VLLM_ENV)/.ready ## the tests that a new version of vLLM is most likely to break (VLLM=0.33)
	@echo "==> e2e: vLLM $(VLLM): engine core, kernels and layouts"
	@$(INSIDE) $(CORE_FILES)

e2e-full: $(VLLM_ENV)/.ready ## all tests with real vLLM on a CPU: most of an hour
	@echo "==> e2e, all"
	@$(MAKE) e2e
	@$(VLLM_ENV)/bin/python -m pytest -m "not chosen" -p no:cacheprovider tests/e2e

# Needs a Python that has vLLM already: nothing is installed. DEVICE=cpu tries the same on a CPU; ONLY="pair/llama fault"
# takes a part; BUDGET=900 ends after so many seconds, and the same command goes on. docs/lab/gpu.md has the rest.
DEVICE ?= cuda
BUDGET ?= 0
GPU_PYTHON := $(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(VLLM_ENV)/bin/python),$(PYTHON)),$(PYTHON))

gpu: ## real vLLM engines on this machine's GPU: pairs, faults, times, servers, manifests (PYTHON, BUDGET, ONLY, DEVICE)
	@PYTHONPATH="$(CURDIR)/src:$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m tests.gpu run --device $(DEVICE) \
		--budget $(BUDGET) $(foreach name,$(ONLY),--only '$(name)') $(if $(RESULTS),--results $(RESULTS)) \
		$(if $(JOBS),--jobs $(JOBS)) $(if $(AGAIN),--again-failed)

vllm-startup: $(VLLM_ENV)/.ready ## measure the connector's startup cost, next to NixlConnector's
	@$(VLLM_ENV)/bin/python -m benchmarks.vllm_startup

serve: $(VLLM_ENV)/.ready ## start two vLLM servers on a CPU with kvferry between them, and compare their tokens with a single server
	@BIN=$(VLLM_ENV)/bin TINY_HOME=$(abspath $(VLLM_ENV)/tiny) examples/vllm/serve.sh

peers: $(READY) ## reproduce README's table: the mapping of other connectors at unequal TP (downloads 360 MB)
	@$(BIN)/python tools/peers.py

# A warning ends it: a dead link, a page that is in no menu, something that a browser would fetch from elsewhere.
docs: $(VENV)/.docs ## build the site into build/site; open build/site/index.html
	@echo "==> docs"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@$(BIN)/python tools/snippets.py

$(VENV)/.docs: $(READY)
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,docs]"
	@touch $@

# PACKAGE="--only-build" builds and tries nothing; "--python 3.12" tries one; "--no-nixl" leaves NIXL out; "--all" also
# installs [all], GBs.
package: $(VENV)/.package ## build the package twice, compare the builds, and test them in fresh environments
	@$(BIN)/python tools/package.py $(PACKAGE)

package-serve: $(VENV)/.package ## install the built package next to a fresh vLLM on a CPU, serve with it, uninstall it
	@$(BIN)/python tools/package.py --serve

sbom: $(READY) ## write build/kvferry.cdx.json: kvferry[vllm] and its dependencies, with versions and licenses
	@mkdir -p build
	@$(BIN)/python tools/sbom.py --extra vllm > build/kvferry.cdx.json

$(VENV)/.package: $(READY)
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,package]"
	@touch $@

# MUTANTS="core --sample 100 --seed 7": which rooms, how many, which sample; the default: the laws, 30 of each room.
mutants: $(VENV)/.mutants ## mutation testing of a sample of each room; every mutant must fail a test
	@echo "==> mutants"
	@$(BIN)/python tools/mutants.py $(MUTANTS)

$(VENV)/.mutants: $(READY)
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,mutants]"
	@touch $@

clean: ## remove .venv, caches and build products
	rm -rf $(VENV) $(VLLM_BASE)* build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

define check_python
	@command -v $(PYTHON) >/dev/null || { \
		echo "kvferry needs Python 3.11 or newer; '$(PYTHON)' was not found." \
		     "Name another one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "kvferry needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
		     "Name another one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "'$(PYTHON)' has no venv module; install it first" \
		     "(Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; }
endef

# The markers are made last, after a check that the environment works; a half-made environment is made anew.
$(VLLM_BASE)/.ready: tools/vllm_env.sh tools/vllm_check.py tools/vllm_requirements.txt tools/torch_gpu_requirements.txt
	$(check_python)
	@tools/vllm_env.sh $(PYTHON) $(VLLM_BASE)
	@touch $@

$(VLLM_BASE)-%/.ready: $(VLLM_BASE)/.ready tools/vllm_overlay.sh tools/vllm_overlay_requirements.txt
	@tools/vllm_overlay.sh $(VLLM_BASE) $(VLLM_BASE)-$* $*.0
	@touch $@

$(READY): pyproject.toml constraints.txt
	$(check_python)
	@echo "==> $(VENV): $$($(PYTHON) --version), about a minute the first time"
	@if [ -e $(VENV)/.half-made ]; then rm -rf $(VENV); fi
	@$(PYTHON) -m venv $(VENV)
	@touch $(VENV)/.half-made
	@echo "==> $(VENV): installing kvferry and its tools at the versions in constraints.txt"
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@# Without its dependencies: NIXL's wheels declare torch, several GB that kvferry does not use.
	@$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt nixl nixl-cu12
	@$(BIN)/python -c 'from nixl._api import nixl_agent, nixl_agent_config; \
		nixl_agent("check", nixl_agent_config(backends=["UCX"]))' > /dev/null
	@$(BIN)/kvferry --version
	@rm $(VENV)/.half-made
	@touch $@
