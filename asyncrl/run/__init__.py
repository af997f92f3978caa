"""The controller: what a run starts, drives and stops. It sees metadata only."""

import os
import secrets

# Ray's C++ signal handler would take SIGTERM from the run: it dumps its stack, and may abort the process. Ray reads
# this when it is imported, and a run imports it only after this package.
os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")


def protect_own_cluster() -> None:
    """Have Ray clusters that this process starts ask for a new random token; call it before Ray is imported.

    Ray would otherwise take the token in ``~/.ray``, which it must be able to write and others may be able to read.
    """
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
