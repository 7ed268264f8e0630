# Two commands for a fresh clone, each alone: `make demo` and `make test`.
# They make .venv, install what is needed there (a Java runtime too, where the machine has none) and run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JAVA := java="$$(scripts/java.sh $(VENV))" && eval "$$java" &&
# Spark's workers use the interpreter that started them.
export PYSPARK_PYTHON := $(abspath $(BIN)/python)
# Tests also wait, so there is one worker more than cores, each with a Spark session of 1 GB, and two beside them for
# what needs no Spark. With more the tests fail: Spark gives up a Python process that has not connected back within 10 s.
WORKERS ?= 3
# For noxfile.py: a directory for what became of each test.
REPORT = $(if $(REPORTS),--junitxml=$(REPORTS)/$@.xml)

.PHONY: help demo test test-spark test-rest test-slow chaos test-long test-versions check fast sanitize coverage fuzz mutate audit bench docs site notebook notebooks wheel image release clean

help: ## What there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 14

demo: $(VENV)/.package ## A live feed through Spark and out again, every message accounted for
	$(JAVA) $(BIN)/zmq-datasource demo $(ARGS)

test: $(VENV)/.dev ## Lint, types, layers and the tests; CI runs these first, and then test-slow
	$(MAKE) --jobs 2 test-spark check test-rest
	$(JAVA) $(BIN)/python -m pytest -m "alone and not slow and not long"

test-spark: $(VENV)/spark.jsa
	$(JAVA) $(BIN)/python -m pytest -m "spark and not slow and not long and not alone" --numprocesses $(WORKERS) --dist load --maxschedchunk 1 $(REPORT)

test-rest: $(VENV)/.dev
	$(JAVA) $(BIN)/python -m pytest -m "not spark and not slow and not long and not alone" --numprocesses 2 $(REPORT)

test-slow: $(VENV)/spark.jsa ## The tests that take half a minute each: notebooks, kills of whole drivers, the weather
	$(JAVA) $(BIN)/python -m pytest -m "slow and not long and not alone" --numprocesses $(WORKERS) --dist load --maxschedchunk 1 $(REPORT)
	$(JAVA) $(BIN)/python -m pytest -m "slow and alone and not long"

# So many seeds reach every failpoint.
chaos: EVERY = $(shell test $(or $(SEEDS),20) -lt 200 || echo --every-failpoint)
chaos: $(VENV)/.dev ## Random faults against whole topologies; SEEDS=200, FIRST=0, or ARGS="--minutes 30"
	$(JAVA) $(BIN)/python -m tests.weather --seeds $(or $(SEEDS),20) --first $(or $(FIRST),0) $(EVERY) $(ARGS)

test-long: $(VENV)/.dev ## The tests that take minutes
	$(JAVA) $(BIN)/python -m pytest -m long

test-versions: $(VENV)/.made ## The tests with other versions of Python, Java and libraries; ARGS='--session "test(oldest)"'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check nox uv
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/nox $(ARGS)

check: $(VENV)/.dev ## Lint, format, types, layers, generated docs, alerts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/reference.py --check
	if command -v promtool >/dev/null; then promtool test rules conf/prometheus-alerts-test.yml; else echo "No promtool (of Prometheus): the alerts are not tested"; fi

fast: $(VENV)/.dev ## The tests that need neither Spark nor other processes
	$(BIN)/python -m pytest -m "not spark and not processes and not slow and not long and not alone" --numprocesses 3

sanitize: $(VENV)/.dev ## The compiled core's tests under ASan and UBSan
	scripts/sanitize.sh $(BIN)/python build/sanitize

coverage: $(VENV)/spark.jsa ## Branch coverage of all tests but the long ones, in all their processes
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "coverage>=7.10"
	$(BIN)/coverage erase
	-$(JAVA) $(BIN)/coverage run -m pytest -m "not long and not alone" --numprocesses $(WORKERS) $(ARGS)
	-$(JAVA) $(BIN)/coverage run -m pytest -m "alone and not long"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

