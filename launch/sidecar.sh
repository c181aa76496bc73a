#!/bin/sh
# Serves a language model with vLLM until Ctrl-C, for trainers given the URL it prints:
#   launch/sidecar.sh --config.llm.server.model=FOLDER […]
# QRAG_PYTHON is the trainer's interpreter; vLLM has an environment of its own: make sidecar.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
config=--config=$root/configs/quickstart.py
for word in "$@"; do
    case $word in
    --config | --config=*) config= ;;
    esac
done
exec "${QRAG_PYTHON:-$root/.venv/bin/python}" -m qrag_jax.serve_llm ${config:+"$config"} \
    --config.llm.server.python="$root/.venv-vllm/bin/python" "$@"
