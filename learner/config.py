"""Options of the learner group and of the algorithm. Only this module defines their defaults."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, ClassVar

from asyncrl.core.errors import check_bounds

RENDEZVOUS_FILE = "ASYNCRL_RENDEZVOUS_FILE"
"""Environment variable with the path of a file through which the ranks of a single host find each other."""


class Device(StrEnum):
    """The kind of device for the learner's computation. ``auto`` selects CUDA if torch finds a GPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    """Dtype of parameters. ``auto`` is bfloat16 on CUDA and float32 on the CPU."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class AttentionKernel(StrEnum):
    """The implementation of attention; `LearnerConfig` describes ``auto``."""

    auto = "auto"
    flash_attn_4 = "flash_attn_4"
    flash_attn_3 = "flash_attn_3"
    flash_attn = "flash_attn"
    torch_varlen = "torch_varlen"
    sdpa = "sdpa"


class GradientSync(StrEnum):
    """Selects when the ranks sum gradients: once per optimizer update, or after each micro-batch."""

    auto = "auto"
    update = "update"
    micro_batch = "micro_batch"


SELECTIVE = "selective"
"""Value of ``learner.activation_checkpointing`` that recomputes layers in the backward pass, except their attention."""

WHOLE_GRADIENTS_SHARE = 0.15
"""With ``gradient_sync=auto``, unsharded gradients may take at most this share of a GPU's memory. On 80 GB, this allows
3 billion trained parameters."""


def sums_each_micro_batch(sync: GradientSync, num_trained: int, card_bytes: int) -> bool:
    """Return whether the ranks sum gradients after each micro-batch.

    Args:
        sync: ``learner.gradient_sync``.
        num_trained: Number of trained parameters of the whole model.
        card_bytes: Memory of a rank's GPU; 0 on the CPU, where ``auto`` means ``update``.
    """
    if sync is GradientSync.auto:
        return card_bytes > 0 and 4 * num_trained > WHOLE_GRADIENTS_SHARE * card_bytes
    return sync is GradientSync.micro_batch


class Resharding(StrEnum):
    """Selects when FSDP frees gathered parameters: after each layer, or after each optimizer update."""

    layer = "layer"
    update = "update"


class Schedule(StrEnum):
    """Selects how the learning rate changes after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Aggregation(StrEnum):
    """Selects how the losses of tokens are combined into the loss of the batch."""

    token_mean = "token_mean"
    sequence_mean = "sequence_mean"
    sequence_sum_norm = "sequence_sum_norm"


class Anchor(StrEnum):
    """The policy in the denominator of the ratio that a policy loss clips.

    ``behavior`` is the policy that sampled the token. ``proximal`` is the policy before the learner step.
    """

    behavior = "behavior"
    proximal = "proximal"


class Weight(StrEnum):
    """Selects the factor on a token's loss: none, or the importance weight of the token or of its trajectory."""

    none = "none"
    token = "token"
    sequence = "sequence"


class Mask(StrEnum):
    """A rule that leaves tokens or whole trajectories out of the loss."""

    token = "token"
    sequence = "sequence"
    geometric = "geometric"
    k3 = "k3"


class KLEstimator(StrEnum):
    """Estimator of KL(policy ‖ reference) from one sampled token."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    low_variance = "low_variance"


GROUP_ADVANTAGES = frozenset(
    {"grpo", "grpo_no_std", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "turn_grpo", "turn_grpo_no_std"}
)
"""Names of the advantage estimators that need at least two samples per prompt."""

TOKEN_ADVANTAGES = frozenset({"gae", "reinforce_plus_plus"})
"""Names of the advantage estimators that discount the rewards of tokens."""

TURN_ADVANTAGES = frozenset({"turn_gae", "turn_grpo", "turn_grpo_no_std"})
"""Names of the advantage estimators that discount the rewards of turns."""

CRITIC_ADVANTAGES = frozenset({"gae", "turn_gae"})
"""Names of the advantage estimators that need a critic."""

WIDEST_GSPO_CLIP = 0.05
"""Widest accepted clip of GSPO's sequence ratio. The paper uses 3e-4 and 4e-4 (arXiv 2507.18071, section 5.1)."""

ANCHORED_LOSSES = frozenset({"ppo_clip", "gspo", "cispo"})

