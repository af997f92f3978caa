"""``asyncrl check-gpu``: tries each part of a training run on this machine, and reports failures and speeds."""
