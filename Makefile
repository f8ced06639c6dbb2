# make run     install what is needed, fetch the starter model, and talk to it   (PROMPT="..." asks one question)
# make test    everything the tests need, and the whole test suite               (TESTS="tests/cli -k history" runs some)
# make check   ruff and mypy
# make clean   remove what the above made in this folder
#
# Needs Python 3.11 or later (another one: make PYTHON=/path/to/python3.12), make and git. Everything is installed into .venv here.

.DEFAULT_GOAL := run
.PHONY: run test check clean
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
PY := $(BIN)/python
TESTS ?= tests
# the prompt goes through the environment, unexpanded: neither make nor a shell may read anything into it
override PROMPT := $(value PROMPT)
export PROMPT

run: $(VENV)/.run
	@$(PY) scripts/first_run.py

test: $(VENV)/.test
	$(PY) -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile $(TESTS)

check: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) scripts/typecheck.py
	@$(PY) scripts/budget.py

# Stamps: an environment is made once, and filled again only when pyproject.toml has changed.
$(VENV)/.made: scripts/venv.sh
	@sh scripts/venv.sh $(VENV) $(PYTHON)
	@touch $@

$(VENV)/.run: pyproject.toml $(VENV)/.made
	@echo "Installing localrun and its libraries into $(VENV) (the first time this takes a minute or two)"
	@$(PY) -m pip install --disable-pip-version-check --quiet --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.run
	@echo "Installing what the tests need"
	@$(PY) -m pip install --disable-pip-version-check --quiet --editable '.[test,dev]'
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis localrun.egg-info
