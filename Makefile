# make test              a small case of everything, in about 25 minutes on two cores
# make test-op OP=topk   every test of one operator, on the CPU and, where there is one, on the GPU
# make test-all          every test, with a fresh seed (SEED=5 repeats one)
# make lint, make format check or format the code
# make docs              build the site into build/site, and run the tutorial's notebook
# make demo              train a small model with sparse attention on real text
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
SEED ?= $(shell od -An -N3 -tu4 /dev/urandom | tr -d ' ')
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist worksteal --durations 10

.PHONY: demo test test-op test-all bench docs wheel lint format venv clean

demo: $(VENV)/.examples
	$(BIN)/python examples/train_lm.py $(ARGS)

test: venv
	$(PYTEST) -m "not slow" $(ARGS)

# Files, functions and parameters that have OP in their names, and the emulator's programs.
test-op: venv
	$(if $(OP),,$(error Name an operator, as in `make test-op OP=topk`))
	$(PYTEST) -k "$(OP)" $(ARGS)

test-all: venv
	JAX_DSA_TEST_SEED=$(SEED) $(PYTEST) $(ARGS)

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

# Each stamp is one set of extras, which is installed again when the requirements change.
$(VENV)/.%: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[$*]"
	@touch $@

clean:
	rm -rf $(VENV) build dist
