"""Checkpoints without weights, for code that reads only the saved progress (`SavedProgress`)."""

from dataclasses import replace

from asyncrl.run.resume import RunState
from learner.checkpoint_folder import SavedProgress, write_progress

STATE = RunState(version=4, prompts={"position": 12}, tokens_generated=70, key="4", lineage="life 1")


def save(folder, version, state=STATE, parts=()):
    checkpoint = folder / f"v{version:08d}"
    checkpoint.mkdir(parents=True)
    run = replace(state, version=version).to_dict()
    write_progress(
        checkpoint,
        SavedProgress(
            version=version, num_updates=version, num_ranks=1, sp_size=1, dtype="float32", run=run, parts=parts
        ),
    )
    return checkpoint
