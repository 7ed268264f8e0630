# Two commands for a fresh clone, each alone: `make demo` and `make test`.
# They make .venv, install what is needed (a Java runtime too, where that is allowed) and run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JAVA := eval "$$(scripts/java.sh)" &&
# Spark's workers use the interpreter that started them.
export PYSPARK_PYTHON := $(abspath $(BIN)/python)


.PHONY: demo test chaos test-long check fast bench docs notebook clean

demo: $(VENV)/.installed ## A live feed through Spark and out again; ARGS="--endpoint tcp://..." for your own
	$(JAVA) $(BIN)/zmq-datasource demo $(ARGS)

test: check ## Lint, types, layers and all tests; what CI runs
	$(JAVA) $(BIN)/python -m pytest -m "not spark and not long"
	$(JAVA) $(BIN)/python -m pytest -m "spark and not long"

chaos: $(VENV)/.installed ## Weather drawn from seeds against whole topologies; SEEDS=200, FIRST=0
	$(BIN)/python -m tests.weather --seeds $(or $(SEEDS),20) --first $(or $(FIRST),0) $(ARGS)

test-long: $(VENV)/.installed ## The tests that take minutes
	$(JAVA) $(BIN)/python -m pytest -m long

check: $(VENV)/.installed ## Lint, format, types, layers, generated docs
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/reference.py --check

fast: $(VENV)/.installed ## The tests that need no Spark
	$(BIN)/python -m pytest -m "not spark"

bench: $(VENV)/.installed ## Measure side by side; writes benchmarks/RESULTS.md
	$(JAVA) $(BIN)/python -m benchmarks $(ARGS)

docs: $(VENV)/.installed ## Generate the references of options and metrics
	$(BIN)/python scripts/reference.py

notebook: $(VENV)/.installed ## Open the notebooks
	$(JAVA) $(BIN)/jupyter lab notebooks

clean:
	rm -rf $(VENV) build dist

$(VENV)/.installed: pyproject.toml scripts/python.sh
	scripts/python.sh $(PYTHON) $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@
