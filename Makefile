# Targets do everything, set-up included: make demo, make test.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_FLAGS ?=
WORKERS ?= 2

.PHONY: help demo test test-slow test-flower docs test-docs dist zoo lint bench campaign clean
help:
	@echo "make demo    why BatchNorm fails in federated learning, and FBN does not (a minute)"
	@echo "make test    lint, types, import layers and tests (some minutes)"
	@echo "make test-slow  the tests that take longer: campaigns, real federations, interrupted runs"
	@echo "make test-flower  the fast tests of the Flower adapter with the newest Flower of the range (installs it)"
	@echo "make docs    the documentation as a site, in site/index.html; opens without a network"
	@echo "make test-docs  that site in Chromium: links, anchors, search, a silent console, no request to other hosts"
	@echo "make dist    wheel and source distribution, checked, in dist/"
	@echo "make zoo     real models of timm, torchvision, transformers, ... and docs/recipes.md (installs them)"
	@echo "make campaign  hostile inputs, kills and full disks in large numbers (half an hour); see docs/reliability.md"
	@echo "make bench   speed of the layers and of a whole round"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "fedbatchnorm needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Installed anew whenever what is to be installed changes.
$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/installed
	$(BIN)/fedbatchnorm demo

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow" --show-capture=stderr $(PYTEST_FLAGS)

test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -q -n $(WORKERS) -m slow --show-capture=stderr $(PYTEST_FLAGS)

# Constraints have the oldest Flower of the range. What the newest depends on does not resolve with every index yet, so it
# is laid over the oldest, for these tests alone.
FLOWER := $(VENV)/flwr-1.42
$(FLOWER)/installed: $(VENV)/installed
	rm -rf $(FLOWER)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(FLOWER) 'flwr==1.42.*'
	@touch $@

test-flower: $(FLOWER)/installed
	PYTHONPATH=$(abspath $(FLOWER)) $(BIN)/python -c "import importlib.metadata as m; assert m.version('flwr')[:5] == '1.42.'"
	PYTHONPATH=$(abspath $(FLOWER)) $(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow" -k "flower or secagg" \
		--show-capture=stderr $(PYTEST_FLAGS) tests/adapters tests/conformance

$(VENV)/docs-installed: pyproject.toml constraints.txt | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	@touch $@

# The variable silences an advertisement, not a warning of the build.
docs: $(VENV)/docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "the site is in site/: open site/index.html"

test-docs: docs
	$(BIN)/python -m pytest -q -n $(WORKERS) -m site --show-capture=stderr $(PYTEST_FLAGS) tests/site

dist: $(VENV)/installed
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

# The binary of torchvision may be for another build of torch: its Python is enough, see tests/zoo.
$(VENV)/zoo-installed: pyproject.toml constraints.txt | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,zoo]'
	@touch $@

zoo: $(VENV)/zoo-installed
	$(BIN)/python -m pytest -q -n $(WORKERS) -m zoo --show-capture=stderr $(PYTEST_FLAGS) tests/zoo

bench: $(VENV)/installed
	$(BIN)/python benchmarks/layer.py
	$(BIN)/python benchmarks/round.py
	$(BIN)/python benchmarks/rules.py

campaign: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/campaigns/campaign.py --json results/reliability/campaign.json
	$(BIN)/python benchmarks/reliability_table.py

clean:
	rm -rf $(VENV) build dist out site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
