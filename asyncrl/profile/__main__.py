"""``python -m asyncrl.profile RUN``."""

from __future__ import annotations

import sys

from asyncrl.profile.command import main

if __name__ == "__main__":
    sys.exit(main())
