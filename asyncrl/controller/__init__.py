"""The controller: what a run starts, drives and stops. It sees metadata only."""

import os

# Ray's C++ signal handler would take SIGTERM from the run: it dumps its stack, and may abort the process. Ray reads
# this when it is imported, and a run imports it only after this package.
os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
