"""Supervised fine-tuning with the same trainer, packing and optimizer as in RL. An RL run can begin with it."""
