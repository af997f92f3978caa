"""``python -m asyncrl.plan``: the same as ``asyncrl plan``."""

import sys

from asyncrl.cli import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
