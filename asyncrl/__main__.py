"""Runs ``python -m asyncrl COMMAND``, which does the same as the program ``asyncrl COMMAND``."""

from asyncrl.cli import command_line

if __name__ == "__main__":
    command_line()
