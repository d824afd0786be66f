# Everything a newcomer needs: `make quickstart` to see it learn, `make test` to see every check pass.
PYTHON ?= python3
BIN := .venv/bin
RUN ?= runs/quickstart

.PHONY: help quickstart test clean
help:
	@echo "make quickstart   set up, train the three-game agent in $(RUN), evaluate it, write its report (about 10 minutes)"
	@echo "make test         set up and run every check (about 10 minutes)"
	@echo "make clean        remove the virtual environment and caches; runs/ stays"

# The stamp is newer than pyproject.toml exactly when the environment is up to date, so set-up happens once.
$(BIN)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "presage needs Python 3.11 or newer; try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

quickstart: $(BIN)/.ready
	$(BIN)/presage train --preset quickstart --run $(RUN)
	$(BIN)/presage evaluate $(RUN) --episodes 16 --max-frames 9000 --random
	$(BIN)/presage evaluate $(RUN) --episodes 16 --max-frames 9000
	$(BIN)/presage report $(RUN) --out $(RUN)/report

# One thread for each of the parallel test processes: more would only fight each other.
test: $(BIN)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 4 --cov --cov-report=
	@$(BIN)/coverage report --format=total | sed 's/^/coverage: /; s/$$/ %/'

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .coverage*
