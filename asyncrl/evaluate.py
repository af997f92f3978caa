"""``python -m asyncrl.evaluate``: the same as ``asyncrl evaluate``."""

import sys

from asyncrl.cli import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
