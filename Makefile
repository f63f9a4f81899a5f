# llmkit: `make demo` runs a real model, `make test` runs the tests; each makes its own environment first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PROMPT ?= What is gravity?
PYTEST_ARGS ?=
SOURCES := src schedulers attention_backends connectors structured plugins cli
# What an editable install leaves out: with PYTHONDONTWRITEBYTECODE set every start would compile all modules again.
COMPILE = @$(BIN)/python -m compileall -q $(SOURCES)
export PROMPT

.PHONY: help demo test check lint types imports docs wheel bench clean

help: ## Show this help.
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "llmkit needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing llmkit and what it needs into $(VENV); torch is large, this takes some minutes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	$(COMPILE)
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing llmkit and the tools of its tests into $(VENV); torch is large, this takes some minutes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(COMPILE)
	@touch $@ $(VENV)/.run

demo: $(VENV)/.run ## Fetch SmolLM2-135M and stream its answer to a prompt (PROMPT="...").
	@$(BIN)/llmkit models pull smollm2-135m-instruct
	@printf '\n> %s\n' "$$PROMPT"
	@$(BIN)/llmkit generate --model smollm2-135m-instruct --chat --stream --temperature 0 --max-tokens 96 "$$PROMPT"

# Tests start many processes: compiling every module again in each would take a quarter of the time.
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.dev ## All tests, side by side (fetches SmolLM2-135M once for the end-to-end part).
	$(BIN)/python -m pytest -q -n auto --dist worksteal $(PYTEST_ARGS)

check: lint types imports ## The quick checks: ruff, mypy, import contracts.

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy src/llmkit

imports: $(VENV)/.dev
	$(BIN)/lint-imports

docs: $(VENV)/.dev ## Build the documentation into site/, warnings are errors.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: $(VENV)/.dev ## Build the wheel into dist/.
	rm -rf dist && $(BIN)/python -m build --wheel --no-isolation --outdir dist .

bench: $(VENV)/.run ## Throughput, latency and start-up of SmolLM2-135M on this machine.
	$(BIN)/llmkit bench latency --model smollm2-135m-instruct
	$(BIN)/llmkit bench throughput --model smollm2-135m-instruct
	$(BIN)/llmkit bench startup --model smollm2-135m-instruct

clean: ## Remove the environment and everything built.
	rm -rf $(VENV) dist build site .pytest_cache .mypy_cache .ruff_cache
