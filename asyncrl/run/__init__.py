"""The controller process of a run. It starts, drives and stops the other processes. It handles no tokens or weights."""

import os
import secrets

# Disable Ray's signal handler, which would replace the run's SIGTERM handler and might abort the process.
# Ray reads the environment variable when it is imported, and a run imports Ray after this package.
os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")


def protect_own_cluster() -> None:
    """Protect each Ray cluster that this process starts: the cluster accepts only clients with a new random token.

    Call this before Ray is imported. Otherwise Ray uses the token in ``~/.ray``, which other users may be able to read.
    """
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
