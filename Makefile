# make demo: train digits with several samplers and compare them, in a few minutes on a CPU.
# make test: check the code and run the tests.
# make docs: build the documentation, which opens from the disk.
# All of them set up an environment of their own first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LIBRARIES := $(VENV)/.libraries

.PHONY: demo test docs check format clean

demo: $(INSTALLED)
	$(BIN)/kairostep compare digits --arms 'uniform,uniform --weighting=min_snr,root_loss,adaptive' --seeds 1 --steps=500 --output runs/demo
	@echo "One seed and a few minutes show that everything works, not which sampler is best: docs/comparing.md"

test: check $(LIBRARIES)
	$(BIN)/pytest

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kairostep needs Python 3.11 or newer: make test PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(LIBRARIES): tests/libraries.txt $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/libraries --requirement $< \
		|| echo "not all libraries could be installed: the tests of integrations that need them are skipped"
	touch $@

clean:
	rm -rf $(VENV) dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
