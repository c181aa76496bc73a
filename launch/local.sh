#!/usr/bin/env bash
# Trains with several processes on this machine, which find each other on 127.0.0.1:
#   launch/local.sh COUNT COMMAND…
#   launch/local.sh 2 python -m qrag_jax.train --config=configs/quickstart.py --workdir=runs/two
# Each process gets --hosts=127.0.0.1:PORT,COUNT,NUMBER after the command's own words, and a GPU of
# its own where there are GPUs: those in CUDA_VISIBLE_DEVICES, or all. JAX_PLATFORMS=cpu uses none.
#
# SIGTERM, SIGINT and SIGHUP stop all processes before the same step, with a checkpoint. If one
# fails, all end. The exit status is the first that is not 0. From the environment:
#   RESTARTS=N  starts all again, N times at most, after a failure that is neither input that cannot
#               be used (2) nor a stop (129, 130, 143); they go on from the last checkpoint
#   LEFT=N      how many processes are started then; by default COUNT, or as many as there still are
#               GPUs. The batch must split over them.
#   GRACE=N     seconds that the others get when one has failed; then they are killed
#
# With a language model beside the trainer, here on the last of three GPUs:
#   launch/with_sidecar.sh --config.llm.server.model=Qwen/Qwen3-4B --config.llm.server.devices=2 \
#     --config.llm.server.memory_share=0.9 -- env CUDA_VISIBLE_DEVICES=0,1 \
#     launch/local.sh 2 python -m qrag_jax.train --config=configs/babilong.py:qa1 \
#     --config.reward.name=babilong_em
# With one on another machine: as at the end of launch/ssh.sh's remarks.
set -euo pipefail
# shellcheck source=launch/supervise.sh
source "$(dirname "${BASH_SOURCE[0]}")/supervise.sh"

if (($# < 2)); then
    fail "give a number of processes and a command: launch/local.sh COUNT COMMAND…"
fi
check_number COUNT "$1"
count=$((10#$1))
shift
((count > 0)) || fail "COUNT is 0; give 1 or more."
check_number LEFT "${LEFT:-$count}"

# The GPUs' names for CUDA_VISIBLE_DEVICES; they are counted anew for each attempt. A name of
# nvidia-smi is a UUID, because CUDA may number the GPUs otherwise.
find_gpus() {
    gpus=()
    if [[ ${JAX_PLATFORMS:-} == cpu ]]; then
        return
    elif [[ -n ${CUDA_VISIBLE_DEVICES+given} ]]; then
        IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
    elif command -v nvidia-smi >/dev/null; then
        mapfile -t gpus < <(nvidia-smi --query-gpu=uuid --format=csv,noheader 2>/dev/null)
    fi
}

# A port on which nothing listens, below those that Linux gives to connections.
find_port() {
    for _ in {1..100}; do
        port=$((20000 + RANDOM % 12000))
        if ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
            return
        fi
    done
    fail "no port is free on 127.0.0.1."
}

attempts=0
start_all() {
    local number
    find_gpus
    if ((attempts > 0)); then
        count=${LEFT:-$count}
        if ((${#gpus[@]} > 0 && ${#gpus[@]} < count)); then
            say "GPUs left: ${#gpus[@]}; as many processes are started"
            count=${#gpus[@]}
        fi
    elif ((${#gpus[@]} > 0 && ${#gpus[@]} < count)); then
        fail "$count processes need a GPU each, and the number of GPUs is ${#gpus[@]}; give fewer" \
            "processes, or set JAX_PLATFORMS=cpu."
    fi
    attempts=$((attempts + 1))
    find_port
    for ((number = 0; number < count; number++)); do
        start_one "$number" "--hosts=127.0.0.1:$port,$count,$number"
    done
}

command=("$@")
start_one() {
    local number=$1 hosts=$2
    if ((${#gpus[@]} > 0)); then
        CUDA_VISIBLE_DEVICES=${gpus[number]} "${command[@]}" "$hosts" </dev/null &
    else
        "${command[@]}" "$hosts" </dev/null &
    fi
    pids[number]=$!
}

# Each process leads a group of its own (set -m): Ctrl-C reaches it through this script alone, and
# what it started is killed with it.
send_all() {
    local pid
    for pid in "${pids[@]}"; do
        if [[ $1 == KILL ]]; then
            kill -s KILL -- "-$pid" 2>/dev/null || true
        else
            kill -s "$1" "$pid" 2>/dev/null || true
        fi
    done
}

set -m
run_together
