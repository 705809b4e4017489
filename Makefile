PYTHON ?= python3
VENV ?= .venv
# For example PIP_ARGS="--index-url URL" for another package index.
PIP_ARGS ?=
# Where `make docs` writes.
REFERENCE ?= api

BIN = $(VENV)/bin
READY = $(VENV)/installed
# The demo's icons.
WHEEL = $(VENV)/mkdocs_material-9.8.2-py3-none-any.whl
PYTEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

API = $(shell find open_clip_ext -name '*.py' ! -name __main__.py | sort | sed 's|/__init__.py||; s|\.py$$||; s|/|.|g')

.PHONY: demo finetune docs test test-slow test-all lint clean

demo: $(READY) $(WHEEL)
	$(BIN)/python examples/demo.py --wheel $(WHEEL)

$(WHEEL): | $(READY)
	$(BIN)/python -m pip download $(PIP_ARGS) --no-deps --dest $(VENV) mkdocs-material==9.8.2

finetune: $(READY)
	$(BIN)/python examples/finetune.py

test: $(READY)
	$(PYTEST)

test-slow: $(READY)
	$(PYTEST) -m slow

test-all: $(READY)
	$(PYTEST) -m ""

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

$(READY): setup.py pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) --upgrade pip
	$(BIN)/python -m pip install $(PIP_ARGS) -e ".[test]"
	touch $(READY)

docs: $(READY)
	@# Packages without __all__ bring their modules along, which are then named twice.
	$(BIN)/python -W "ignore:The module specification" -m pdoc -d markdown -o $(REFERENCE) $(API)
	@echo "the library's reference: $(REFERENCE)/index.html; everything else: docs/README.md"

clean:
	rm -rf $(VENV) api demo finetune build *.egg-info
