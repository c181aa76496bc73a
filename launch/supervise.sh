# shellcheck shell=bash
# Keeps the processes of one training together: all end when one fails, and all may start again.
# local.sh and ssh.sh read this file. They define
#   start_all       starts the processes of an attempt and puts their ids into `pids`
#   send_all NAME   sends a signal to all processes that still run
#
# From the environment:
#   RESTARTS  how often all are started again after a failure; 0 by default
#   GRACE     seconds that the others get when one has failed; 60 by default

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

check_number() {
    [[ $2 =~ ^[0-9]+$ ]] || fail "$1 is '$2'; give a whole number."
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

# Waits until all have ended. When one has failed, the others soon end by themselves; one that hangs
# is killed.
wait_for_all() {
    local number running status deadline=0
    first_failure=0
    while :; do
        running=
        for number in "${!pids[@]}"; do
            if kill -0 "${pids[number]}" 2>/dev/null; then
                running=yes
                continue
            fi
            status=0
            wait "${pids[number]}" 2>/dev/null || status=$?
            unset "pids[number]"
            if ((status == REFUSED)); then
                refused=yes
            fi
            if ((status != 0 && first_failure == 0)); then
                first_failure=$status
                say "process $number has ended with $status"
                deadline=$((SECONDS + GRACE))
            fi
        done
        if [[ -z $running ]]; then
            return 0
        fi
        if ((deadline > 0 && SECONDS > deadline)); then
            say "others go on without it; they are killed"
            send_all KILL
            deadline=$((SECONDS + GRACE))
        fi
        sleep 0.2 # a signal is handled when this ends
    done
}

# Starts all, waits for them, and starts them again while that may help. Returns the first exit
# status that is not 0.
run_together() {
    local attempt=0
    check_number RESTARTS "$RESTARTS"
    check_number GRACE "$GRACE"
    trap 'pass_on TERM' TERM
    trap 'pass_on INT' INT
    trap 'pass_on HUP' HUP # nohup ignores it, and bash keeps that
    trap 'send_all KILL' EXIT # if this script fails, it leaves nothing behind
    while :; do
        start_all
        if [[ -n $asked ]]; then
            send_all TERM # the signal came while some were not there yet
        fi
        wait_for_all
        case $first_failure in
        0 | 129 | 130 | 143) return "$first_failure" ;; # done, or stopped by a signal
        126 | 127) return "$first_failure" ;;           # there is no such command
        esac
        if [[ -n $asked || -n $refused ]] || ((attempt >= RESTARTS)); then
            return "$first_failure"
        fi
        attempt=$((attempt + 1))
        say "restart $attempt of $RESTARTS, from the last checkpoint"
    done
}
