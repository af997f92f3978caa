"""``python -m asyncrl.train``: the same as ``asyncrl train``."""

import sys

from asyncrl.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
