"""``python -m asyncrl COMMAND``: the same as ``asyncrl COMMAND``."""

from asyncrl.cli import command_line

if __name__ == "__main__":
    command_line()
