# Two commands set everything up: `make run` answers a question, `make test` runs the tests.
PYTHON ?= python3
PROMPT ?= Why is the sky blue?
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help run chat test test-full check bench wheel clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[blas,dev]'
	@touch $@

run: $(READY)  ## get the default model and stream an answer: make run PROMPT="..."
	@$(BIN)/python -m mlxgen +model=smollm2_135m prompt="$$PROMPT"

chat: $(READY)  ## talk to the default model
	@$(BIN)/python -m mlxgen chat +model=smollm2_135m

test: $(READY)  ## the whole test run
	$(BIN)/python -m ruff check mlxgen tests apps
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not full and not metal"

test-full: $(READY)  ## also the tests with large downloads
	$(BIN)/python -m pytest -m "not metal"

check: $(READY) test  ## what CI runs, and the type checker
	$(BIN)/python -m pyright

bench: $(READY)  ## mlxgen and mlx-lm alternately in one run: a table and JSON
	$(BIN)/python -m mlxgen bench

wheel: $(READY)  ## build the wheel
	$(BIN)/python -m hatchling build -t wheel

clean:  ## remove the environment and build products
	rm -rf $(VENV) dist build *.egg-info

export PROMPT
