"""``python -m asyncrl.sft``: the same as ``asyncrl sft``."""

import sys

from asyncrl.cli import main

if __name__ == "__main__":
    sys.exit(main(["sft", *sys.argv[1:]]))
