"""``asyncrl check-gpu``: tries each component of a training run on this machine, and reports failures and speeds."""
