# One command per intention. Needs Python 3.10 or newer and make; everything else is installed into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The name of the project's root may hold no test options; give them here: make test PYTEST_ARGS="-k seal".
PYTEST_ARGS ?=
# Three files of tests at a time, for tests wait half of their time; in their order, or the longest would be left for the end.
# 0 runs one after the other.
PYTEST_JOBS ?= 3

# Frameworks that holdfast is used through; each is tested in an environment of its own, with the versions of constraints-doors.txt.
DOORS := huggingface trl lightning deepspeed megatron torchtitan torch-checkpointing ray mindspore
TESTS_huggingface := tests/adapters/test_huggingface.py tests/adapters/test_huggingface_moments.py tests/adapters/test_accelerate_moments.py
TESTS_trl := tests/adapters/test_trl_moments.py
TESTS_lightning := tests/adapters/test_lightning.py tests/adapters/test_lightning_moments.py
TESTS_torch-checkpointing := tests/adapters/test_torch_checkpointing.py
TESTS_mindspore := tests/adapters/test_aiturbo.py
EXAMPLES_huggingface := huggingface_trainer
EXAMPLES_lightning := lightning_fit or stateful_loader
EXAMPLES_deepspeed := deepspeed_zero
EXAMPLES_ray := ray_train

# Which rows of the matrix (all; `make matrix ROWS=--list` names them), and which tests instead of those of the row.
ROWS ?=
MATRIX_TESTS ?=

# How long `make redteam` attacks, from which seed (drawn and told by default), and the number of one case of it.
SECONDS ?= 60
SEED ?=
CASE ?=

.PHONY: help venv demo test coverage lint docs serve format bench gpu fuzz redteam planted clean matrix doors $(DOORS:%=door-%)
.PRECIOUS: .venv-%/.installed

help:
	@echo "make venv    create .venv and install holdfast with its tools (quick the second time)"
	@echo "make demo    train on two simulated nodes, kill ranks and a node, come back bit for bit"
	@echo "make test    ruff, mypy and the test suite"
	@echo "make coverage  the test suite with lines and branches counted, and the page of the site about them; takes twice as long"
	@echo "make lint    ruff and mypy only"
	@echo "make format  ruff mends what it can, and lays the code out"
	@echo "make bench   the benchmarks in their short form"
	@echo "make redteam what scripts do around a save x faults x moments x settings, for SECONDS= (60), drawn from SEED=;"
	@echo "             one of them again: make redteam SEED=7 CASE=12; what fails is made as plain as it can be"
	@echo "make planted every bug that a drill is known to find, DRILL=crash, faults, power or sim; some of them: BUGS='one-is-kept'"
	@echo "make fuzz    every parser of foreign bytes for SECONDS= (600) each, drawn from SEED=; some of them: PARSERS='values image'"
	@echo "make gpu     everything that only a card can show, in two calls of under ten minutes; needs no venv and no network:"
	@echo "             make gpu PYTHON=python3 SITE=DIR, where DIR has what that python3 lacks"
	@echo "make docs    the documentation as a site in build/site, with reference pages made from the code; strict"
	@echo "make serve   the same in a browser, anew at every change"
	@echo "make doors   the tests of every framework, each in a .venv-NAME; one of them: make door-NAME"
	@echo "             ($(DOORS))"
	@echo "make matrix  the suite on other releases of torch, Python and frameworks: one environment at a time, made and removed;"
	@echo "             results, tables and ranges are kept; ROWS='torch-2.14 trl-newest', MATRIX_TESTS='tests/checkpoint'"
	@echo "make clean   remove build outputs and caches; .venv stays"
	@echo "make help    this list"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/holdfast demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n $(PYTEST_JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Counted also in processes that tests start, fork or leave by `os._exit` (pyproject.toml). Failing tests fail it at its end.
coverage: $(STAMP)
	rm -rf build/coverage
	@failed=0; $(BIN)/python -m coverage run -m pytest -n $(PYTEST_JOBS) --dist loadfile --no-loadscope-reorder --timeout 600 \
	    $(PYTEST_ARGS) || failed=$$?; \
	  $(BIN)/python -m coverage combine -q && $(BIN)/python -m coverage json -q -o build/coverage/report.json && \
	  $(BIN)/python -m website.covered build/coverage/report.json website/covered.json && exit $$failed

DOCS_STAMP := $(VENV)/.docs-installed
$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $(DOCS_STAMP)

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --config-file website/mkdocs.yml
	@echo "build/site/index.html"

serve: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --strict --config-file website/mkdocs.yml

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m benchmarks.stall --quick
	$(BIN)/python -m benchmarks.restore --quick
	$(BIN)/python -m benchmarks.persist --quick
	$(BIN)/python -m benchmarks.plan --quick

redteam: $(STAMP)
	cd tests && ../$(BIN)/python -m redteam --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(if $(CASE),--case $(CASE))

DRILL ?= crash
BUGS ?=
planted: $(STAMP)
	cd tests && ../$(BIN)/python -m planted $(DRILL) $(BUGS)

FUZZ_SECONDS := $(if $(filter command line environment,$(origin SECONDS)),$(SECONDS),600)
PARSERS ?=
fuzz: $(STAMP)
	cd tests && nice -n 19 ../$(BIN)/python -m fuzz --seconds $(FUZZ_SECONDS) $(if $(SEED),--seed $(SEED)) $(PARSERS)

# On a machine with a card and without a network: make gpu PYTHON=python3 SITE=DIR, where DIR has what python3 lacks.
SITE ?=
gpu:
	@failed=; for call in A B; do PYTHONPATH="$(if $(SITE),$(SITE):)src:." $(PYTHON) -m benchmarks.gpu --call $$call --seconds 520 || failed=1; done; \
	  test -z "$$failed"

doors:
	@failed=; for door in $(DOORS); do $(MAKE) --no-print-directory door-$$door || failed="$$failed $$door"; done; \
	  test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

$(DOORS:%=door-%): door-%: .venv-%/.installed
	.venv-$*/bin/python -m pytest --slow $(or $(TESTS_$*),tests/adapters/test_$*.py) $(PYTEST_ARGS)
	$(if $(EXAMPLES_$*),.venv-$*/bin/python -m pytest --slow tests/examples/test_doors.py -k "$(EXAMPLES_$*)" $(PYTEST_ARGS))

.venv-%/.installed: pyproject.toml constraints.txt constraints-doors.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --constraint constraints.txt --constraint constraints-doors.txt \
	  --editable ".[dev,$*]" torchdata
	touch $@

matrix: $(STAMP)
	$(BIN)/python -m benchmarks.matrix $(ROWS) $(if $(MATRIX_TESTS),--tests "$(MATRIX_TESTS)") $(if $(PYTEST_ARGS),--options="$(PYTEST_ARGS)")

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache
