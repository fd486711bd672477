# One command per intention. Needs Python 3.10 or newer and make; everything else is installed into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The name of the project's root may hold no test options; give them here: make test PYTEST_ARGS="-k seal".
PYTEST_ARGS ?=

.PHONY: help venv demo test lint format bench clean

help:
	@echo "make venv    create .venv and install holdfast with its tools (quick the second time)"
	@echo "make demo    train on two simulated nodes, kill ranks and a node, come back bit for bit"
	@echo "make test    ruff, mypy and the test suite"
	@echo "make lint    ruff and mypy only"
	@echo "make bench   the benchmarks in their short form"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/holdfast demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m benchmarks.stall --quick
	$(BIN)/python -m benchmarks.restore --quick
	$(BIN)/python -m benchmarks.persist --quick
	$(BIN)/python -m benchmarks.plan --quick

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache
