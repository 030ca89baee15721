# Two commands for a newcomer, `make demo` and `make test`; the rest is for work on zerocast itself.
# Everything runs in .venv, which is made when it is needed from the pins in constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A build environment of pip's own would not see the constraints; torch is never needed to build.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SOURCES := setup.py pyproject.toml constraints.txt $(shell find csrc -type f)

.PHONY: demo test test-slow coverage bench lint format clean

demo: $(VENV)/.demo
	$(BIN)/python -m examples.gpt_pretrain.demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow" --cov=zerocast --cov-report=term:skip-covered --cov-fail-under=90

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow --timeout 3600

# With a GPU: zerocast bench, its report in tests/benchmarks/reports. Without: the benchmarks of the CPU.
bench: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.inc')

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.inc')

clean:
	rm -rf $(VENV) build zerocast/*.so *.egg-info

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || (echo "Python 3.10 or later is needed: make PYTHON=..." && false)
	$(PYTHON) -m venv $(VENV)
	touch $@

# Editable, with the extension built in place; again whenever a source of it changes.
$(VENV)/.dev: $(VENV)/.python $(SOURCES)
	@echo "installing zerocast and its tools into $(VENV)"
	$(INSTALL) --editable '.[dev,examples]'
	touch $@ $(VENV)/.demo

$(VENV)/.demo: $(VENV)/.python $(SOURCES)
	@echo "installing zerocast and what the examples need into $(VENV)"
	$(INSTALL) --editable '.[examples]'
	touch $@
