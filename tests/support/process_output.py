"""A process whose output is read line by line while it runs."""

import queue
import subprocess
import threading
import time


class ProcessOutput:
    """Reads what a process writes on a thread of its own, so that the process is never held up.

    Attributes:
        process: Started with a pipe for its output, as text.
        lines: What was taken from it so far, by `wait_for_line` and `finish`.
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
        """Everything taken so far."""
        return "\n".join(self.lines)

    def wait_for_line(self, words: str, timeout_s: float) -> str:
        """Wait until a line holds ``words``."""
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

    def _check_end(self) -> None:
        """Called where it has ended too early, to skip the test where that must be."""

    def finish(self, timeout_s: float) -> int:
        """Wait for the end; returns the exit status."""
        self.process.wait(timeout_s)
        while (line := self._fresh.get(timeout=max(10, timeout_s))) is not None:
            self.lines.append(line)
        return self.process.returncode