WIDEST_BAND = (0.1, 10.0)
"""Widest accepted bounds for the importance weight of a token or a trajectory. Usual upper bounds are 1.5 to 5 for a
token and 2 to 10 for a trajectory (verl's documentation)."""

WIDEST_GEOMETRIC_BAND = (0.9, 1.1)
"""Widest accepted bounds for the geometric mean of a trajectory's importance weights. Usual upper bounds are 1.0001 to
1.001 (verl's documentation)."""

WIDEST_K3 = 0.1
"""Largest accepted bound ``k3_max`` for a trajectory's mean KL divergence, in nats per token. Usual bounds are 0.001 to
0.1 (verl's documentation)."""

_SPLIT = (
    "algorithm.correction was split into algorithm.anchor, algorithm.weight and algorithm.masks. Write correction="
    "decoupled_ppo for untruncated, correction=tis for token_truncated, correction=icepop for token_masked, "
    "algorithm.masks=[k3] for sequence_rejected, algorithm.anchor=proximal algorithm.weight=sequence for "
    "sequence_truncated; remove correction=none"
)
_BOUNDS = "the bounds are now algorithm.weight_cap, token_band, sequence_band, geometric_band and k3_max"

RETIRED_OPTIONS = {
    "algorithm.correction": _SPLIT,
    "algorithm.correction_low": _BOUNDS,
    "algorithm.correction_high": _BOUNDS,
}
"""Options of earlier releases, each with the message that names its replacement."""

