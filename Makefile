# Every target makes its own environment in .venv; it needs Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
CONFIG ?= configs/quickstart.py
ARGS ?=
# Arguments of both commands of `make train`, for example EVAL_ARGS=--samples=100.
EVAL_ARGS ?=
# runs/NAME or runs/NAME-VARIANT of CONFIG=configs/NAME.py:VARIANT, as train.py has it.
WORKDIR ?= runs/$(subst :,-,$(subst .py,,$(notdir $(CONFIG))))

.PHONY: install train test test-slow lint clean

install: $(VENV)/.installed

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml requirements.txt | $(VENV)/bin/python
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet -r requirements.txt
	touch $@

$(VENV)/.installed-test: pyproject.toml requirements.txt | $(VENV)/.installed
	$(PY) -m pip install --quiet -e '.[test]'
	touch $@

train: $(VENV)/.installed
	$(PY) -m qrag_jax.train --config=$(CONFIG) --workdir=$(WORKDIR) $(ARGS)
	$(PY) -m qrag_jax.evaluate --workdir=$(WORKDIR) $(EVAL_ARGS)

test: $(VENV)/.installed-test
	$(PY) -m pytest -n 2 --dist=loadfile

test-slow: $(VENV)/.installed-test
	$(PY) -m pytest -m slow

lint: $(VENV)/.installed-test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean:
	rm -rf $(VENV)
