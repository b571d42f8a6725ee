# demo: see it learn.  test: the suite but for its slow tests.  test-all: everything.  test-part PART=2/8: those of the slow tests
# whose turn it is.  check: lint, types, format, and the pages.  docs: the pages as a site, in docs/_build.
# soak: twenty minutes under load, with everything going wrong in turn.
# real: a wish said once to a real model of 1.5 billion parameters on this CPU: fetches 1.1 GB, writes 3.1 GB, takes eight to
#   eleven hours of one core by estimate; goes on where it was. ARGS=--smollm2: one of 135 million parameters is corrected instead:
#   fetches 93 MB, writes 540 MB.
# real-judge: that small model under the judge of `make judge` in place of rules; goes on where it was.
# real-task: the same small model learns to do sums with a calculator, by outcome and by outcome and step; an hour of one core; goes on where it was.
# judge: a real model of 1.5 billion parameters judges: fetches 1.1 GB, takes 20 minutes of one core; goes on where it was.
#   ARGS='--most 0' judges everything.
# bench: the benchmarks of the local backend (docs/benchmarks.md has the others).
# test-4bit: the tests of a base in four bits, with bitsandbytes in a folder of its own (43 MB).
# vllm: install a real vLLM for CPU, in an environment of its own (2.4 GB).  test-vllm: the tests that need it.
# cookbook: install tinker-cookbook, in an environment of its own (1.6 GB).  test-cookbook: its two loops against the stand-in for Tinker.
# verifiers: install verifiers, in an environment of its own (0.6 GB).  test-verifiers: its harnesses, as clients of the gateway.
# trackers: install wandb in an environment of its own.  test-trackers: what --report-to tells it.
# dist: the packages of a release, and the list of all that they bring, in dist.
# tracks: train the shipped beginner on two tracks, three seeds each, and show what came of it; again: go on.
#   ARGS="--seeds 1 --steps 8 --rewards steps" is a short one.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready
VLLM := .venv-vllm
COOKBOOK := .venv-cookbook
VERIFIERS := .venv-verifiers
TRACKERS := .venv-trackers
BITS := .venv-4bit
JUDGE := .venv-judge
SBOM := .venv-sbom

.PHONY: setup dist demo real real-judge real-task judge test test-all test-part soak check test-4bit vllm test-vllm cookbook test-cookbook verifiers test-verifiers trackers test-trackers tracks bench clean
.DEFAULT_GOAL := setup
# Images often set this; every worker and process of the tests would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

setup: $(READY)
	@echo "Installed. Next: source .venv/bin/activate, then tinker-claw; or make demo."

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Installing into .venv: about 2 GB, one to several minutes."
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install -c constraints.txt -e '.[local,demo,gui,real,dev]'
	@touch $(READY)

demo: $(READY)
	$(BIN)/python -m examples.demo $(ARGS)

real: $(READY)
	$(BIN)/python -m examples.real $(ARGS)

real-judge: $(READY) $(JUDGE)/.ready
	$(BIN)/python -m examples.personalize.smollm2
	$(BIN)/python -m examples.personalize configs/personalize/judged.toml --real-judge $(ARGS)

real-task: $(READY)
	$(BIN)/python -m examples.personalize.smollm2
	$(BIN)/python -m examples.tracks.compare --tracks fenced --seeds 2 --steps 10 --groups 40 --exam-tasks 100 --concurrency 16 \
	  --out runs/real-task $(ARGS)

# xllamacpp serves the model: 34 MB, in an environment of its own.
$(JUDGE)/.ready:
	$(PYTHON) -m venv $(JUDGE)
	$(JUDGE)/bin/pip install --quiet --progress-bar off xllamacpp==2026.10.11549
	@touch $@

judge: $(READY) $(JUDGE)/.ready
	$(BIN)/python -m examples.judge_check --real $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n 4 --dist loadfile $(ARGS)

test-all: $(READY)
	$(BIN)/python -m pytest -n 4 --dist loadfile --slow all $(ARGS)

test-part: $(READY)
	$(BIN)/python -m pytest -n 4 --dist loadfile --slow $(PART) $(ARGS)

soak: $(READY)
	$(BIN)/python -m tests.lab.soak $(ARGS)

check: docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.lab.plain_words
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/hadolint Dockerfile
	$(BIN)/pyright

# Anew each time, because a page that has not changed is warned of once only. A dead link is an error.
.PHONY: docs
docs: $(READY)
	$(BIN)/sphinx-build -q -E -n -W --keep-going docs docs/_build

# Beside the environment, not in it: peft imports bitsandbytes wherever it is installed.
test-4bit: $(READY)
	$(BIN)/pip install --quiet --progress-bar off --upgrade --no-deps --target $(BITS) \
	  -c constraints.txt bitsandbytes
	PYTHONPATH=$(BITS) $(BIN)/python -m pytest tests/local_gpu/test_quantized.py $(ARGS)

vllm:
	@$(PYTHON) -m tests.lab.install_vllm $(VLLM)

test-vllm: $(READY)
	$(BIN)/python -m pytest --vllm=$(VLLM) tests/local_gpu/sample/test_vllm.py tests/local_gpu/sample/test_vllm_eyes.py tests/local_gpu/sample/test_vllm_product.py $(ARGS)

cookbook:
	@$(PYTHON) -m tests.lab.install_cookbook $(COOKBOOK)

test-cookbook: $(READY)
	$(BIN)/python -m pytest --cookbook=$(COOKBOOK) tests/local_gpu/tinker/test_cookbook.py $(ARGS)

verifiers:
	@$(PYTHON) -m tests.lab.install_verifiers $(VERIFIERS)

test-verifiers: $(READY)
	$(BIN)/python -m pytest --verifiers=$(VERIFIERS) tests/tracks/test_verifiers.py $(ARGS)

trackers:
	$(PYTHON) -m venv $(TRACKERS)
	$(TRACKERS)/bin/pip install --quiet --progress-bar off -r tests/lab/trackers.txt

test-trackers: $(READY)
	$(BIN)/python -m pytest --trackers=$(TRACKERS) tests/sinks/test_trackers.py $(ARGS)

tracks: $(READY)
	$(BIN)/python -m examples.tracks.compare $(ARGS)

bench: $(READY)
	$(BIN)/python -m benchmarks.training $(ARGS)

# The list is of an environment that has the packages alone.
dist: $(READY)
	rm -rf dist
	$(BIN)/hatchling build
	$(PYTHON) -m venv --clear $(SBOM)
	$(SBOM)/bin/pip install --quiet --progress-bar off -c constraints.txt dist/*.whl
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --mc-type application \
	  --output-reproducible --output-file dist/tinker-claw.cdx.json $(SBOM)

clean:
	rm -rf .venv $(VLLM) $(COOKBOOK) $(VERIFIERS) $(TRACKERS) $(BITS) $(JUDGE) $(SBOM) dist