_DEFAULT_BANDS = {"token_band": (0.5, 5.0), "sequence_band": (0.5, 2.0), "geometric_band": (0.999, 1.001)}


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Options of the algorithm: advantages, loss, KL penalty and off-policy correction.

    Attributes:
        groups_per_step: B, the number of prompt groups per learner step.
        samples_per_prompt: G, the number of rollouts per prompt.
        num_mini_batches: Number of optimizer updates per learner step. Each update trains on a part of the samples.
        advantage: Advantage estimator: ``grpo``, ``grpo_no_std``, ``dr_grpo``, ``rloo``, ``leave_one_out_batch``,
            ``reinforce_plus_plus``, ``reinforce_plus_plus_baseline``, ``remax``, ``gae``, ``turn_gae``, ``turn_grpo``,
            ``turn_grpo_no_std``, or your own as ``file.py:function`` or ``module:function``.
        loss: Policy loss: ``ppo_clip``, ``gspo``, ``cispo``, ``reinforce``, or your own as ``file.py:function`` or
            ``module:function``.
        critic: Train a critic and pass its values to your own token-level or turn-level estimator. ``gae`` and
            ``turn_gae`` do not need this option.
        advantage_by_source: Advantage estimators by data source, in place of ``advantage``. These estimators must use
            one reward per trajectory, and no greedy baseline. Example: ``{gsm8k: rloo}``.
        gamma: Discount of returns in [0, 1], per token, or per turn with a turn-level advantage.
        gae_lambda: Lambda of ``gae`` (per token) and ``turn_gae`` (per turn), in [0, 1].
        whiten_advantages: Standardize the advantages of ``gae`` over the tokens of the batch, and the advantages of
            ``turn_gae`` over the turns of the batch. All trajectories have equal weight with ``turn_gae``.
        clip_low: The loss clips the ratio of the policy to the ``anchor`` policy at 1 - clip_low.
        clip_high: The loss clips the ratio of the policy to the ``anchor`` policy at 1 + clip_high.
        dual_clip: Upper bound (> 1) of the ratio for negative advantages; 0 sets no bound.
        aggregation: How to combine the losses of tokens into the loss of the batch.
        sequence_norm_tokens: With ``aggregation=sequence_sum_norm``, the sum of a trajectory's token losses is divided
            by this number of tokens, usually the length of the longest response.
        anchor: The policy in the denominator of the ratio. ``behavior`` is the policy that sampled the token.
            ``proximal`` is the policy before the step. With one update per step, ``proximal`` clips no token.
        weight: The factor on a token's loss. The importance weight of a token is its probability under the policy
            before the step (proximal), divided by its probability under the policy that sampled it (behavior).
            ``token`` takes this weight. ``sequence`` takes the product of the weights in the trajectory.
        weight_cap: Largest factor of ``weight``; 0 does not truncate.
        masks: Rules that leave tokens or trajectories out of the loss. The rules check the importance weights (see
            ``weight``). A token must pass all rules.
        token_band: Bounds of ``masks=[token]``, for the importance weight of a token.
        sequence_band: Bounds of ``masks=[sequence]``, for the product of the importance weights in a trajectory.
        geometric_band: Bounds of ``masks=[geometric]``, for the geometric mean of the importance weights in a
            trajectory.
        k3_max: Bound of ``masks=[k3]``, for a trajectory's mean KL(behavior ‖ proximal) in nats per token.
        options: Numbers and strings for your own loss or advantage, which reads them as ``config.options``. Example:
            ``{limit: 2.0}``.
        entropy_coef: Weight of the entropy bonus.
        report_entropy: Report the entropy even without an entropy bonus. This takes one more pass over the logits.
        kl_coef: Weight of the KL penalty in the loss; 0 sets no penalty. The reference policy is the model at the start
            of the run.
        kl_estimator: Estimator of the KL penalty in the loss.
        kl_reward_coef: Weight of the KL penalty in the token rewards; 0 sets no penalty.
        kl_reward_estimator: Estimator of the KL penalty in the rewards.
        kl_target: Target divergence, in nats per token, of an adaptive ``kl_reward_coef``; 0 keeps the weight fixed.
        kl_horizon: The adaptive ``kl_reward_coef`` changes by at most about a fifth per this number of trajectories.
        mask_truncated: Leave samples that reach the length limit out of the loss (DAPO's overlong filtering).
        overlong_max_tokens: Response length at which DAPO's length penalty reaches 1; 0 sets no penalty.
        overlong_buffer_tokens: The penalty grows linearly over this many tokens before ``overlong_max_tokens``.
    """

    groups_per_step: int = 32
    samples_per_prompt: int = 8
    num_mini_batches: int = 1
    advantage: str = "grpo"
    advantage_by_source: dict[str, str] = field(default_factory=dict)
    loss: str = "ppo_clip"
    critic: bool = False
    gamma: float = 1.0
    gae_lambda: float = 1.0
    whiten_advantages: bool = True
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    aggregation: Aggregation = Aggregation.token_mean
    sequence_norm_tokens: int = 0
    anchor: Anchor = Anchor.behavior
    weight: Weight = Weight.none
    weight_cap: float = 2.0
    masks: list[Mask] = field(default_factory=list)
    token_band: tuple[float, float] = _DEFAULT_BANDS["token_band"]
    sequence_band: tuple[float, float] = _DEFAULT_BANDS["sequence_band"]
    geometric_band: tuple[float, float] = _DEFAULT_BANDS["geometric_band"]
    k3_max: float = 0.01
    options: dict[str, Any] = field(default_factory=dict)
    entropy_coef: float = 0.0
    report_entropy: bool = True
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = KLEstimator.k3
    kl_reward_coef: float = 0.0
    kl_reward_estimator: KLEstimator = KLEstimator.k1
    kl_target: float = 0.0
    kl_horizon: int = 10_000
    mask_truncated: bool = False
    overlong_max_tokens: int = 0
    overlong_buffer_tokens: int = 0

    @property
    def needs_critic(self) -> bool:
        """True if the advantages need a critic's values."""
        return self.critic or self.advantage in CRITIC_ADVANTAGES

    @property
    def compares_groups(self) -> bool:
        """True if all selected advantage estimators compare the samples of a prompt group."""
        return GROUP_ADVANTAGES.issuperset([self.advantage, *self.advantage_by_source.values()])

    @property
    def needs_reference(self) -> bool:
        """True if a KL penalty needs log-probs of the reference policy."""
        return self.kl_coef > 0 or self.kl_reward_coef > 0

    @property
    def has_own_loss(self) -> bool:
        """True if the loss is a user's function. Such a loss gets all token columns of the groups."""
        return ":" in self.loss

    @property
    def corrects(self) -> bool:
        """True if tokens are weighted or masked by importance weights (``weight`` or ``masks`` is set)."""
        return self.weight is not Weight.none or bool(self.masks)

    @property
    def needs_proximal(self) -> bool:
        """True if the loss, the weight or a mask reads log-probs under the policy before the learner step."""
        return self.anchor is Anchor.proximal or self.corrects

    @property
    def greedy_baseline(self) -> bool:
        """True if the rollout workers also decode one greedy response per prompt.

        The learner uses only the reward of this response.
        """
        return self.advantage == "remax"

    def __post_init__(self) -> None:
        counts = dict.fromkeys(("groups_per_step", "samples_per_prompt", "num_mini_batches"), ">= 1")
        check_bounds("algorithm.", self, **counts, kl_horizon=">= 1; 10000 is usual")
        may_be_0 = ("clip_low", "clip_high", "entropy_coef", "kl_coef", "kl_reward_coef", "kl_target")
        check_bounds("algorithm.", self, **dict.fromkeys(may_be_0, ">= 0; 0 switches it off, 0.2 is usual for a clip"))
        for name in ("gamma", "gae_lambda"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"algorithm.{name} must be in [0, 1], got {value}; 1 is usual")
        _require(
            self.num_mini_batches <= self.groups_per_step,
            "algorithm.num_mini_batches must be <= algorithm.groups_per_step, got "
            f"{self.num_mini_batches} and {self.groups_per_step}; lower num_mini_batches or raise groups_per_step",
        )
        _require(
            not self.dual_clip or self.dual_clip > 1,
            f"algorithm.dual_clip must be > 1, got {self.dual_clip}; 0 switches it off, 3 is usual",
        )
        _require(
            self.aggregation is not Aggregation.sequence_sum_norm or self.sequence_norm_tokens >= 1,
            "algorithm.aggregation=sequence_sum_norm needs algorithm.sequence_norm_tokens >= 1, "
            f"got {self.sequence_norm_tokens}; the longest response is usual",
        )
        _require(
            not self.options or self.has_own_loss or ":" in self.advantage,
            f"algorithm.options={self.options} needs your own loss or advantage, got algorithm.loss={self.loss} and "
            f"algorithm.advantage={self.advantage}; set one of them to file.py:function, or remove the option",
        )
        self._check_correction()
        self._check_combinations()
        _require(
            not self.kl_target or self.kl_reward_coef > 0,
            f"algorithm.kl_target={self.kl_target} needs algorithm.kl_reward_coef > 0, got 0, which would stay 0; set "
            "an initial coefficient, for example 0.1",
        )
        _require(
            0 <= self.overlong_buffer_tokens <= self.overlong_max_tokens,
            "algorithm.overlong_buffer_tokens must be in 0..algorithm.overlong_max_tokens, got "
            f"{self.overlong_buffer_tokens} and {self.overlong_max_tokens}",
        )

    def _check_combinations(self) -> None:
        _require(
            self.loss != "gspo" or max(self.clip_low, self.clip_high) <= WIDEST_GSPO_CLIP,
            f"algorithm.clip_low and clip_high must be <= {WIDEST_GSPO_CLIP} with algorithm.loss=gspo, got "
            f"{self.clip_low} and {self.clip_high}: the ratio is a mean over the sequence, and bounds for tokens never "
            "clip it; the paper uses 3e-4 and 4e-4",
        )
        _require(
            self.loss != "gspo" or self.anchor is Anchor.proximal or min(self.clip_low, self.clip_high) >= 1e-3,
            f"algorithm.anchor must be proximal with algorithm.loss=gspo and bounds below 1e-3, got {self.anchor} with "
            f"{self.clip_low} and {self.clip_high}: the difference between engine and learner log-probs alone exceeds "
            "such bounds; set algorithm.anchor=proximal",
        )
        _require(
            not self.kl_coef or self.kl_estimator is not KLEstimator.k1,
            f"algorithm.kl_estimator must be k2, k3 or low_variance with algorithm.kl_coef={self.kl_coef}, got k1: the "
            "gradient of k1 is zero in expectation; use k1 in the rewards (algorithm.kl_reward_coef)",
        )
        _require(
            self.loss != "reinforce" or self.anchor is Anchor.behavior or self.corrects,
            f"algorithm.anchor must be behavior with algorithm.loss=reinforce, got {self.anchor}: this loss does not "
            f"have a ratio; remove the option, or set algorithm.loss to one of {sorted(ANCHORED_LOSSES)}",
        )
        estimators = {"advantage": self.advantage, **self.advantage_by_source}
        discounted = {name for name in estimators.values() if name in TOKEN_ADVANTAGES | TURN_ADVANTAGES | {"remax"}}
        _require(
            not (self.advantage_by_source and discounted),
            "algorithm.advantage_by_source needs estimators with one reward per trajectory, without a baseline, got "
            f"{estimators}; name others than {sorted(discounted)}",
        )
        own = ":" in self.advantage
        _require(
            self.gae_lambda == 1 or self.advantage in CRITIC_ADVANTAGES or own,
            f"algorithm.gae_lambda={self.gae_lambda} needs one of the advantages {sorted(CRITIC_ADVANTAGES)}, got "
            f"{self.advantage}; set one of them, or remove the option",
        )
        discounting = TOKEN_ADVANTAGES | TURN_ADVANTAGES
        _require(
            self.gamma == 1 or self.advantage in discounting or own,
            f"algorithm.gamma={self.gamma} needs one of the advantages {sorted(discounting)}, got "
            f"{self.advantage}; set one of them, or remove the option",
        )

    def _check_correction(self) -> None:
        _require(
            self.weight_cap == 0 or 1 <= self.weight_cap <= WIDEST_BAND[1],
            f"algorithm.weight_cap must be in [1, {WIDEST_BAND[1]:g}], or 0 for no truncation, got {self.weight_cap}; "
            "2 is usual",
        )
        _require(
            self.weight is Weight.none or self.anchor is Anchor.proximal or self.loss not in ANCHORED_LOSSES,
            f"algorithm.weight must be none with algorithm.anchor=behavior, got {self.weight} with algorithm.loss="
            f"{self.loss}: the ratio policy ÷ behavior already contains proximal ÷ behavior; set "
            "algorithm.anchor=proximal",
        )
        for name in ("token_band", "sequence_band"):
            # With ``algorithm.weight``, a band may begin at 0, because a token with a small weight has little effect.
            low = 0.0 if self.weight is not Weight.none else WIDEST_BAND[0]
            self._check_band(name, (low, WIDEST_BAND[1]))
        self._check_band("geometric_band", WIDEST_GEOMETRIC_BAND)
        _require(
            0 < self.k3_max <= WIDEST_K3,
            f"algorithm.k3_max must be in (0, {WIDEST_K3}], got {self.k3_max}: a larger bound rejects nothing; 0.01 is "
            "usual",
        )

    def _check_band(self, name: str, widest: tuple[float, float]) -> None:
        low, high = getattr(self, name)
        _require(
            widest[0] <= low < 1 < high <= widest[1],
            f"algorithm.{name} must contain 1 and lie in [{widest[0]:g}, {widest[1]:g}], got [{low:g}, {high:g}]: a "
            f"wider band rejects nothing; {list(_DEFAULT_BANDS[name])} is usual",
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Options of AdamW and of the learning rate's schedule.

    Attributes:
        lr: Peak learning rate.
        betas: Decay of the first and second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay, on matrices only.
        schedule: Shape of the learning rate after the warm-up.
        warmup_steps: Number of optimizer updates in which the learning rate grows linearly to its peak.
        min_lr_ratio: The learning rate at the end of the run is ``lr`` times this number; a constant schedule ignores
            this option.
        clip_grad_norm: Gradients with a larger global norm are scaled to this norm; 0 does not clip.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    schedule: Schedule = Schedule.constant
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    clip_grad_norm: float = 1.0
    section: ClassVar[str] = "learner.optimizer"

    def __post_init__(self) -> None:
        bounds = dict.fromkeys(("warmup_steps", "lr", "eps", "weight_decay"), ">= 0")
        check_bounds(f"{self.section}.", self, **bounds, clip_grad_norm=">= 0; 0: no clipping")
        ratio = self.min_lr_ratio
        _require(0 <= ratio <= 1, f"{self.section}.min_lr_ratio must be in [0, 1], got {ratio}")
        _require(
            all(0 <= beta < 1 for beta in self.betas),
            f"{self.section}.betas must be in [0, 1), got {list(self.betas)}; [0.9,0.95] is usual",
        )


@dataclass(frozen=True, kw_only=True)
class CriticOptimizerConfig(OptimizerConfig):
    """Options of the critic's optimizer (AdamW) and of its learning rate's schedule."""

    lr: float = 1e-5
    section: ClassVar[str] = "learner.critic.optimizer"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Options of the policy's low-rank adapters (LoRA). Supervised fine-tuning has no adapters and trains all weights.

    Attributes:
        rank: Rank of the adapters; 0 trains all weights without adapters.
        alpha: The scale of the adapters is alpha / rank.
        target_modules: Names, or suffixes of names, of the linear layers that get an adapter. ``all-linear``
            means all linear layers except the output embedding.
        dropout: Dropout of the adapters' inputs during training. The model's own dropout is always off.
    """

    rank: int = 0
    alpha: int = 16
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    dropout: float = 0.0

    def __post_init__(self) -> None:
        alpha = ">= 1; alpha / rank scales the adapters, 16 is usual"
        check_bounds("learner.lora.", self, rank=">= 0; 0 trains without adapters", alpha=alpha)
        _require(
            bool(self.target_modules),
            "learner.lora.target_modules must name at least one layer, got none; all-linear is usual",
        )
        _require(0 <= self.dropout < 1, f"learner.lora.dropout must be in [0, 1), got {self.dropout}")


@dataclass(frozen=True, kw_only=True)
class RoleOptions:
    """Options of one role (critic, reference or reward model) that may differ from the actor's options.

    null means the value of the ``learner`` option with the same name.

    Attributes:
        sp_size: Number of ranks that share a sequence (Ulysses). It must divide the number of processes that run the
            role.
        fsdp_size: Number of ranks that share one copy of this role's parameters; -1 means all. null means -1 if the
            number of processes that run the role is not ``learner.num_ranks``.
        dtype: Dtype of this role's parameters in the computation.
        attention: The attention kernel of this role.
        max_tokens_per_micro_batch: Token budget of a micro-batch of this role.
        share_prompts: Whether this role computes a prompt once for all its samples.
        torch_compile: Whether to compile this role's decoder layers.
        skip_selftest: Reason for skipping the self-test of this role's model.
        resharding: When FSDP frees this role's gathered parameters.
        offload_policy: Whether to keep this role's parameters, gradients and optimizer state on the host.
        param_offload: Whether to move this role's parameters to the host after each use.
        offload_at_transition_only: Whether to move this role's tensors to the host only when engines on the same GPUs
            start to generate.
    """

    sp_size: int | None = None
    fsdp_size: int | None = None
    dtype: Dtype | None = None
    attention: AttentionKernel | None = None
    max_tokens_per_micro_batch: int | None = None
    share_prompts: bool | None = None
    torch_compile: bool | None = None
    skip_selftest: str | None = None
    resharding: Resharding | None = None
    offload_policy: bool | None = None
    param_offload: bool | None = None
    offload_at_transition_only: bool | None = None

    @property
    def own(self) -> dict[str, Any]:
        """The values of the role's options that are not null, by name.

        If an option is null, the role uses the ``learner`` option with the same name.
        """
        options = {field.name: getattr(self, field.name) for field in fields(self) if field.default is None}
        return {name: value for name, value in options.items() if value is not None}

    def _check_own(self, section: str) -> None:
        for name, value in self.own.items():
            if not isinstance(value, bool | str) and not (name == "fsdp_size" and value == -1):
                bound = f">= 1; leave it out for the value of learner.{name}"
                check_bounds(f"{section}.", self, **{name: bound})


@dataclass(frozen=True, kw_only=True)
class CriticConfig(RoleOptions):
    """Options of the critic. ``algorithm.advantage=gae``, ``turn_gae`` and ``algorithm.critic=true`` use a critic.

    Attributes:
        path: Initial model in Hugging Face layout: a token classifier with one label, or a causal language model. A
            causal language model gets a value head of zeros. Empty means the run's initial policy.
        warmup_steps: Number of learner steps at the start of the run that train only the critic.
        value_clip: The critic's loss clips the change of a value within a learner step at this number; 0 does not clip.
        optimizer: The critic's own AdamW and schedule.
        activation_checkpointing: Recompute the critic's layers, see ``learner.activation_checkpointing``.
        gradient_sync: When the ranks sum the critic's gradients.
        optimizer_offload: Whether to move the critic's optimizer state to the host after each update.
    """

    path: str = ""
    warmup_steps: int = 0
    value_clip: float = 0.5
    optimizer: OptimizerConfig = field(default_factory=CriticOptimizerConfig)
    activation_checkpointing: bool | str | None = None
    gradient_sync: GradientSync | None = None
    optimizer_offload: bool | None = None

    def __post_init__(self) -> None:
        self._check_own("learner.critic")
        check_bounds("learner.critic.", self, warmup_steps=">= 0", value_clip=">= 0; 0: no clipping")


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(RoleOptions):
    """Options of the reference policy of a KL penalty. With LoRA, the reference is the actor without its adapters.

    Attributes:
        frozen_dtype: Dtype in which the reference's parameters are stored.
        logprob_chunk_tokens: Number of tokens per chunk of the reference's float32 logits.
    """

    frozen_dtype: Dtype | None = None
    logprob_chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        self._check_own("learner.reference")


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(RoleOptions):
    """Options of the reward model.

    Attributes:
        path: A sequence classifier with one label and the policy's tokenizer, in Hugging Face layout. It scores the
            training samples. ``rollout_fleet.reward`` then scores only evaluations. Empty means no reward model.
        frozen_dtype: Dtype in which the reward model's parameters are stored.
    """

    path: str = ""
    frozen_dtype: Dtype | None = None

    def __post_init__(self) -> None:
        self._check_own("learner.reward_model")


ROLE_SECTIONS = {"critic": "critic", "ref": "reference", "rm": "reward_model"}
"""The section of ``learner`` with a role's options, by the role's name. The actor uses ``learner`` itself."""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """Options of the learner group.

    Attributes:
        num_ranks: Number of processes (ranks) of the group, each with one device.
        sp_size: Number of ranks that share each sequence (Ulysses). num_ranks / sp_size is the data-parallel size.
        device: ``auto`` selects CUDA if there are enough GPUs for learner and engines, else the CPU.
        dtype: Dtype of parameters in the computation. Trained parameters are always stored in float32, and their
            gradients are reduced in float32.
        frozen_dtype: Dtype in which frozen parameters are stored: the reference, the reward model, and with LoRA the
            weights of the policy that are not adapters. ``auto`` means ``dtype``.
        attention: The attention kernel. On CUDA in half precision, ``auto`` takes the first correct kernel of:
            flash-attn 3 and 4 on Hopper, flash-attn 4 on Blackwell, flash-attn 2 (``flash_attn``), torch's
            variable-length kernel. If none is correct, on the CPU, and in float32, ``auto`` takes torch's scaled dot
            product attention (``sdpa``). A kernel that you name must be correct too.
        max_tokens_per_micro_batch: Token budget of a micro-batch on one rank.
        freeze_vision: Do not train the vision tower and the layers that merge patches.
        share_prompts: Compute a prompt once for all its samples in a micro-batch, if this passes the model's self-test.
            Recurrent models do not share prompts.
        logprob_chunk_tokens: Number of tokens per chunk of float32 logits. Only one chunk is in memory.
        activation_checkpointing: Recompute layers in the backward pass. ``selective`` keeps the inputs and output of
            attention and recomputes the rest. null recomputes on CUDA only, with ``selective`` if the run predicts that
            the rank then fits on its GPU.
        torch_compile: Compile the decoder layers with ``torch.compile``; the first steps take longer. null compiles on
            CUDA only.
        skip_selftest: Reason for skipping the self-test of loaded models, such as ``checked by hand``; empty runs the
            self-test.
        fsdp_size: Number of ranks that share one copy of the parameters; -1 means all. Fewer ranks means HSDP with
            num_ranks / fsdp_size copies, for example one per node.
        gradient_sync: ``update`` sums gradients over the ranks once per optimizer update. Until then each rank holds
            unsharded gradients in float32. ``micro_batch`` reduce-scatters the gradients after each micro-batch, which
            needs less memory. ``auto`` means ``micro_batch`` if unsharded gradients exceed 15% of the GPU's memory.
            HSDP always sums over its copies once per update.
        resharding: ``layer`` frees a layer's gathered parameters after its forward pass and after its backward pass.
            ``update`` keeps the gathered parameters during all micro-batches of an update. This is faster and needs
            more memory.
        offload_policy: Keep parameters, gradients and optimizer state on the host (FSDP's CPU offload policy). FSDP
            loads one layer at a time. ``param_offload``, ``optimizer_offload`` and ``offload_at_transition_only`` are
            then ignored with a warning.
        param_offload: Move the parameters to the host after each use.
        optimizer_offload: Move the optimizer state to the host after each update.
        offload_at_transition_only: Move parameters and optimizer state to the host only when engines on the same GPUs
            start to generate. Ignored with a warning if ``param_offload`` or ``optimizer_offload`` is set.
        keep_snapshots: Number of published weight versions to keep, including the newest; -1 keeps all.
        start_timeout_s: Seconds allowed for building the models; a run adds one second per 100 MB of the models.
        restarts: Largest number of restarts of the ranks after a rank died or hung. The ranks resume from the newest
            checkpoint. Without a checkpoint, or with 0, the run ends.
        step_timeout_s: Deadline of a learner step and of a collective, in seconds. The controller doubles this deadline
            for the first step and for calls that save, load or publish. The deadline of a later step is ten times the
            duration of the longest step so far, at least 120 s and at most the doubled ``step_timeout_s``.
        optimizer: Options of AdamW and its schedule.
        lora: Options of the policy's adapters.
        critic: Options of the critic.
        reference: Options of the reference policy of a KL penalty.
        reward_model: Options of the reward model.
    """

    num_ranks: int = 1
    sp_size: int = 1
    device: Device = Device.auto
    dtype: Dtype = Dtype.auto
    frozen_dtype: Dtype = Dtype.auto
    attention: AttentionKernel = AttentionKernel.auto
    max_tokens_per_micro_batch: int = 16384
    freeze_vision: bool = False
    share_prompts: bool = True
    logprob_chunk_tokens: int = 1024
    activation_checkpointing: bool | str | None = None
    torch_compile: bool | None = None
    skip_selftest: str = ""
    fsdp_size: int = -1
    gradient_sync: GradientSync = GradientSync.auto
    resharding: Resharding = Resharding.layer
    offload_policy: bool = False
    param_offload: bool = False
    optimizer_offload: bool = False
    offload_at_transition_only: bool = False
    keep_snapshots: int = 2
    start_timeout_s: float = 300.0
    restarts: int = 1
    step_timeout_s: float = 600.0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)

    def __post_init__(self) -> None:
        check_bounds("learner.", self, num_ranks=">= 1", restarts=">= 0; 0 ends the run when a rank dies")
        _require(
            self.sp_size >= 1 and self.num_ranks % self.sp_size == 0,
            f"learner.sp_size must divide learner.num_ranks, got sp_size={self.sp_size}, num_ranks={self.num_ranks}",
        )
        _require(
            self.fsdp_size == -1 or (self.fsdp_size >= 1 and self.num_ranks % self.fsdp_size == 0),
            f"learner.fsdp_size must be -1 or divide learner.num_ranks, got fsdp_size={self.fsdp_size}, "
            f"num_ranks={self.num_ranks}; -1 shards over all ranks",
        )
        positive = ("max_tokens_per_micro_batch", "logprob_chunk_tokens", "start_timeout_s", "step_timeout_s")
        check_bounds("learner.", self, **dict.fromkeys(positive, "> 0"))
        _require(
            self.activation_checkpointing in (True, False, None, SELECTIVE),
            f"learner.activation_checkpointing must be true, false, null or {SELECTIVE}, got "
            f"{self.activation_checkpointing}; null chooses by the device",
        )
        kept = self.keep_snapshots
        _require(kept == -1 or kept >= 1, f"learner.keep_snapshots must be -1 or >= 1, got {kept}")

    def own_options(self, role: str) -> dict[str, Any]:
        """Return the options that a role sets in its own section (such as ``learner.critic``), as values by name.

        ``role`` is ``actor``, ``critic``, ``ref`` or ``rm``. The actor has no section.
        """
        return getattr(self, ROLE_SECTIONS[role]).own if role in ROLE_SECTIONS else {}

    def option_name(self, role: str, option: str) -> str:
        """Return the full name of the option that sets a value for a role. Example: ``learner.critic.sp_size``.

        If the role's section does not set this value, the ``learner`` option sets it. Example: ``learner.sp_size``.
        """
        return f"learner.{ROLE_SECTIONS[role]}.{option}" if option in self.own_options(role) else f"learner.{option}"

    def of_role(self, role: str, *, num_ranks: int | None = None) -> LearnerConfig:
        """Return a copy of these options for one role. The values in the role's section replace those of ``learner``.

        ``num_ranks`` is the number of processes that run the role, by default ``learner.num_ranks``. Raises
        `ValueError` if ``num_ranks`` is not a multiple of the role's ``sp_size`` and ``fsdp_size``.
        """
        num_ranks = num_ranks or self.num_ranks
        size = {"num_ranks": num_ranks, "fsdp_size": self.fsdp_size if num_ranks == self.num_ranks else -1}
        return replace(self, **(size | self.own_options(role)))


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
