"""``asyncrl samples RUN``, ``python -m asyncrl.samples RUN``: read the decoded samples that a run has kept.

They lie in the run's ``samples/`` as parquet files, which the rollout workers write (`rollout_fleet.sample_log`).
"""

from __future__ import annotations

import argparse
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Sample = dict[str, Any]
"""A row: kind, version, group_id, prompt, response, ground_truth, reward, rewards, num_tokens, finish_reason, …"""

_KINDS = ("train", "sampled", "greedy")
_ORDERS = {
    "newest": lambda sample: -sample["version"],
    "worst": lambda sample: sample["reward"],
    "best": lambda sample: -sample["reward"],
    "longest": lambda sample: -sample["num_tokens"],
}
_LINE_CHARACTERS = 70
_BIDI = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})
"""Classes of the characters that reorder the text around them."""


def read_samples(files: Sequence[Path]) -> list[Sample]:
    """The rows of sample files, in the files' order. Raises `ValueError` that names a file that is no whole one."""
    return [row for file in files for row in _rows_of(file)]


def _rows_of(file: Path) -> list[Sample]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(file).read(use_threads=False).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{file} must be a whole parquet file, got {' '.join(str(error).split())}; restore it from a copy, or "
            "delete it to go without"
        ) from error


class NewSamples:
    """The training samples of a run that were kept since it was asked last."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "samples"
        self._seen: set[Path] = set()

    def extremes(self, count: int) -> list[Sample]:
        """``count`` of them: half the worst, half the best, worst first."""
        files = sorted(set(self._folder.glob("train-*.parquet")) - self._seen)
        self._seen.update(files)
        samples = sorted(read_samples(files), key=_ORDERS["worst"])
        return samples if len(samples) <= count else [*samples[: count - count // 2], *samples[-(count // 2) :]][:count]


def sample_line(sample: Sample) -> str:
    """A sample in one line, its middle left out where it is long."""
    return f"{_facts(sample)}: {_shortened(sample['prompt'])!r} -> {_shortened(sample['response'])!r}"


def printable(text: str) -> str:
    r"""Text with its control characters escaped, but for line breaks and tabs: it may go to a terminal.

    A model can write sequences that move the cursor, set the clipboard or reverse the order of the text. Example: an
    escape character becomes ``\x1b``.
    """
    return "".join(
        character
        if character in "\n\t"
        or (unicodedata.category(character) not in ("Cc", "Cs") and unicodedata.bidirectional(character) not in _BIDI)
        else character.encode("unicode_escape").decode()
        for character in text
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    files = _files_of(options.run, options.kind, options.version)
    if not files:
        sys.stderr.write(
            f"error: {options.run} must be the folder of a run, or of an experiment, that kept samples; got none of "
            f"kind {options.kind or ' or '.join(_KINDS)}; see rollout_fleet.samples.every_steps\n"
        )
        return 2
    try:
        samples = read_samples(files)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    samples = [sample for sample in samples if options.contains in sample["prompt"] + sample["response"]]
    samples.sort(key=_ORDERS[options.order])
    text = printable("\n".join(map(_page, samples[: options.num or None])))
    if sys.stdout.isatty():
        import pydoc

        pydoc.pager(text)
    else:
        sys.stdout.write(text + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asyncrl samples", description="Read the decoded samples of a run.")
    parser.add_argument("run", type=Path, help="folder of a run, or of an experiment, whose newest run is taken")
    parser.add_argument("--kind", choices=_KINDS, help="of training, or of evaluations: sampled or greedy; default all")
    parser.add_argument("--version", type=int, help="those kept at this policy version")
    parser.add_argument("--order", choices=_ORDERS, default="newest", help="which come first (default newest)")
    parser.add_argument("--contains", default="", metavar="TEXT", help="those with this text in prompt or response")
    parser.add_argument("-n", "--num", type=int, default=0, help="how many (default all)")
    return parser


def _files_of(run: Path, kind: str | None, version: int | None) -> list[Path]:
    pattern = f"samples/{kind or '*'}-v{'*' if version is None else f'{version:08d}'}-*.parquet"
    newest = sorted((folder for folder in run.glob("*/") if any(folder.glob(pattern))), reverse=True)
    return sorted(run.glob(pattern)) or [file for folder in newest[:1] for file in sorted(folder.glob(pattern))]


def _page(sample: Sample) -> str:
    rewards = "" if sample["rewards"] == "{}" else f"\nrewards      {sample['rewards']}"
    return (
        f"── {_facts(sample)} ──{rewards}\nprompt       {sample['prompt']}\nresponse     {sample['response']}\n"
        f"ground truth {sample['ground_truth']}\n"
    )


def _facts(sample: Sample) -> str:
    oldest, newest = sample["oldest_version"], sample["newest_version"]
    versions = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
    return (
        f"{sample['kind']} sample of group {sample['group_id']}, {versions}, reward {sample['reward']:.3f}, "
        f"{sample['num_tokens']} tokens, {sample['finish_reason']}"
    )


def _shortened(text: str) -> str:
    half = _LINE_CHARACTERS // 2
    return text if len(text) <= _LINE_CHARACTERS else f"{text[:half]} … {text[-half:]}"


if __name__ == "__main__":
    sys.exit(main())
