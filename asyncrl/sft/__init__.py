"""Supervised fine-tuning with the learner's own trainer, packing and optimizer; also the warm start of a run."""
