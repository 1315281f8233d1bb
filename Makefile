# Everything sets itself up: a virtual environment with the tested versions, then the work.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PRESET ?= dsv3-tiny
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-quick test-gpu lint format check clean

demo: $(VENV)/.base
	$(BIN)/interlace train $(PRESET)
	$(BIN)/interlace verify $(PRESET) --arms eager,control --steps 20

test: $(VENV)/.test
	$(BIN)/python -m pytest

test-quick: $(VENV)/.test
	$(BIN)/python -m pytest -m "not slow"

# The interpreter of the machine, which brings its own CUDA build of torch.
test-gpu:
	$(PYTHON) -m pytest -m "gpu or multi_gpu"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint test

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "interlace needs Python 3.11 or newer, found " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing the tested versions into $(VENV) (a minute or two, once)"
	$(BIN)/pip install -q -c constraints.txt -e .
	@touch $@

$(VENV)/.%: $(VENV)/.base
	@echo "installing what $* needs"
	$(BIN)/pip install -q -c constraints.txt -e '.[$*]'
	@touch $@