fuzz: $(VENV)/.dev ## Any bytes against all that reads those of others; SECONDS=600 for each target, ARGS="framing"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "atheris>=3"
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),60) $(ARGS)

mutate: $(VENV)/.dev ## Mutation testing of framings, sequences, offsets and protocols, with a floor; ARGS="zmq_datasource.serving.*" for some of them
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "mutmut>=3.8"
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mutmut run $(ARGS)
	$(BIN)/mutmut results
	$(BIN)/python scripts/mutation_floor.py

audit: $(VENV)/.dev ## Known vulnerabilities and the licences of all that is installed; asks pypi.org
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip-audit pip-licenses
	$(BIN)/pip-licenses --from=mixed --partial-match --fail-on "GPL;Affero;Proprietary"
	$(BIN)/pip-audit --skip-editable

bench: $(VENV)/.dev ## Measure side by side, two hours; writes benchmarks/RESULTS.md; ARGS="--only kafka"
	$(JAVA) $(BIN)/python -m benchmarks $(ARGS)

docs: $(VENV)/.dev ## Generate the references of options, errors and metrics
	$(BIN)/python scripts/reference.py

site: $(VENV)/.made ## The documentation as a site, in build/site
	$(INSTALL) ".[site]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebook: $(VENV)/.notebook ## Open the notebooks
	$(JAVA) $(BIN)/jupyter lab notebooks

notebooks: $(VENV)/.dev ## Run the notebooks and keep what they show; ARGS="05" for one of them
	$(JAVA) $(BIN)/python scripts/notebooks.py $(ARGS)

wheel: $(VENV)/.made ## The sdist and wheels in dist/, each tried in an environment of its own
	scripts/wheel.sh $(BIN)/python build/wheel dist

image: ## The image of conf/Dockerfile, which Compose and Kubernetes use; needs a Docker daemon
	docker build --file conf/Dockerfile --tag zmq-datasource --tag zmq-datasource:$$(sed -n 's/^version: //p' CITATION.cff) .

release: $(VENV)/.made ## All of a release up to its tag: checks, dist/, build/site, the image; see CONTRIBUTING.md
	$(BIN)/python scripts/release.py ready
	$(MAKE) check
	$(MAKE) wheel
	$(MAKE) site
	if docker info >/dev/null 2>&1; then $(MAKE) image; else echo "No image: no Docker daemon answers"; fi
	$(BIN)/python scripts/release.py next

$(VENV)/spark.jsa: $(VENV)/.dev tests/support/spark_archive.py # For Spark to start in half the time
	$(JAVA) $(BIN)/python -m tests.support.spark_archive $(abspath $@)

clean:
	rm -rf $(VENV) build dist

# The package alone, which the demo needs; all that it is worked on with; JupyterLab, to look at the notebooks.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable
# An editable install compiles the core, and does it again when it has changed.
UNUSED := site-packages/(pip|setuptools|debugpy|.*/tests)/
INSTALLED := pyproject.toml hatch_build.py zmq_datasource/transport/_core.c

$(VENV)/.made: scripts/python.sh
	scripts/python.sh $(PYTHON) $(VENV)
	touch $@

$(VENV)/.package: $(VENV)/.made $(INSTALLED)
	$(INSTALL) ".[spark]"
	touch $@

$(VENV)/.dev: $(VENV)/.made $(INSTALLED)
	$(INSTALL) ".[dev]" --no-compile
	# pip would do it on one core, and with modules that are never imported.
	-$(BIN)/python -m compileall -q -j 0 -x '$(UNUSED)' $(VENV)/lib zmq_datasource tests
	touch $(VENV)/.package $@

$(VENV)/.notebook: $(VENV)/.made $(INSTALLED)
	$(INSTALL) ".[notebook]"
	touch $(VENV)/.package $@
