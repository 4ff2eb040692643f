# Every target builds what it needs, from a bare python3 with pip, into .venv; a second run starts at once.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
OUT    ?= out

# The demo's own settings: `make demo DEMO_SECONDS=20 DEMO_PORT=8081`. Without DEMO_SECONDS it runs until Ctrl-C.
DEMO_PORT    ?= 8080
DEMO_SECONDS ?=

CHAOS_SECONDS ?= 300
SOAK_SECONDS ?= 3600
FUZZ_SEQUENCES ?= 100000

# Further arguments: `make test ARGS="-k blocks"`, `make bench ARGS="--sessions 96 --check"`.
ARGS ?=

# Nothing is written outside the checkout, so that an empty or read-only HOME is no obstacle.
export MPLCONFIGDIR := $(CURDIR)/$(VENV)/.matplotlib
export PIP_NO_CACHE_DIR := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test check bench chaos soak conformance fuzz test-vllm test-compiled bench-forward fmt lock clean
.DEFAULT_GOAL := help

help:  ## List the targets.
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

demo: $(STAMP)  ## Three replicas that need no GPU, the router, a chat load, and what each replica does, live.
	@$(BIN)/python -m bench demo --port $(DEMO_PORT) $(if $(DEMO_SECONDS),--seconds $(DEMO_SECONDS)) $(ARGS)

test: $(STAMP)  ## The test suite (no GPU, no network).
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)  ## Lint, format, strict types, import floors, unused and missing dependencies.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/deptry .

bench: $(STAMP)  ## Hit rate, TTFT and balance under each policy, beside the ceilings; table here, files in out/.
	$(BIN)/python -m bench hit-rate --out $(OUT) $(ARGS)

soak: $(STAMP)  ## 500 streams at once for SOAK_SECONDS: what the router's memory does; needs Linux.
	$(BIN)/python -m tests.chaos.soak --seconds $(SOAK_SECONDS) $(ARGS)

conformance: $(STAMP)  ## The tests of known faults, and docs/conformance.md from their run.
	$(BIN)/python -m pytest -m fault --conformance=docs/conformance.md $(ARGS)

chaos: $(STAMP)  ## Replicas and the store die, hang and come back under load for CHAOS_SECONDS; needs Linux.
	$(BIN)/python -m tests.chaos --seconds $(CHAOS_SECONDS) $(ARGS)

fuzz: $(STAMP)  ## FUZZ_SEQUENCES byte sequences at the front, and as many as answers of replicas; other ones each time.
	FUZZ_SEQUENCES=$(FUZZ_SEQUENCES) $(BIN)/python -m pytest tests/fuzz --timeout 0 $(ARGS)

test-vllm: $(STAMP)  ## Conformance against two real vLLM replicas on the CPU (installed into .vllm, about 4 GB).
	$(BIN)/python tests/real_vllm/run.py $(ARGS)

# The checkout as a wheel has it, compiled: nothing of it is meant to be edited.
COMPILED := build/compiled

$(COMPILED)/.made: $(STAMP) hatch_build.py pyproject.toml $(shell find router fake_backend bench tests -type f ! -name '*.pyc')
	$(BIN)/python hatch_build.py $(COMPILED)
	@touch $@

test-compiled: $(COMPILED)/.made  ## The tests of what is compiled, against the compiled modules; needs a C compiler.
	cd $(COMPILED) && ../../$(BIN)/python -m pytest $(if $(ARGS),$(ARGS),tests/wire tests/choose tests/prompt tests/index tests/handoff tests/end_to_end)

bench-forward: $(COMPILED)/.made  ## What passing bytes on costs, compiled, beside nginx and other routers.
	cd $(COMPILED) && ../../$(BIN)/python -m bench overhead forward $(ARGS)

fmt: $(STAMP)  ## Format, and mend what the linter can mend.
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# The lock files serve every platform, and name no index host: pip takes its own.
UV      := build/uv/bin/uv
COMPILE := $(UV) pip compile pyproject.toml --quiet --universal --generate-hashes --python-version 3.11 \
	--no-emit-index-url --no-emit-find-links --no-config --no-header

lock: $(UV)  ## Make both lock files again from pyproject.toml (ARGS=--upgrade takes newer versions).
	$(COMPILE) $(ARGS) --output-file requirements.lock
	$(COMPILE) $(ARGS) --extra bench --group dev --output-file requirements-dev.lock

clean:  ## Remove what the targets made.
	rm -rf $(VENV) build $(OUT) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# An environment that was copied, half built or left by a Python that is gone is made anew.
$(STAMP): requirements-dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "warmroute needs Python 3.11 or newer; '$(PYTHON)' is not. Name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version 2>/dev/null | grep -qF '$(CURDIR)/$(VENV)/' || \
		{ echo "Building $(VENV)"; rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m pip install --quiet --require-hashes -r requirements-dev.lock
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(UV):
	@$(PYTHON) -m venv build/uv
	@build/uv/bin/python -m pip install --quiet uv
