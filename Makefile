# make demo: train a small model with sparse attention on real text.  make test: run the tests that a
# person waits for; make test-all: run all.  make docs: build the site into build/site.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: demo test test-all bench docs wheel lint format venv clean

demo: $(VENV)/.examples
	$(BIN)/python examples/train_lm.py $(ARGS)

test: venv
	$(BIN)/pytest -n $(WORKERS) -m "not slow" $(ARGS)

test-all: venv
	$(BIN)/pytest -n $(WORKERS) $(ARGS)

bench: venv
	$(BIN)/python -m jax_dsa.bench $(ARGS)

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

wheel: venv
	$(BIN)/python tools/wheels.py $(ARGS)

lint: venv
	$(BIN)/python tools/plain_words.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --strict tests/typing
	$(BIN)/pyright --pythonpath $(BIN)/python tests/typing
	$(BIN)/clang-format --dry-run --Werror $(shell git ls-files "*.cu" "*.cuh" "*.h" "*.cc")

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(shell git ls-files "*.cu" "*.cuh" "*.h" "*.cc")

venv: $(VENV)/.dev

# Each stamp is one set of extras, installed again when the requirements change.
$(VENV)/.%: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[$*]"
	@touch $@

clean:
	rm -rf $(VENV) build dist
