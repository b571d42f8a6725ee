# demo: see it learn.  test: the whole suite.  check: lint, types, format.  bench: the benchmarks of the local backend
# vllm: install a real vLLM for CPU, in an environment of its own (2.4 GB).  test-vllm: the tests that need it.
# (others: python -m benchmarks.training, .serving, .gateway, .cost and .ledger).
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready
VLLM := .venv-vllm

.PHONY: setup demo test check vllm test-vllm bench clean
.DEFAULT_GOAL := setup

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --progress-bar off -c constraints.txt -e '.[local,demo,dev]'
	@touch $(READY)

demo: $(READY)
	$(BIN)/python -m examples.demo $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

vllm:
	@$(PYTHON) tests/install_vllm.py $(VLLM)

test-vllm: $(READY)
	$(BIN)/python -m pytest --vllm=$(VLLM) tests/test_vllm.py $(ARGS)

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf .venv $(VLLM) runs
