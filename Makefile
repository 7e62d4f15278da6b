# make run    sets up .venv, fetches MovieLens 100K, runs FedHUR on it with 100 virtual clients under Flower
# make test   sets up .venv with the tools, then lint, types and tests
# make clean  removes .venv and what tools and builds left
#
# make PYTHON=python3.12 ...   chooses the interpreter of .venv (Python >= 3.11)
# make run ARGS="--strategy fedcia --seed 2"   passes options to `fedhur run`

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

# Nothing from outside .venv: neither the caller's module path nor the user's own packages.
unexport PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE := 1

.PHONY: run test clean
.DEFAULT_GOAL := run

run: $(VENV)/.installed
	$(BIN)/fedhur data fetch ml-100k
	$(BIN)/fedhur run $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	# One worker more than there are cores: tests of deployments mostly wait.
	$(BIN)/python -m pytest -n $$($(BIN)/python -c "import os; print((os.cpu_count() or 1) + 1)") --dist loadfile --no-loadscope-reorder

# A working .venv that was made by hand is kept.
$(VENV)/.created:
	@if ! $(BIN)/python -c "" 2>/dev/null; then \
	  $(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { \
	    echo "Python >= 3.11 is needed, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1)."; \
	    echo "Choose another one, such as: make PYTHON=python3.12"; exit 1; }; \
	  $(PYTHON) -c "import venv, ensurepip" || { \
	    echo "'$(PYTHON)' cannot make a virtual environment: its module venv or ensurepip is missing."; \
	    echo "On Debian and Ubuntu: sudo apt install python3-venv"; exit 1; }; \
	  echo "Making $(VENV)"; \
	  $(PYTHON) -m venv --clear $(VENV) || exit 1; \
	fi
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml
	@echo "Installing into $(VENV). The first time this downloads PyTorch and may take minutes."
	$(BIN)/python -m pip install --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.created pyproject.toml
	@echo "Installing into $(VENV), with the tools. The first time this downloads PyTorch and may take minutes."
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[dev]"
	@touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
