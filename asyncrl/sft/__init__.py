"""Supervised fine-tuning with the trainer, packing and optimizer of RL. An RL run can begin with fine-tuning."""
