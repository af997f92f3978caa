"""The audit of a run. It compares the receipts (records about trained tokens) that the run's processes wrote.

A life is one ``asyncrl train`` process of the run, from start to end. The audit covers all lives.

For every trained token the audit needs these receipts (`asyncrl.core.receipts.Act`):

- ``published``: the learner published the weights, with a digest;
- ``loaded``: an engine loaded weights with the same digest, and verified them;
- ``sampled``: this engine sampled the token with these weights;
- ``planned``: the controller put the token's group into the batch of a learner step;
- ``trained``: a learner rank trained on the token in this step;
- ``committed``: the controller recorded that this step has finished.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from asyncrl.core.receipts import DIGEST_BITS, FOLDER, Act
from asyncrl.metrics import lives_until, read_json, read_life, read_options
from asyncrl.run.run_lives import Life, life_of

Line = Mapping[str, Any]

_REPORT = "please report this with the run's folder"
_LOST = "if the disk was full, logs/rollout-*.log of this or an earlier life says that a receipt is not written"
ENGINE_RECEIPT = "an engine's receipt"


@dataclass(frozen=True, kw_only=True)
class BadReceipt:
    """A receipt that is missing, or that contradicts another receipt."""

    life: Path
    what: str
    expected: Any
    found: Any
    step: int | None = None
    group: int | None = None
    remedy: str = _REPORT

    def __str__(self) -> str:
        at = "".join(f", {name} {n}" for name, n in (("step", self.step), ("group", self.group)) if n is not None)
        return (
            f"run {self.life.parent.name}, life {self.life.name}{at}: {self.what} must be {self.expected}, got "
            f"{self.found}; {self.remedy}"
        )


class LifeReceipts:
    """The receipts of one life: one process of ``asyncrl train``.

    Attributes:
        folder: The folder of the life.
        began_at: The policy version of the checkpoint that the life continued; 0 for a new run.
        published: Digests of the published weights, by version. After a restart of the learner, a version may have
            several digests.
        loaded: Digests of the weights that an engine verified, by (engine, version).
        sampled: The engines' receipts for sampled tokens, by group id.
        trained: The learner ranks' receipts, by step and data-parallel rank. If ranks repeated a step, these are the
            newest receipts of the step.
        committed: The ``planned`` receipts of the finished steps, by step. A step is finished if this step or a later
            step has a ``committed`` receipt, or if the next life continues from a later checkpoint.
    """

    def __init__(self, folder: Path, began_at: int = 0) -> None:
        self.folder = folder
        self.began_at = began_at
        self.published: dict[int, set[str]] = defaultdict(set)
        self.loaded: dict[tuple[str, int], set[str]] = defaultdict(set)
        self.sampled: dict[int, list[Line]] = defaultdict(list)
        self.trained: dict[int, dict[int, Line]] = defaultdict(dict)
        self.committed: dict[int, Line] = {}
        self._planned: dict[int, Line] = {}
        for line in _lines(sorted((folder / FOLDER).glob("*.jsonl"))):
            self._take(line)

    def _take(self, line: Line) -> None:
        match line["act"]:
            case Act.published:
                self.published[line["version"]].add(line["digest"])
            case Act.loaded:
                self.loaded[line["engine"], line["version"]].add(line["digest"])
            case Act.sampled:
                self.sampled[line["group"]].append(line)
            case Act.trained:
                self.trained[line["step"]][line["rank"]] = line
            case Act.planned:  # forget the older plans of this step and of later steps
                self._planned = {step: own for step, own in self._planned.items() if step < line["step"]}
                self._planned[line["step"]] = line
            case Act.committed:
                step = line["step"]
                self.committed = {made: own for made, own in self.committed.items() if made < step}
                self.commit_before(step)
                self.committed[step] = self._planned.pop(step, {"groups": []})

    def commit_before(self, step: int) -> None:
        """Treat the planned steps before ``step`` as committed, even if they have no ``committed`` receipts."""
        for made in [made for made in self._planned if made < step]:
            self.committed[made] = self._planned.pop(made)

    @cached_property
    def max_lag(self) -> int:
        """Value of the option ``buffer.max_lag`` in this life (one ``asyncrl train`` process)."""
        return self._buffer_options["max_lag"]

    @cached_property
    def max_uses(self) -> int:
        """Value of the option ``buffer.max_uses`` in this life; 1 if the configuration lacks the option."""
        return self._buffer_options.get("max_uses", 1)

    @cached_property
    def _buffer_options(self) -> Line:
        return read_options(self.folder, "buffer.max_lag")["buffer"]

    def groups_trained(self, step: int) -> dict[int, dict[str, Any]]:
        """Return data of the groups that the ranks trained on in a step, as a dict by group id.

        Each value is a dict. Its keys are ``attempt`` (number of the attempt that generated the group), ``digest``,
        ``in_loss`` (number of tokens in the loss) and ``versions`` (number of tokens per policy version).
        """
        found: dict[int, dict[str, Any]] = {}
        for line in self.trained.get(step, {}).values():
            for own in line["groups"]:
                known = found.setdefault(own["group"], {**own, "digest": 0, "in_loss": 0, "versions": Counter()})
                known["digest"] = (known["digest"] + own["digest"]) % (1 << DIGEST_BITS)
                known["in_loss"] += own["in_loss"]
                known["versions"] += _counts(own["versions"])
        return found


@dataclass(kw_only=True)
class Audit:
    """The result of an audit: the bad receipts, what was checked, and what could not be checked."""

    bad: list[BadReceipt] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def audited_lives(run_dir: Path) -> list[Life]:
    """Return the life (one ``asyncrl train`` process) in ``run_dir``, and the earlier lives of its run, oldest first.

    Raises `ValueError` if ``run_dir`` is not the folder of a life, or if an earlier life has no ``life.json``.
    """
    found = lives_until(run_dir)
    if not found:
        raise ValueError(f"{run_dir} must be the folder of a run, with life.json; `asyncrl runs` lists the folders")
    folder, first = found[0]
    if first.resumed:
        raise ValueError(
            f"{folder} continues {first.resumed}, so {first.before} must have a life.json, got none; restore the file"
        )
    return [life_of(folder, record) for folder, record in found]


def lives_beside(lives: Sequence[Life]) -> list[Life]:
    """Return the lost lives, oldest first. A life is one ``asyncrl train`` process. ``lives`` are the audited lives.

    A lost life continued from a checkpoint of an audited life or of another lost life, but is not audited itself. The
    steps of a lost life are not part of the audited run. But its engines may have sampled groups that stayed in the
    buffer's files on disk, and a later audited life may have trained on these groups. So the audit needs the receipts
    that the engines of the lost life wrote.

    The search covers the folders next to those of ``lives``. A life reads the buffer's files when it begins. So a lost
    life that began after the newest of ``lives`` is left out.
    """
    folders = {life.folder for life in lives}
    others = {path.parent.resolve() for folder in folders for path in folder.parent.glob("*/life.json")} - folders
    found = [life_of(path, record) for path in others if (record := read_life(path)) is not None]
    lost: list[Life] = []
    for life in sorted(found, key=lambda life: life.record.began_s):
        if Path(life.record.before) in folders and life.record.began_s < lives[-1].record.began_s:
            folders.add(life.folder)
            lost.append(life)
    return lost


def audit(lives: Sequence[Life]) -> Audit:
    """Compare the receipts (records about trained tokens) that the processes ``lives`` of a run wrote.

    Raises `ValueError` if a life has no receipts.
    """
    beside = lives_beside(lives)
    by_time = sorted([*lives, *beside], key=lambda life: life.record.began_s)
    every = {life.folder: LifeReceipts(life.folder, life.record.first_step) for life in by_time}
    own = [every[life.folder] for life in lives]
    for one in own:
        if not (one.folder / FOLDER).is_dir():
            raise ValueError(
                f"{one.folder / FOLDER} must contain the receipts of an asyncrl train process, got no such folder; "
                "the process finished no step, or it ran with an earlier version of asyncrl"
            )
    for one, after in pairwise(own):
        one.commit_before(after.began_at)
    kept: dict[int, LifeReceipts] = {}
    for one in own:
        kept = {step: life for step, life in kept.items() if step < one.began_at}
        kept |= dict.fromkeys(one.committed, one)
    result = Audit()
    result.bad += _steps_faults(own, kept)
    lags: Counter[int] = Counter()
    for step, life in sorted(kept.items()):
        trained = life.groups_trained(step)
        result.bad += [*_step_faults(life, step, trained), *_lag_faults(life, step, trained)]
        lags += Counter(step - min(group["versions"]) for group in trained.values() if group["versions"])
        for group in trained.values():
            result.bad += _engine_faults([*every.values()], life, step, group)
    _check_loss(result, own[-1], kept)
    _check_account(result, own[-1], kept, lags)
    num_tokens = sum(_num_tokens(life, step, is_reuse=use) for step, life in kept.items() for use in (False, True))
    lost = f" (and engines of {len(beside)} more lives, whose steps were lost)" * bool(beside)
    result.checked.insert(
        0,
        f"{len(own)} {'life' if len(own) == 1 else 'lives'}{lost}, {len(kept)} steps and {num_tokens} tokens, each "
        "token from its engine to its learner step",
    )
    return result


def _steps_faults(lives: Sequence[LifeReceipts], kept: Mapping[int, LifeReceipts]) -> Iterator[BadReceipt]:
    """Find missing steps, and groups whose uses are wrong. A use is a step that trained on the group.

    The uses of a group are wrong in each of these cases:

    - The group has more than ``max_uses`` uses.
    - The field ``use`` of the group in a ``planned`` receipt is not the number of the group's earlier uses.
    - Two uses of the group have different attempts or digests.
    """
    for step in sorted({*range(max(kept, default=-1) + 1)} - kept.keys()):
        before = [life for life in lives if life.began_at <= step]
        yield BadReceipt(life=before[-1].folder, step=step, what="the step", expected="on record", found="no receipt")
    seen: dict[int, dict[int, Line]] = defaultdict(dict)
    for step, life in sorted(kept.items()):
        for planned in life.committed[step]["groups"]:
            uses = seen[planned["group"]]
            is_next = planned.get("use", 0) == len(uses) < life.max_uses
            is_same = all(use[name] == planned[name] for use in uses.values() for name in ("attempt", "digest"))
            if not (is_next and is_same):
                yield BadReceipt(
                    life=life.folder,
                    step=step,
                    group=planned["group"],
                    what="the steps that consumed the prompt",
                    expected=[*uses],
                    found=[*uses, step],
                )
            uses[step] = planned


def _step_faults(life: LifeReceipts, step: int, trained: Mapping[int, Line]) -> Iterator[BadReceipt]:
    planned = {group["group"]: group for group in life.committed[step]["groups"] if group["is_scored"]}
    for group_id in sorted(planned.keys() | trained.keys()):
        plan, own = planned.get(group_id), trained.get(group_id)
        expected = plan and {name: plan[name] for name in ("attempt", "tokens", "digest")}
        found = own and {"attempt": own["attempt"], "tokens": own["versions"].total(), "digest": own["digest"]}
        if expected != found:
            what = "what the ranks trained on"
            yield BadReceipt(
                life=life.folder, step=step, group=group_id, what=what, expected=expected, found=found or "no receipt"
            )


def _lag_faults(life: LifeReceipts, step: int, trained: Mapping[int, Line]) -> Iterator[BadReceipt]:
    for group_id, own in trained.items():
        if strange := [version for version in own["versions"] if not 0 <= step - version <= life.max_lag]:
            yield BadReceipt(
                life=life.folder,
                step=step,
                group=group_id,
                what="the versions of the tokens",
                expected=f"{max(0, step - life.max_lag)} to {step}",
                found=sorted(strange),
            )


def _engine_faults(lives: Sequence[LifeReceipts], life: LifeReceipts, step: int, own: Line) -> Iterator[BadReceipt]:
    wanted, attempt = own["versions"], own["attempt"]
    at: dict[str, Any] = {"life": life.folder, "step": step, "group": own["group"]}
    known = [(one, line) for one in lives for line in one.sampled.get(own["group"], ())]
    while wanted:
        found = [
            (one, line) for one, line in known if line["attempt"] <= attempt and _counts(line["versions"]) == wanted
        ]
        if not found:
            expected = f"tokens by version {dict(wanted)}"
            yield BadReceipt(**at, what=ENGINE_RECEIPT, expected=expected, found="none", remedy=_LOST)
            return
        sampler, line = found[-1]
        inherited = _counts(line["inherited"])
        engine, named = line["engine"], sampler.folder.name
        for version in wanted - inherited:
            verified = sampler.loaded.get((engine, version), set())
            if not verified or not verified <= sampler.published.get(version, set()):
                yield BadReceipt(
                    **at,
                    what=f"the digest of version {version} that {engine} of life {named} verified",
                    expected=sorted(sampler.published.get(version, ())) or "a published digest",
                    found=sorted(verified) or "none",
                )
        wanted, attempt = inherited, line["attempt"] - 1


def _check_loss(result: Audit, newest: LifeReceipts, kept: Mapping[int, LifeReceipts]) -> None:
    path = newest.folder / "metrics.jsonl"
    lines = _lines([path] if path.is_file() else [])
    counted = {line["step"]: line["learner.num_tokens"] for line in lines if "learner.num_tokens" in line}
    for step, life in sorted(kept.items()):
        in_loss = sum(group["in_loss"] for group in life.groups_trained(step).values())
        if step not in counted:
            result.unchecked.append(
                f"the tokens in the loss of step {step}: {path} has no learner.num_tokens of this step"
            )
        elif counted[step] != in_loss:
            what = "the tokens in the learner's micro-batches (learner.num_tokens)"
            result.bad.append(
                BadReceipt(life=life.folder, step=step, what=what, expected=in_loss, found=int(counted[step]))
            )


def _check_account(
    result: Audit, newest: LifeReceipts, kept: Mapping[int, LifeReceipts], lags: Mapping[int, int]
) -> None:
    path = newest.folder / "summary.json"
    summary = read_json(path, "tokens", "max_lag")
    if summary is None:
        result.unchecked.append(
            f"the account: {path} does not exist, because the life still runs, failed or was killed"
        )
        return
    tokens = summary["tokens"]
    at: dict[str, Any] = {"life": newest.folder}
    uses = ("trained", "dropped", "buffered", "in_flight")
    closed = sum(tokens[use] for use in uses)
    if tokens["generated"] != closed:
        what = f"the generated tokens, {' + '.join(uses)}"
        result.bad.append(BadReceipt(**at, what=what, expected=closed, found=tokens["generated"]))
    trained = sum(_num_tokens(life, step, is_reuse=False) for step, life in kept.items())
    reused = sum(_num_tokens(life, step, is_reuse=True) for step, life in kept.items())
    for use, expected in (("trained", trained), ("reused", reused)):
        if tokens.get(use, 0) != expected:
            what = f"the {use} tokens of the account"
            result.bad.append(BadReceipt(**at, what=what, expected=expected, found=tokens.get(use, 0)))
    histogram = {int(lag): count for lag, count in summary["max_lag"]["histogram"].items()}
    if all(group["is_scored"] for step, life in kept.items() for group in life.committed[step]["groups"]):
        if histogram != dict(lags):
            what = "the lags of the account"
            result.bad.append(BadReceipt(**at, what=what, expected=dict(sorted(lags.items())), found=histogram))
    else:
        result.unchecked.append("the lags of the account: ranks leave out groups without finite rewards")
    result.checked.append(
        f"the account of all lives: {tokens['generated']} tokens generated, {trained} trained, {reused} reused"
    )


def _num_tokens(life: LifeReceipts, step: int, *, is_reuse: bool) -> int:
    return sum(group["tokens"] for group in life.committed[step]["groups"] if (group.get("use", 0) > 0) == is_reuse)


def _counts(versions: Mapping[str, int]) -> Counter[int]:
    return Counter({int(version): count for version, count in versions.items()})


def _lines(paths: Iterable[Path]) -> Iterator[Line]:
    """Parse the lines of JSON Lines files. Skip an incomplete last line."""
    for path in paths:
        whole, _, _ = path.read_text().rpartition("\n")
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} of {path} must be JSON, got {line!r:.80}; restore the file") from error
