"""``asyncrl sft``: supervised fine-tuning with the same trainer, packing and optimizer as in RL.

For N ranks, run ``torchrun --nproc-per-node N -m asyncrl sft ...``. Each sequence is divided among ``learner.sp_size``
ranks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Sequence

import torch.distributed as dist

from asyncrl.checks import check_model
from asyncrl.cli.compose import compose_run, describe, option_lines
from asyncrl.cli.preflight import check_folder
from asyncrl.cli.quickstart import with_quickstart_assets
from asyncrl.core.errors import with_exit_status
from asyncrl.sft import fine_tuning
from asyncrl.sft.warm_start import LINE_PREFIX, policy_path


@with_exit_status
def main(overrides: Sequence[str] | None = None) -> int:
    """Run ``asyncrl sft`` and return the exit status."""
    overrides = sys.argv[1:] if overrides is None else overrides
    if {"-h", "--help"} & set(overrides):
        config = compose_run([])
        usage = [
            "usage: asyncrl sft [experiment=NAME|FILE.yaml] [OPTION=VALUE ...]",
            "",
            "Fine-tunes model.path on demonstrations and writes the policy to sft.output_path.",
            "",
            "options of fine-tuning, with their values:",
        ]
        options = option_lines(config, [name for name in describe(config) if name.startswith("sft.")])
        sys.stdout.write("\n".join([*usage, *options, "", "asyncrl train --help-all explains the other options.", ""]))
        return 0
    logging.basicConfig(level=logging.INFO, format=f"{LINE_PREFIX}%(message)s", stream=sys.stdout)
    logging.getLogger().setLevel(logging.WARNING)
    fine_tuning.logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    try:
        config = compose_run(overrides)
        check_folder("output_dir", config.output_dir)
        check_folder("sft.output_path", config.sft.output_path)
        config = with_quickstart_assets(config)
        check_model(config)
        try:
            asyncio.run(fine_tuning.fine_tune(config))
        except OSError as error:
            if error.filename is not None:
                raise
            raise ValueError(
                f"a file in {policy_path(config).parent} or in the temporary folder {tempfile.gettempdir()} cannot be "
                f"written: {error.strerror or error}; free space on its disk, or choose a folder on another disk with "
                "output_dir=DIR"
            ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0
