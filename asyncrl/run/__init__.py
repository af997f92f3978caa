"""The controller: starts, drives and stops the parts of a run. It handles metadata only."""

import os
import secrets

# Ray's C++ signal handler would replace the run's SIGTERM handler: it dumps the stack and may abort the process. Ray
# reads this variable at its import, and a run imports Ray after this package.
os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")


def protect_own_cluster() -> None:
    """Make the Ray clusters of this process require a new random token.

    Call this before Ray is imported. Otherwise Ray takes the token in ``~/.ray``: Ray needs write access there, and
    other users may be able to read it.
    """
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
