#!/usr/bin/env bash
# What slurm.sbatch runs as each task: slurm_task.sh NOTES COMMAND…
# It waits for the node's language model if there is one, runs the command, and leaves a note in the
# folder NOTES if the command refused its input or was stopped. A stop counts as success, because
# SLURM would at once kill the other tasks, which may still be saving.
set -euo pipefail

notes=$1
shift
asked=
trap 'asked=yes' TERM INT HUP # while a command runs, bash waits for its end all the same

if [[ -n ${SIDECAR_MODEL:-} ]]; then
    model=$notes/model-$SLURMD_NODENAME
    until [[ -s $model ]]; do
        if [[ -n $asked ]]; then
            : >"$notes/stopped"
            exit 0
        elif [[ -e $notes/model-ended ]]; then
            echo "slurm_task.sh: error: the language model has ended; see slurm-*.vllm-*.log." >&2
            exit 1
        fi
        sleep 1
    done
    read -r line <"$model"
    set -- "$@" "${line%% *}" "${line#* }"
fi

status=0
"$@" || status=$?
case $status in
2) : >"$notes/refused" ;;
129 | 130 | 143)
    : >"$notes/stopped"
    status=0
    ;;
esac
exit "$status"
