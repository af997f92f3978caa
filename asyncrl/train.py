"""``python -m asyncrl.train``: the same as ``asyncrl train``."""

import sys

from asyncrl.cli.train_command import main

if __name__ == "__main__":
    sys.exit(main())
