"""``asyncrl check-gpu``: tries each function of a training run on this machine, and reports failures and speeds."""
