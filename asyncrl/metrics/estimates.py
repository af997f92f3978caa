"""Computes the results of an evaluation: mean@k and pass@k with 95% intervals, for all prompts and per data source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncrl.core.types import AnsweredPrompt

NORMAL_95 = 1.959963984540054
"""Quantile of the normal distribution at 0.975."""
_NUM_RESAMPLES = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over prompts, with the ends of its 95% confidence interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Estimate:
        """Return the mean of one value per prompt, with a 95% interval for the mean over the population of prompts.

        The prompts must be drawn independently. If every value is 0 or 1, the interval is Wilson's (doi
        10.1080/01621459.1927.10502953). Otherwise it is the seeded percentile bootstrap with 1,000 resamples of whole
        prompts.

        Args:
            values: [N] floats, N >= 1. Example: 95 ones and 5 zeros give 0.95, from 0.888 to 0.978.

        Raises:
            ValueError: there are no values.
        """
        if not values:
            raise ValueError("an estimate must have the value of at least one prompt, got none")
        array = np.asarray(values, dtype=np.float64)
        mean = float(array.mean())
        if np.isin(array, (0.0, 1.0)).all():
            count = len(array)
            scale = 1 + NORMAL_95**2 / count
            center = (mean + NORMAL_95**2 / (2 * count)) / scale
            half = NORMAL_95 / scale * math.sqrt(mean * (1 - mean) / count + NORMAL_95**2 / (4 * count**2))
            low, high = max(0.0, center - half), min(1.0, center + half)
        else:
            generator = np.random.default_rng(0)
            means = [generator.choice(array, len(array)).mean() for _ in range(_NUM_RESAMPLES)]
            low, high = np.quantile(means, (0.025, 0.975)).tolist()
        return cls(mean=mean, low=min(low, mean), high=max(high, mean))  # keep the mean inside despite rounding errors


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Estimate the probability that at least one of k samples of a prompt passes (arXiv 2107.03374, equation 1).

    The estimate is unbiased.

    Args:
        num_samples: Number of samples of the prompt.
        num_passed: Number of these samples that pass.
        k: At most ``num_samples``. Example: if 1 of 4 samples passes, pass@2 is 1 - C(3, 2) / C(4, 2) = 0.5.
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The evaluation of a policy version on held-out prompts.

    Attributes:
        policy_version: Version that sampled all tokens.
        sampled: Mean reward at the training temperature, equal to the estimate ``mean@k``.
        greedy: Mean reward of greedy decoding.
        num_failed: Number of prompts without a reward, because the reward or the environment failed. The means exclude
            these.
        num_missing: Number of prompts without an answer, because engines were lost. The means exclude these.
        incomplete: Why answers are missing: for each lost engine, the reason as a text.
        estimates: Results by name: ``mean@k`` with all k samples, ``pass@1``, ``pass@2``, ``pass@4``, …, ``greedy``.
        by_source: The same results for each ``data_source``, if there are several.
        response_length: Mean length of an answer, in tokens.
        truncated: Share of the answers that reached the length limit.
        took_s: Seconds from the first prompt to the last answer.
    """

    policy_version: int
    sampled: float
    greedy: float
    num_prompts: int
    num_failed: int = 0
    num_missing: int = 0
    incomplete: Mapping[str, str] = field(default_factory=dict)
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    by_source: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)
    response_length: float = 0.0
    truncated: float = 0.0
    took_s: float = 0.0

    def interval(self, kind: str) -> Estimate:
        """Return the mean reward with its 95% interval. ``kind`` is ``sampled`` or ``greedy``.

        Without an interval in `estimates`, both ends of the interval equal the mean.
        """
        mean = getattr(self, kind)
        found = [one for name, one in self.estimates.items() if name.startswith("mean@" if kind == "sampled" else kind)]
        return found[0] if found else Estimate(mean=mean, low=mean, high=mean)

    @property
    def shortfall(self) -> str:
        """Text for the end of a line: the number of prompts without a result, and why; empty if there are none."""
        parts = [f"{self.num_failed} without a reward"] if self.num_failed else []
        if self.num_missing:
            why = "; ".join(f"engine {engine}: {reason.splitlines()[0]}" for engine, reason in self.incomplete.items())
            parts.append(f"incomplete, {self.num_missing} unanswered ({why})")
        return f"; {', '.join(parts)}" if parts else ""

    def scalars(self) -> dict[str, float]:
        """Return all means and the ends of all 95% intervals, by name.

        Examples: ``pass@4``, and for the data source ``math``: ``math/pass@4``, ``math/pass@4/low``.
        """
        sources = {"": self.estimates, **{f"{source}/": estimates for source, estimates in self.by_source.items()}}
        named = {prefix + name: one for prefix, estimates in sources.items() for name, one in estimates.items()}
        ends = {f"{name}/{end}": getattr(one, end) for name, one in named.items() for end in ("low", "high")}
        means = {name: one.mean for name, one in named.items()}
        return {"sampled": self.sampled, "greedy": self.greedy, **means, **ends}


def evaluation_of(
    answers: Sequence[AnsweredPrompt],
    *,
    policy_version: int,
    num_prompts: int,
    pass_reward: float,
    incomplete: Mapping[str, str],
    took_s: float,
) -> Evaluation | None:
    """Compute means and confidence intervals from the rewards of answers; None if no prompt has a reward.

    Args:
        answers: The answered prompts.
        policy_version: Version that sampled the answers.
        num_prompts: Number of requested prompts.
        pass_reward: Smallest reward of a sample that passes, for pass@k.
        incomplete: Why answers are missing, by engine.
        took_s: Seconds from the first prompt to the last answer.
    """
    scored = [one for one in answers if not one.reward_failure]
    if not scored:
        return None
    lengths = [length for one in answers for length in one.response_lengths]
    estimates = _estimates(scored, pass_reward)
    sources = sorted({one.data_source for one in scored})
    by_source = {
        source or "none": _estimates([one for one in scored if one.data_source == source], pass_reward)
        for source in (sources if len(sources) > 1 else ())
    }
    return Evaluation(
        policy_version=policy_version,
        sampled=estimates[f"mean@{len(scored[0].sampled)}"].mean,
        greedy=estimates["greedy"].mean,
        num_prompts=num_prompts,
        num_failed=len(answers) - len(scored),
        num_missing=num_prompts - len(answers),
        incomplete=dict(incomplete),
        estimates=estimates,
        by_source=by_source,
        response_length=sum(lengths) / len(lengths) if lengths else 0.0,
        truncated=sum(one.num_truncated for one in answers) / len(lengths) if lengths else 0.0,
        took_s=took_s,
    )


def _estimates(scored: Sequence[AnsweredPrompt], pass_reward: float) -> dict[str, Estimate]:
    count = len(scored[0].sampled)
    passed = [sum(reward >= pass_reward for reward in one.sampled) for one in scored]
    found = {f"mean@{count}": Estimate.over([sum(one.sampled) / count for one in scored])}
    for k in (1 << exponent for exponent in range(count.bit_length())):
        found[f"pass@{k}"] = Estimate.over([pass_at_k(count, number, k) for number in passed])
    return found | {"greedy": Estimate.over([one.greedy for one in scored if one.greedy is not None])}
