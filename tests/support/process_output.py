"""Reads the output of a running process line by line."""

import queue
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress


class ProcessOutput:
    """Reads the output of a process in a thread, so that the process never waits for a reader.

    Attributes:
        process: The process. Its output must be a pipe in text mode.
        lines: Lines that `wait_for_line` and `finish` have read so far.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._fresh: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._fresh.put(line.rstrip())
        self._fresh.put(None)

    @property
    def output(self) -> str:
        """All lines that were read so far, as one text."""
        return "\n".join(self.lines)

    def read_lines(self) -> list[str]:
        """Return the lines that were written and not read yet. Does not wait for further lines."""
        fresh: list[str] = []
        with suppress(queue.Empty):
            while (line := self._fresh.get_nowait()) is not None:
                fresh.append(line)
            self._fresh.put(None)  # put the end mark (None) back, because `finish` waits for it
        self.lines += fresh
        return fresh

    def wait_for_line(self, words: str, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._fresh.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line with {words!r} within {timeout_s} s:\n{self.output}") from None
            if line is None:
                self.process.wait(10)
                self._check_end()
                raise AssertionError(f"the run ended before a line with {words!r}:\n{self.output}")
            self.lines.append(line)
            if words in line:
                return line

    def wait_until(self, is_true: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait until ``is_true()`` returns true. ``what`` describes the expected event in error messages."""
        deadline = time.monotonic() + timeout_s
        while not is_true():
            if self.process.poll() is not None:
                self.finish(5.0)
                raise AssertionError(f"the run ended before {what}:\n{self.output}")
            assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"
            time.sleep(0.05)

    num_steps: int
    """Number of finished learner steps, without steps that a return to a checkpoint removed."""

    def wait_for_step(self, number: int, timeout_s: float = 240.0) -> None:
        self.wait_until(lambda: self.num_steps >= number, f"step {number}", timeout_s)

    def goes_on(self, what: str, *, before: int | None = None, timeout_s: float = 240.0) -> None:
        """Wait until ``before`` + 2 steps are finished. Print ``what`` and the duration.

        One further step is not enough, because this step was possibly almost finished at the time of the call.
        """
        before, began_s = self.num_steps if before is None else before, time.monotonic()
        self.wait_for_step(before + 2, timeout_s)
        print(f"{what} at step {before}: two steps in {time.monotonic() - began_s:.1f} s")  # noqa: T201

    def _check_end(self) -> None:
        """Do nothing. `wait_for_line` calls this if the process ends before the line. A subclass can skip the test."""

    def finish(self, timeout_s: float) -> int:
        """Wait for the end of the process. Returns the exit status."""
        self.process.wait(timeout_s)
        while (line := self._fresh.get(timeout=max(10, timeout_s))) is not None:
            self.lines.append(line)
        return self.process.returncode
