# Everything a newcomer needs: `make quickstart` to see it learn, `make test` to see every check pass.
PYTHON ?= python3
BIN := .venv/bin
RUN ?= runs/quickstart

.PHONY: help quickstart watch test clean
help:
	@echo "make quickstart   set up, train the three-game agent in $(RUN), evaluate it, write its report (about 10 minutes)"
	@echo "make watch        set up and serve the page that shows the agent of results/agent play, on http://127.0.0.1:8080"
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

watch: $(BIN)/.ready
	$(BIN)/presage watch results/agent --k 50

# The page is tested in Chromium: installed where that is possible, else those tests are skipped.
.PHONY: browser
browser:
	@if ! command -v chromedriver >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get -qq update && apt-get -qqy install chromium chromium-driver >/dev/null || true; fi
	@command -v chromedriver >/dev/null || echo "no chromedriver here: the page will not be tested in a browser"

# One thread for each of the parallel test processes: more would only fight each other.
test: $(BIN)/.ready browser
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 4 --cov --cov-report=
	@$(BIN)/coverage report --format=total | sed 's/^/coverage: /; s/$$/ %/'

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .coverage*
