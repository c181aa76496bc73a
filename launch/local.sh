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
# With one on another machine: start vLLM there, and name it and the variable with its key:
#   … --config.llm.url=http://HOST:8100/v1 --config.llm.model=Qwen/Qwen3-4B \
#     --config.llm.api_key_env=VLLM_API_KEY
set -euo pipefail
RESTARTS=${RESTARTS:-0}
GRACE=${GRACE:-60}
REFUSED=2         # the trainer's exit status for input that cannot be used
pids=()
asked=            # the signal that told this script to stop
first_failure=0   # the first exit status of an attempt that is not 0
refused=          # not empty if a process refused its input

say() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
}

fail() {
    say "error: $*"
    exit "$REFUSED"
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

# The processes see one signal, SIGTERM: of several processes, each takes any other one for it. A
# second Ctrl-C ends processes that hang.
pass_on() {
    if [[ $1 == INT && $asked == INT ]]; then
        send_all KILL
    else
        asked=$1
        send_all TERM
    fi
}

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

start_all() {
    local number
    find_port
    for ((number = 0; number < count; number++)); do
        (
            if ((${#gpus[@]} > 0)); then
                export CUDA_VISIBLE_DEVICES=${gpus[number]}
            fi
            exec "$@" "--hosts=127.0.0.1:$port,$count,$number" </dev/null
        ) &
        pids[number]=$!
    done
    if [[ -n $asked ]]; then
        send_all TERM # the signal came while some were not there yet
    fi
}

# Waits until all have ended. When one has failed, the others soon end by themselves; one that hangs
# is killed.
wait_for_all() {
    local number status deadline=0
    first_failure=0
    while ((${#pids[@]} > 0)); do
        for number in "${!pids[@]}"; do
            if ! kill -0 "${pids[number]}" 2>/dev/null; then
                status=0
                wait "${pids[number]}" 2>/dev/null || status=$?
                unset "pids[number]"
                ((status != REFUSED)) || refused=yes
                if ((status != 0 && first_failure == 0)); then
                    first_failure=$status
                    say "process $number has ended with $status"
                    deadline=$((SECONDS + GRACE))
                fi
            fi
        done
        if ((deadline > 0 && SECONDS > deadline)); then
            say "others go on without it; they are killed"
            send_all KILL
            deadline=$((SECONDS + GRACE))
        fi
        sleep 0.2 # a signal is handled when this ends
    done
}

(($# >= 2)) || fail "give a number of processes and a command: launch/local.sh COUNT COMMAND…"
COUNT=$1
shift
for name in COUNT RESTARTS GRACE ${LEFT+LEFT}; do
    [[ ${!name} =~ ^[0-9]+$ ]] || fail "$name is '${!name}'; give a whole number."
done
count=$((10#$COUNT))
((count > 0)) || fail "COUNT is 0; give 1 or more."
find_gpus
if ((${#gpus[@]} > 0 && ${#gpus[@]} < count)); then
    fail "$count processes need a GPU each, and the number of GPUs is ${#gpus[@]}; give fewer" \
        "processes, or set JAX_PLATFORMS=cpu."
fi

set -m
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT
trap 'pass_on HUP' HUP # nohup ignores it, and bash keeps that
trap 'send_all KILL' EXIT # if this script fails, it leaves nothing behind
for ((attempt = 0; ; attempt++)); do
    if ((attempt > 0)); then
        say "restart $attempt of $RESTARTS, from the last checkpoint"
        count=${LEFT:-$count}
        find_gpus
        if ((${#gpus[@]} > 0 && ${#gpus[@]} < count)); then
            say "GPUs left: ${#gpus[@]}; as many processes are started"
            count=${#gpus[@]}
        fi
    fi
    start_all "$@"
    wait_for_all
    case $first_failure in # done, stopped by a signal, or there is no such command
    0 | 129 | 130 | 143 | 126 | 127) break ;;
    esac
    if [[ -n $asked || -n $refused ]] || ((attempt >= RESTARTS)); then
        break
    fi
done
exit "$first_failure"
