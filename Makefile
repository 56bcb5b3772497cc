# Every target sets itself up: a virtual environment in .venv, nothing outside it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test unit lint setup benchmark figures soundness fuzz faults docs clean help

help:
	@echo "make demo       install, calibrate a few mechanisms, print a table, draw a picture (demo-output/)"
	@echo "make setup      .venv with everything, the command line at .venv/bin/dpmf"
	@echo "make test       run all tests"
	@echo "make unit       run the unit tests only; about two minutes"
	@echo "make lint       ruff and mypy"
	@echo "make benchmark  tightness and speed beside the peers, and docs/benchmarks.md; an hour"
	@echo "make soundness  100,000 bounds against the truth, and docs/soundness.md; it resumes, too"
	@echo "make fuzz       10,000 pieces of hostile input"
	@echo "make faults     a hundred kills of a calibration, a figure run and a training run"
	@echo "make figures    every figure of the paper, and docs/results.md; half an hour, interrupt it when you like, it resumes"
	@echo "make docs       the documentation site (build/site/index.html)"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("dpmf needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

# The demo needs only the core, which installs quickly.
$(VENV)/.core: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing dpmf into $(VENV) ..."
	@$(BIN)/pip install --quiet -c constraints.txt --editable .
	@touch $@

$(VENV)/.full: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing dpmf with everything its tests use into $(VENV) ..."
	@# This release has a CPU build, and everything that depends on torch accepts it.
	@$(BIN)/pip install --quiet --no-compile -c constraints.txt torch==2.13.0
	@$(BIN)/pip install --quiet --no-compile -c constraints.txt --editable '.[jax,torch,trainers,pld,web,experiments,docs,dev]' --editable ./checker
	@# On all cores, where pip takes one. Packages hold templates and the like that do not compile.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@ $(VENV)/.core

setup: $(VENV)/.full
	@echo "Ready: $(BIN)/dpmf --help"

demo: $(VENV)/.core
	$(BIN)/python examples/demo.py

lint: $(VENV)/.full
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Three processes on two cores: many tests wait for processes that they start, for browsers and for kills.
test: $(VENV)/.full
	$(BIN)/python -m pytest -n 3 --dist worksteal

unit: $(VENV)/.full
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/unit

# docs/benchmarks.md. The other tables: .venv/bin/python -m benchmarks --help
benchmark: $(VENV)/.full
	$(BIN)/python -m benchmarks beside growth batchings goals

# random-allocation wants an older numpy: an environment of its own, which computes its cells into the same database.
# Without it everything else is computed all the same, and the page says what is missing.
PEER := $(VENV)-random-allocation
$(PEER)/.figures: pyproject.toml | $(BIN)/python
	@echo "Installing random-allocation into $(PEER) ..."
	@mkdir -p $(PEER)
	@{ $(BIN)/python -m venv $(PEER) && \
		$(PEER)/bin/pip install --quiet --editable '.[random-allocation,experiments]'; } > $(PEER)/install.log 2>&1
	@touch $@ $(PEER)/.ready

# GRID=--full for the paper's own grids.
GRID ?=
figures: $(VENV)/.full
	@$(MAKE) -s $(PEER)/.figures 2> /dev/null || \
		echo "random-allocation cannot be installed (see $(PEER)/install.log): what it computes is left out"
	@if [ -e $(PEER)/.figures ]; then for cells in peer-renyi random-allocation; do \
		$(PEER)/bin/python -m evidence run results $(GRID) --only $$cells || exit; done; fi
	$(BIN)/python -m evidence run results $(GRID)
	$(BIN)/python -m evidence export results $(GRID)
	$(BIN)/python -m evidence plot $(GRID)
	$(BIN)/python -m evidence report results $(GRID)

# The theme announces its successor in every run.
docs: $(VENV)/.full
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

soundness: $(VENV)/.full
	$(BIN)/python -m soundness

fuzz: $(VENV)/.full
	$(BIN)/python -m soundness fuzz

faults: $(VENV)/.full
	$(BIN)/python -m soundness faults

clean:
	rm -rf $(VENV) .venv-* demo-output .pytest_cache .mypy_cache .ruff_cache
