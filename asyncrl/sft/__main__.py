"""``python -m asyncrl.sft``, also under ``torchrun``: the same as ``asyncrl sft``."""

import sys

from asyncrl.cli.sft import main

if __name__ == "__main__":
    sys.exit(main())
