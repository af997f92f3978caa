"""The command ``asyncrl samples RUN``, which shows prompts and responses of a run as text.

The rollout workers write these samples to parquet files in the run's folder ``samples/`` (`rollout_fleet.sample_log`).
"""

from __future__ import annotations

import argparse
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.core.errors import with_exit_status

Sample = dict[str, Any]
"""A row of a parquet file by column: kind, version, group_id, prompt, response, ground_truth, reward, num_tokens, …"""

_KINDS = ("train", "sampled", "greedy")
_ORDERS = {
    "newest": lambda sample: -sample["version"],
    "worst": lambda sample: sample["reward"],
    "best": lambda sample: -sample["reward"],
    "longest": lambda sample: -sample["num_tokens"],
}
_LINE_CHARACTERS = 70
_BIDI = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})
"""Unicode's bidirectional classes of control characters that change the order of the text around them."""


def read_samples(files: Sequence[Path]) -> list[Sample]:
    """Read parquet files of a run's ``samples/``. Return one dict per sample, in the order of the files.

    Raises `ValueError` if a file is missing or damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for file in files:
        try:
            rows += pq.ParquetFile(file).read(use_threads=False).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"{file} must be a whole parquet file, got {' '.join(str(error).split())}; restore the file from a "
                "copy, or delete it"
            ) from error
    return rows


class NewSamples:
    """Reads the training samples that a run has written since the previous call."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "samples"
        self._seen: set[Path] = set()

    def extremes(self, count: int) -> list[Sample]:
        """Return up to ``count`` of the samples since the previous call, sorted by increasing reward.

        If there are more samples, one half of the result has the lowest rewards, the other half the highest rewards.
        """
        files = sorted(set(self._folder.glob("train-*.parquet")) - self._seen)
        self._seen.update(files)
        samples = sorted(read_samples(files), key=_ORDERS["worst"])
        return samples if len(samples) <= count else [*samples[: count - count // 2], *samples[-(count // 2) :]][:count]


def sample_line(sample: Sample) -> str:
    """Return a line of text with a sample's version, reward, prompt and response. Long texts are cut in the middle."""
    prompt, response = (shortened(sample[name], _LINE_CHARACTERS) for name in ("prompt", "response"))
    return f"{_facts(sample)}: {prompt!r} -> {response!r}"


def shortened(text: str, num_characters: int) -> str:
    """Return the text. If it has more than ``num_characters`` characters, replace its middle by ``…``."""
    half = num_characters // 2
    return text if len(text) <= num_characters else f"{text[:half]} … {text[-half:]}"


def printable(text: str) -> str:
    r"""Return a text that is safe to print on a terminal: control characters are escaped, except line breaks and tabs.

    Otherwise, a model's text could move the terminal's cursor, set the clipboard or reverse text. Example: an escape
    character becomes ``\x1b``.
    """
    return "".join(
        character
        if character in "\n\t"
        or (unicodedata.category(character) not in ("Cc", "Cs") and unicodedata.bidirectional(character) not in _BIDI)
        else character.encode("unicode_escape").decode()
        for character in text
    )


@with_exit_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``asyncrl samples`` and return its exit status. ``arguments`` defaults to ``sys.argv[1:]``."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.num < 0:
        parser.error(f"-n must be >= 0, got {options.num}; 0 shows all samples")
    version = "*" if options.version is None else f"{options.version:08d}"
    pattern = f"samples/{options.kind or '*'}-v{version}-*.parquet"
    newest = sorted((folder for folder in options.run.glob("*/") if any(folder.glob(pattern))), reverse=True)
    if not options.run.is_dir():
        raise ValueError(f"{options.run} must be the folder of a run or an experiment, got a path that does not exist")
    files = sorted(options.run.glob(pattern)) or [file for run in newest[:1] for file in sorted(run.glob(pattern))]
    if not files:
        raise ValueError(
            f"{options.run} must be the folder of a run or an experiment with samples, got no samples of kind "
            f"{options.kind or ' or '.join(_KINDS)}; set rollout_fleet.samples.every_steps"
        )
    samples = [sample for sample in read_samples(files) if options.contains in sample["prompt"] + sample["response"]]
    samples.sort(key=_ORDERS[options.order])
    text = printable("\n".join(map(_page, samples[: options.num or None])))
    if sys.stdout.isatty():
        import pydoc

        pydoc.pager(text)
    else:
        sys.stdout.write(text + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asyncrl samples", description="Show the decoded samples of a run.")
    parser.add_argument("run", type=Path, help="folder of a run, or of an experiment (its newest run)")
    parser.add_argument("--kind", choices=_KINDS, help="train: training; sampled, greedy: evaluations (default all)")
    parser.add_argument("--version", type=int, help="policy version of the samples")
    parser.add_argument("--order", choices=_ORDERS, default="newest", help="order (default newest)")
    parser.add_argument("--contains", default="", metavar="TEXT", help="text in prompt or response")
    parser.add_argument("-n", "--num", type=int, default=0, help="maximum number (default all)")
    return parser


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


if __name__ == "__main__":
    sys.exit(main())
