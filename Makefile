# `make run` and `make test` set up what they need, on a machine with Python 3.11 and pip.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CASES := transformer_batch or moe_batch or moe_seq

.PHONY: run test check bench clean

run: $(VENV)/ready          ## the three cases, 20 steps on 8 ranks; the report goes to reports/latest
	$(BIN)/bitproof run -k '$(CASES)'

test: $(VENV)/ready         ## the test suite
	$(BIN)/python -m pytest -n 2

check: $(VENV)/ready-dev    ## format, lint, types and tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2

bench: $(VENV)/ready        ## figures against the budgets; takes a few minutes
	$(BIN)/python tests/benchmarks/bench_passes.py
	$(BIN)/python tests/benchmarks/bench_run.py
	$(BIN)/python tests/benchmarks/bench_scaling.py
	$(BIN)/python tests/benchmarks/bench_digest.py
	$(BIN)/python tests/benchmarks/bench_comparison.py

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test,oracle]'
	touch $@

$(VENV)/ready-dev: $(VENV)/ready
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
