"""``asyncrl check-gpu``: runs each component of a training on this machine, and reports failures and speeds."""
