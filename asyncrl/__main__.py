"""``python -m asyncrl COMMAND``: the same as ``asyncrl COMMAND``."""

import sys

from asyncrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
