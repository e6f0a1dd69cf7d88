# make demo: install, plan, show, emit and train on real text.   make test: install, run the tests.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Two processes share the tests, and what they start is compiled once, whatever the shell says of that.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2

.PHONY: setup demo test test-fast test-wide check lint types imports clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[huggingface,dev]"
	touch $(STAMP)

demo: setup
	bash examples/demo.sh

test: setup
	$(PYTEST)

test-fast: setup
	$(PYTEST) -m "not slow"

test-wide: setup
	$(PYTEST) -m wide

lint: setup
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

check: lint types imports test

clean:
	rm -rf .venv build demo-run *.egg-info
