# Two commands for a newcomer: `make demo` and `make test`. Everything is installed into .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
IMAGE ?=

.PHONY: demo test lint clean

demo: $(VENV)/.installed
	$(BIN)/python -m kimi_triton.demo $(IMAGE)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -q

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch comes first and by itself, so that nothing else chooses another build of it.
$(VENV)/.installed: pyproject.toml client/pyproject.toml tests/requirements.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 12) else \
	  "kimi-triton needs Python 3.10 to 3.12, this is %d.%d; try make PYTHON=python3.11" % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep ^torch== tests/requirements.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r tests/requirements.txt -e client -e .
	touch $@

clean:
	rm -rf $(VENV) demo-output
