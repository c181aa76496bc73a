"""Trains a multi-step retriever: qrag train --config=configs/hotpotqa.py

Give the same command again to resume a run that was interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from qrag_jax.errors import FeedbackLost, InputError
from qrag_jax.runtime import checkpoints, commandline, hosts, run, step_log, whole_files
from qrag_jax.runtime.commandline import end_process
from qrag_jax.systems import run_flags, training

CONFIG = run_flags.define_experiment()
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; default runs/CONFIG-NAME.")
HOSTS = flags.DEFINE_string("hosts", "", hosts.HELP)
DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print what would run, with its memory, and end.")
FOR = flags.DEFINE_string(
    "for", "", "With --dry_run: compile for devices that are not here, such as h100x8."
)


def main() -> int:
    config = run_flags.given_experiment(CONFIG)
    for word in run_flags.unread_words(sys.argv[1:], config):
        run.log(f"not read: {word}")
    if FOR.value and not DRY_RUN.value:
        raise InputError("--for compiles for devices that are not here; add --dry_run.")
    if DRY_RUN.value:
        if HOSTS.value:
            raise InputError("--hosts trains on several hosts; leave it out with --dry_run.")
        return training.dry_run(config, FOR.value)
    # `runs/NAME` or `runs/NAME-VARIANT` of `--config=…/NAME.py:VARIANT`
    path, _, name = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
    usual = Path("runs") / "-".join(filter(None, [Path(path).stem, name]))
    workdir = Path(WORKDIR.value) if WORKDIR.value else usual
    try:
        return training.train(config, workdir, HOSTS.value)
    except checkpoints.SaveError as error:
        end_process(f"error: {error}", 1)  # threads of a failed save never end
    except step_log.NotFinite as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except FeedbackLost as error:
        run.log(f"error: {str(error).rstrip('.')}. Give the same command to go on.")
        return 1
    except InputError:
        raise
    except Exception as error:  # libraries report a full disk by many exception classes
        if not whole_files.disk_is_full(error):
            raise
        end_process(
            f"error: {workdir} cannot be written ({whole_files.reason(error)}); free space there "
            "and give the same command to go on from the last checkpoint.",
            1,
        )


if __name__ == "__main__":
    commandline.run(main, more_help=run_flags.fields_help)
