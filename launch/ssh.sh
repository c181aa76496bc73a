#!/usr/bin/env bash
# Trains with one process on each of several hosts, which it starts by ssh in this same folder:
#   launch/ssh.sh HOSTS-FILE COMMAND…
#   launch/ssh.sh hosts.txt .venv/bin/python -m qrag_jax.train --config=configs/hotpotqa.py \
#     --config.train.accumulation=1 --workdir=/shared/runs/hotpotqa
# HOSTS-FILE has a host a line, as ssh knows it (user@host, or a name of ~/.ssh/config); a second
# word is its address for the other hosts, where that is another one. Lines that begin with # are
# left out. This folder must be on each host, and --workdir on a disk that all of them share. ssh
# must need no password. Each process gets --hosts=ADDRESS:PORT,COUNT,NUMBER after the command's own
# words, ADDRESS being the first host's: on that host, too, it must be the network's and not
# 127.0.1.1, so an IP address is best. JAX's port has no password: the network must be private.
#
# SIGTERM, SIGINT and SIGHUP stop all hosts before the same step, with a checkpoint. If one fails,
# all end; so do they when this script or its connection is gone. The exit status is the first that
# is not 0. From the environment:
#   PORT=N      the port on the first host; 8476 by default
#   RESTARTS=N  starts all again, N times at most, after a failure that is neither input that cannot
#               be used (2) nor a stop (129, 130, 143), on those hosts which ssh still reaches. The
#               batch must split over them.
#   GRACE=N     seconds that the others get when one has failed; then they are killed
# Variables such as CUDA_VISIBLE_DEVICES are not passed on; write env NAME=VALUE before the command.
#
# With a language model beside each host's trainer, here on four of eight GPUs; its log is each host's
# own:
#   launch/ssh.sh hosts.txt launch/with_sidecar.sh --config.llm.server.model=Qwen/Qwen3-4B \
#     --config.llm.server.devices=4,5,6,7 --config.llm.server.memory_share=0.9 \
#     --config.llm.server.arguments="('--tensor-parallel-size', '4')" \
#     --config.llm.server.log=/tmp/vllm.log -- env CUDA_VISIBLE_DEVICES=0,1,2,3 \
#     .venv/bin/python -m qrag_jax.train --config=configs/babilong.py:qa1 \
#     --config.reward.name=babilong_em --config.train.batch_size=16 \
#     --config.train.accumulation=1 --workdir=/shared/runs/babilong
# With one on a host of its own, start vLLM there, and name it in the command:
#   VLLM_API_KEY=… .venv-vllm/bin/python -m vllm.entrypoints.openai.api_server --host 0.0.0.0 \
#     --port 8100 --model Qwen/Qwen3-4B
#   launch/ssh.sh hosts.txt … --config.llm.url=http://HOST:8100/v1 --config.llm.model=Qwen/Qwen3-4B \
#     --config.llm.api_key_env=VLLM_API_KEY
# VLLM_API_KEY must be in the environment that ssh gives on each host (~/.ssh/environment, or the
# shell's profile); on a command line all users of the host could read it.
set -euo pipefail
# shellcheck source=launch/supervise.sh
source "$(dirname "${BASH_SOURCE[0]}")/supervise.sh"

PORT=${PORT:-8476}
OPTIONS=(-o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15 -o ServerAliveCountMax=4)

if (($# < 2)); then
    fail "give a file of hosts and a command: launch/ssh.sh HOSTS-FILE COMMAND…"
fi
check_number PORT "$PORT"
[[ -r $1 ]] || fail "$1 cannot be read; give a file with a host a line."
hosts=()
addresses=()
while read -r host address _ || [[ -n $host ]]; do
    case $host in
    '' | '#'*) continue ;;
    -*) fail "$1 has the host '$host', which ssh would take for an option." ;;
    esac
    hosts+=("$host")
    addresses+=("${address:-${host#*@}}")
done <"$1"
shift
((${#hosts[@]} > 0)) || fail "the file of hosts names none."
command=("$@")

# What each host runs. Its standard input is the line to this script: a word on it is a signal for
# the command, and its end means that nobody watches over the command any more.
# shellcheck disable=SC2016
REMOTE='
cd "$1" || exit 2
shift
exec 3<&0 </dev/null
set -m
"$@" 3<&- &
command=$!
set +m
{
    while read -r name <&3; do
        if [[ $name == KILL ]]; then
            kill -s KILL -- "-$command"
        else
            kill -s "$name" "$command"
        fi
    done
    kill -s TERM "$command"
} >/dev/null 2>&1 &
reader=$!
exec 3<&-
wait "$command"
status=$?
kill "$reader" 2>/dev/null
exit "$status"
'

# The words as one line for any shell that the host may have: each stands in single quotes.
quoted() {
    local word line=
    for word in "$@"; do
        line+="'${word//\'/\'\\\'\'}' "
    done
    printf '%s' "$line"
}

reached() {
    # shellcheck disable=SC2029
    ssh -n "${OPTIONS[@]}" "$1" true
}

# Keeps the hosts that answer.
keep_reached() {
    local number left=() of_left=()
    for number in "${!hosts[@]}"; do
        if reached "${hosts[number]}"; then
            left+=("${hosts[number]}")
            of_left+=("${addresses[number]}")
        else
            say "${hosts[number]} is not reached; the others go on without it"
        fi
    done
    ((${#left[@]} > 0)) || {
        say "error: no host is reached"
        exit 1
    }
    hosts=("${left[@]}")
    addresses=("${of_left[@]}")
}

lines=() # of each process, the descriptor of the line to its host
attempts=0
start_all() {
    local number
    close_lines
    if ((attempts > 0)); then
        keep_reached
    else
        for number in "${!hosts[@]}"; do
            reached "${hosts[number]}" || fail "ssh does not reach ${hosts[number]} (see above)."
        done
    fi
    attempts=$((attempts + 1))
    for number in "${!hosts[@]}"; do
        start_one "$number" "--hosts=${addresses[0]}:$PORT,${#hosts[@]},$number"
    done
}

start_one() {
    local number=$1 folder text line
    text="exec bash -c $(quoted "$REMOTE" launch "$PWD" "${command[@]}" "$2")"
    folder=$(mktemp -d)
    mkfifo "$folder/line"
    # It must not hold the lines of the others open.
    # shellcheck disable=SC2029
    (
        close_lines
        exec ssh "${OPTIONS[@]}" "${hosts[number]}" "$text"
    ) <"$folder/line" &
    pids[number]=$!
    exec {line}>"$folder/line"
    lines[number]=$line
    rm -r "$folder" # both ends are open
}

close_lines() {
    local each
    for each in "${lines[@]}"; do
        exec {each}>&-
    done
    lines=()
}

send_all() {
    local number
    for number in "${!pids[@]}"; do
        # In a shell of its own: a line that nobody reads ends the writer.
        (printf '%s\n' "$1" >&"${lines[number]}") 2>/dev/null || true
    done
    if [[ $1 == KILL ]] && ((${#pids[@]} > 0)); then
        sleep 2 # the word is on its way
        for number in "${!pids[@]}"; do
            kill -s KILL "${pids[number]}" 2>/dev/null || true
        done
    fi
}

set -m
run_together
