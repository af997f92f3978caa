"""Supervised fine-tuning with the learner's trainer, packing and optimizer. A run can begin with it as a warm start."""
