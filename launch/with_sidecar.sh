#!/usr/bin/env bash
# Serves a language model with vLLM while a command runs, and gives the command its address:
#   launch/with_sidecar.sh --config.llm.server.model=FOLDER […] -- COMMAND…
# The words before -- are those of launch/sidecar.sh. When the model answers, the command is started
# with --config.llm.url=… and --config.llm.model=… after its own words; when the command ends, so
# does the model. The exit status is the command's. The model is on a Unix socket, for this user's
# trainers alone. A run that is one process needs no such script: it starts its own server.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
sidecar=()
while (($# > 0)) && [[ $1 != -- ]]; do
    sidecar+=("$1")
    shift
done
if (($# < 2)); then
    echo "with_sidecar.sh: error: give -- and a command after the words for the model." >&2
    exit 2
fi
shift

# Both get groups of their own (set -m), so that Ctrl-C reaches them through this script alone: the
# command must end before its model does. Signals are caught before either of them is there.
set -m
model=
command=
asked=
stop() {
    asked=$1
    if [[ -n $command ]]; then
        kill -s "$1" "$command" 2>/dev/null || true
    elif [[ -n $model ]]; then
        kill -s TERM "$model" 2>/dev/null || true
    fi
}
trap 'stop TERM' TERM
trap 'stop INT' INT
trap 'stop HUP' HUP
# Its GPU is free for the next command when this script has ended.
trap '[[ -z $model ]] || { kill -s TERM "$model" 2>/dev/null || true; wait "$model" 2>/dev/null || true; }' EXIT

folder=$(mktemp -d)
mkfifo "$folder/line"
"$here/sidecar.sh" "${sidecar[@]}" </dev/null >"$folder/line" &
model=$!
exec 3<"$folder/line"
rm -r "$folder" # both ends are open

# The line with its address comes when it answers; end of file comes when it has failed. `read` is
# tried again for a short while each, because a signal is handled between commands only.
line=
until IFS= read -r -t 1 -u 3 part && line+=$part; do
    (($? > 128)) || break
    line+=$part
    [[ -z $asked ]] || break
done
if [[ -n $asked ]]; then
    exit 143
fi
if [[ -z $line ]]; then
    status=0
    wait "$model" || status=$?
    echo "with_sidecar.sh: error: the language model has ended with $status; see above." >&2
    exit "$((status == 0 ? 1 : status))"
fi

"$@" "${line%% *}" "${line#* }" </dev/null &
command=$!
if [[ -n $asked ]]; then
    stop "$asked" # it came before there was a command
fi
status=0
wait "$command" || status=$?
while kill -0 "$command" 2>/dev/null; do # a signal has ended the wait, not yet the command
    status=0
    wait "$command" || status=$?
done
exit "$status"
