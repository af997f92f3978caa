"""Options of the learner group and of the algorithm: the only home of their defaults."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

RENDEZVOUS_FILE = "ASYNCRL_RENDEZVOUS_FILE"
"""Environment variable of ranks that are all on one host: the file through which they find each other."""


class Device(StrEnum):
    """Where the learner computes; ``auto`` takes CUDA when torch sees it."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    """Type of parameters; ``auto`` takes bfloat16 on CUDA and float32 on the CPU."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class AttentionKernel(StrEnum):
    """What computes attention; see `learner.attention`."""

    auto = "auto"
    flash_attn_4 = "flash_attn_4"
    flash_attn_3 = "flash_attn_3"
    flash_attn = "flash_attn"
    torch_varlen = "torch_varlen"
    sdpa = "sdpa"


class GradientSync(StrEnum):
    """When the ranks sum their gradients."""

    update = "update"
    micro_batch = "micro_batch"


class Resharding(StrEnum):
    """When gathered parameters are given up."""

    layer = "layer"
    update = "update"


class Schedule(StrEnum):
    """Learning rate after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Aggregation(StrEnum):
    """How the losses of the batch's tokens become one number; see `learner.losses.token_weights`."""

    token_mean = "token_mean"
    sequence_mean = "sequence_mean"
    sequence_sum_norm = "sequence_sum_norm"


class Anchor(StrEnum):
    """The policy in the denominator of the ratio that a loss clips; see `learner.losses.anchor_log_probs`."""

    behavior = "behavior"
    proximal = "proximal"


class Weight(StrEnum):
    """What the loss of a token is multiplied by; see `learner.losses.importance_weights`."""

    none = "none"
    token = "token"
    sequence = "sequence"


class Mask(StrEnum):
    """A rule that leaves tokens or whole trajectories out of the loss; see `learner.losses.kept_tokens`."""

    token = "token"
    sequence = "sequence"
    geometric = "geometric"
    k3 = "k3"


class KLEstimator(StrEnum):
    """Estimator of KL(policy ‖ reference) from one sampled token; see `learner.losses`."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    low_variance = "low_variance"


GROUP_ADVANTAGES = frozenset({"grpo", "grpo_no_std", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"})
"""Estimators that compare the samples of one prompt, of which there must be two or more."""

TOKEN_ADVANTAGES = frozenset({"gae", "reinforce_plus_plus"})
"""Estimators that discount the rewards of tokens."""

WIDEST_GSPO_CLIP = 0.05
"""Widest bounds for GSPO's ratio of a sequence; the paper's are 3e-4 and 4e-4 (arXiv 2507.18071, section 5.1)."""

ANCHORED_LOSSES = frozenset({"ppo_clip", "gspo", "cispo"})
"""Losses that read ``algorithm.anchor``: those with a ratio."""

WIDEST_BAND = (0.1, 10.0)
"""Widest bounds for a weight of a token or a trajectory. verl's documentation names 1.5 to 5 and 2 to 10 as usual."""

WIDEST_GEOMETRIC_BAND = (0.9, 1.1)
"""Widest bounds for a geometric mean. verl's documentation names 1.0001 to 1.001 as usual."""

WIDEST_K3 = 0.1
"""Widest bound for a mean divergence, in nats per token. verl's documentation names 0.001 to 0.1 as usual."""

_SPLIT = (
    "algorithm.correction was split into algorithm.anchor, algorithm.weight and algorithm.masks. Write correction="
    "decoupled_ppo for untruncated, correction=tis for token_truncated, correction=icepop for token_masked, "
    "algorithm.masks=[k3] for sequence_rejected, algorithm.anchor=proximal algorithm.weight=sequence for "
    "sequence_truncated; leave out none"
)
_BOUNDS = "the bounds are now algorithm.weight_cap, token_band, sequence_band, geometric_band and k3_max"

RETIRED_OPTIONS = {
    "algorithm.correction": _SPLIT,
    "algorithm.correction_low": _BOUNDS,
    "algorithm.correction_high": _BOUNDS,
}
"""Options of earlier releases, with what replaces them."""

_DEFAULT_BANDS = {"token_band": (0.5, 5.0), "sequence_band": (0.5, 2.0), "geometric_band": (0.999, 1.001)}


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """What is optimised.

    Attributes:
        groups_per_step: B, prompt groups consumed by one learner step.
        samples_per_prompt: G, rollouts of one prompt.
        num_mini_batches: Optimizer updates of one learner step, each on its share of the batch's prompt groups.
        advantage: Advantage estimator: ``grpo``, ``grpo_no_std``, ``dr_grpo``, ``rloo``, ``leave_one_out_batch``,
            ``reinforce_plus_plus``, ``reinforce_plus_plus_baseline``, ``remax``, ``gae``, or your own as
            ``file.py:function`` or ``module:function``.
        loss: Policy loss: ``ppo_clip``, ``gspo``, ``cispo``, ``reinforce``, or your own in the same way.
        critic: Give a token-level estimator of your own a critic's values; ``advantage=gae`` has one without it.
        gamma: Discount of returns, in [0, 1].
        gae_lambda: Lambda of ``advantage=gae``, in [0, 1].
        whiten_advantages: Standardise the advantages of ``advantage=gae`` over the batch's tokens.
        clip_low: PPO keeps the ratio above 1 - clip_low.
        clip_high: PPO keeps the ratio below 1 + clip_high.
        dual_clip: Largest ratio that counts where the advantage is negative (> 1); 0 has no such bound.
        aggregation: How token losses become the loss of the whole batch.
        sequence_norm_tokens: L of ``sequence_sum_norm``; the longest response is usual.
        anchor: Where the ratio of the loss starts: at ``behavior``, the policy that sampled the token, or at
            ``proximal``, the policy before the step. With one update per step only ``behavior`` clips anything.
        weight: Multiply the loss of a token by proximal ÷ behaviour of the token, or of its whole trajectory.
        weight_cap: Largest such weight; 0 does not truncate.
        masks: Rules that leave tokens or trajectories out of the loss, by proximal ÷ behaviour. A token must pass all.
        token_band: Bounds of ``masks=[token]``, for the weight of a token.
        sequence_band: Bounds of ``masks=[sequence]``, for the product of a trajectory's weights.
        geometric_band: Bounds of ``masks=[geometric]``, for the geometric mean of a trajectory's weights.
        k3_max: Bound of ``masks=[k3]``, for a trajectory's mean KL(behaviour ‖ proximal) in nats per token.
        options: Numbers and texts for a loss or an advantage of your own, which reads ``config.options``. Example:
            ``{limit: 2.0}``.
        entropy_coef: Weight of the entropy bonus.
        report_entropy: Compute the policy's entropy for the metrics also where there is no bonus; it takes one more
            pass over the logits.
        kl_coef: Weight of the KL penalty in the loss, to the reference policy, the model that the run starts from; 0
            has none.
        kl_estimator: How the KL penalty in the loss is estimated.
        kl_reward_coef: Weight of the KL penalty in the rewards of tokens, to the same reference; 0 has none.
        kl_reward_estimator: How the KL penalty in the rewards is estimated.
        kl_target: Divergence in nats per token that an adaptive ``kl_reward_coef`` aims at; 0 keeps it fixed.
        kl_horizon: Trajectories over which an adaptive coefficient follows.
        mask_truncated: Leave samples that hit the length limit out of the loss (DAPO's overlong filtering).
        overlong_max_tokens: Response length at which DAPO's length penalty reaches 1; 0 has no penalty.
        overlong_buffer_tokens: Tokens before it over which the penalty grows.
    """

    groups_per_step: int = 32
    samples_per_prompt: int = 8
    num_mini_batches: int = 1
    advantage: str = "grpo"
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
        """Whether the advantages take a critic's values."""
        return self.critic or self.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        """Whether anything takes log-probs of the reference policy."""
        return self.kl_coef > 0 or self.kl_reward_coef > 0

    @property
    def has_own_loss(self) -> bool:
        """Whether the loss is a function of the user's own, which gets every token column."""
        return ":" in self.loss

    @property
    def corrects(self) -> bool:
        """Whether tokens are weighed or masked by proximal ÷ behaviour."""
        return self.weight is not Weight.none or bool(self.masks)

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss, a weight or a mask reads log-probs of the policy before the step."""
        return self.anchor is Anchor.proximal or self.corrects

    @property
    def greedy_baseline(self) -> bool:
        """Whether the fleet decodes one more response of each prompt greedily, which is scored and not trained on."""
        return self.advantage == "remax"

    def __post_init__(self) -> None:
        for name in ("groups_per_step", "samples_per_prompt", "num_mini_batches"):
            _at_least(self, "algorithm", name, 1)
        _at_least(self, "algorithm", "kl_horizon", 1, remedy="; 10000 is usual")
        for name in ("clip_low", "clip_high", "entropy_coef", "kl_coef", "kl_reward_coef", "kl_target"):
            _at_least(self, "algorithm", name, 0, remedy="; 0 switches it off, 0.2 is usual for a clip")
        for name in ("gamma", "gae_lambda"):
            _at_least(self, "algorithm", name, 0, 1, remedy="; 1 is usual")
        _require(
            self.num_mini_batches <= self.groups_per_step,
            "algorithm.num_mini_batches must be <= algorithm.groups_per_step, since one update trains on whole prompt "
            f"groups, got {self.num_mini_batches} and {self.groups_per_step}; lower the one or raise the other",
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
            f"algorithm.options={self.options} is read by a loss or an advantage of your own, got algorithm.loss="
            f"{self.loss} and algorithm.advantage={self.advantage}; name one as file.py:function, or leave it out",
        )
        self._check_correction()
        self._check_combinations()
        _require(
            not self.kl_target or self.kl_reward_coef > 0,
            f"algorithm.kl_target={self.kl_target} adapts algorithm.kl_reward_coef, which is 0 and would stay 0; set "
            "the coefficient to begin with, 0.1 for one",
        )
        _require(
            0 <= self.overlong_buffer_tokens <= self.overlong_max_tokens,
            "algorithm.overlong_buffer_tokens must be in 0..algorithm.overlong_max_tokens, got "
            f"{self.overlong_buffer_tokens} and {self.overlong_max_tokens}",
        )

    def _check_combinations(self) -> None:
        """Refuse options that do nothing, or the opposite of what their user means, beside others."""
        _require(
            self.loss != "gspo" or max(self.clip_low, self.clip_high) <= WIDEST_GSPO_CLIP,
            f"algorithm.clip_low and clip_high must be <= {WIDEST_GSPO_CLIP} with algorithm.loss=gspo, got "
            f"{self.clip_low} and {self.clip_high}: its ratio is a mean over the sequence, which a token's bounds "
            "never clip; 3e-4 and 4e-4 are the paper's",
        )
        _require(
            self.loss != "gspo" or self.anchor is Anchor.proximal or min(self.clip_low, self.clip_high) >= 1e-3,
            f"algorithm.anchor must be proximal with algorithm.loss=gspo and bounds below 1e-3, got {self.anchor} with "
            f"{self.clip_low} and {self.clip_high}: the engine's log-probs alone leave such bounds; set it",
        )
        _require(
            not self.kl_coef or self.kl_estimator is not KLEstimator.k1,
            f"algorithm.kl_estimator must be k2, k3 or low_variance with algorithm.kl_coef={self.kl_coef}, got k1: its "
            "gradient is zero in expectation; use k1 in the rewards (algorithm.kl_reward_coef)",
        )
        _require(
            self.loss != "reinforce" or self.anchor is Anchor.behavior or self.corrects,
            f"algorithm.anchor must be behavior with algorithm.loss=reinforce, got {self.anchor}: this loss has no "
            f"ratio; leave it out, or set algorithm.loss to one of {sorted(ANCHORED_LOSSES)}",
        )
        own = ":" in self.advantage
        _require(
            self.gae_lambda == 1 or self.advantage == "gae" or own,
            f"algorithm.gae_lambda={self.gae_lambda} is read by algorithm.advantage=gae, got {self.advantage}; set "
            "gae, or leave it out",
        )
        _require(
            self.gamma == 1 or self.advantage in TOKEN_ADVANTAGES or own,
            f"algorithm.gamma={self.gamma} is read by the advantages {sorted(TOKEN_ADVANTAGES)}, got {self.advantage}; "
            "set one of them, or leave it out",
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
            f"{self.loss}: the ratio policy ÷ behaviour holds proximal ÷ behaviour already; set "
            "algorithm.anchor=proximal",
        )
        for name in ("token_band", "sequence_band"):
            # A weight vanishes by itself where it is small, so one side of a band is enough beside it.
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
            f"algorithm.{name} must hold 1 and lie in [{widest[0]:g}, {widest[1]:g}], got [{low:g}, {high:g}]: a wider "
            f"one rejects nothing; {list(_DEFAULT_BANDS[name])} is usual",
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule.

    Attributes:
        lr: Peak learning rate.
        betas: Decay of the first and second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay, on matrices only.
        schedule: Shape after the warm-up.
        warmup_steps: Optimizer updates of linear warm-up.
        min_lr_ratio: Final learning rate ÷ peak.
        clip_grad_norm: Largest global gradient norm; 0 does not clip.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    schedule: Schedule = Schedule.constant
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    clip_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "lr"):
            _at_least(self, "learner.optimizer", name, 0)
        _at_least(self, "learner.optimizer", "clip_grad_norm", 0, remedy="; 0: no clipping")
        _at_least(self, "learner.optimizer", "min_lr_ratio", 0, 1)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on the policy. Supervised fine-tuning trains all weights.

    Attributes:
        rank: Rank of the adapters; 0 trains all weights and has none.
        alpha: Their scale is alpha ÷ rank.
        target_modules: Names, or ends of names, of the linear layers that get one; ``all-linear``: all but the output
            embedding.
        dropout: Of the adapters' inputs, while training. The model's own dropout is always off.
    """

    rank: int = 0
    alpha: int = 16
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _at_least(self, "learner.lora", "rank", 0, remedy="; 0 has no adapters")
        _require(
            bool(self.target_modules),
            "learner.lora.target_modules must name at least one layer, got none; all-linear is usual",
        )
        _require(0 <= self.dropout < 1, f"learner.lora.dropout must be in [0, 1), got {self.dropout}")


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic of ``algorithm.advantage=gae``, or of ``algorithm.critic=true``.

    Attributes:
        path: Model to start from, in Hugging Face layout: a token classifier with one label, or a causal language
            model, which gets a value head of zeros. Empty: the policy that the run starts from.
        warmup_steps: First learner steps in which the critic learns and the policy stays as it is.
        value_clip: Values move at most this far from those before the step, as far as the loss counts it; 0 does not
            clip.
        optimizer: The critic's own AdamW and schedule.
    """

    path: str = ""
    warmup_steps: int = 0
    value_clip: float = 0.5
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))

    def __post_init__(self) -> None:
        _at_least(self, "learner.critic", "warmup_steps", 0)
        _at_least(self, "learner.critic", "value_clip", 0, remedy="; 0: no clipping")


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """The reward model.

    Attributes:
        path: A sequence classifier with one label, over the policy's tokens, in Hugging Face layout. It scores what is
            trained on, in the place of ``rollout_fleet.reward``, which then scores evaluations alone. Empty: none.
    """

    path: str = ""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """The learner group.

    Attributes:
        num_ranks: Processes of the group, one device each.
        sp_size: Ulysses sequence-parallel ranks; dp = num_ranks ÷ sp_size.
        device: Where to compute. ``auto``: on CUDA if there are enough GPUs for learner and engines, else on the CPU.
        dtype: Parameter type while computing. Trained parameters are always held in float32, and their gradients are
            reduced in float32.
        frozen_dtype: Type that frozen parameters are held in: the reference, the reward model, and the weights below
            adapters. ``auto``: that of ``dtype``.
        attention: What computes attention. ``auto``: on CUDA in half precision the fastest of these kernels that can be
            imported and computes what attention in float32 does: flash-attn 3 or 4 on Hopper, 4 on Blackwell,
            flash-attn 2 (``flash_attn``), torch's variable-length kernel. Elsewhere torch's scaled dot product
            attention (``sdpa``). A kernel that is named here and fails this test is refused.
        max_tokens_per_micro_batch: Token budget of one forward-backward on one rank.
        share_prompts: Compute the tokens of a prompt once for those of its samples that are in one micro-batch, in
            models where the self-test finds that right; a model whose layers carry a state from token to token cannot.
        logprob_chunk_tokens: Tokens whose logits are held in float32 at a time.
        activation_checkpointing: Recompute layers in the backward pass.
        torch_compile: Compile the decoder layers with ``torch.compile``; the first steps take longer.
        skip_selftest: Why the self-test of loaded models is skipped; empty runs it. Example: ``checked by hand``.
        fsdp_size: Ranks that share one copy of the parameters; -1: all. Fewer is HSDP: num_ranks ÷ fsdp_size copies,
            gathered inside a node, say, and reduced across.
        gradient_sync: ``update`` sums gradients over the ranks once per optimizer update and holds whole gradients in
            float32 until then. ``micro_batch`` scatters them after each micro-batch, which needs less memory; the
            copies of HSDP are summed once per update either way.
        resharding: ``layer`` gives a layer's gathered parameters up after its forward and its backward pass;
            ``update`` keeps them from the first micro-batch of an update to the last: faster, more memory.
        offload_policy: Keep parameters, gradients and optimizer state on the host all the time (FSDP's CPU offload
            policy); layers visit the device one by one. The three options below then have nothing to move, and a
            warning says so.
        param_offload: Move the parameters to the host after every use.
        optimizer_offload: Move the optimizer state to the host after every update.
        offload_at_transition_only: Keep both on the device while training and move them to the host when colocated
            engines take over; ignored, with a warning, beside either of the two above.
        keep_snapshots: Published weight versions that stay, the newest included; -1 keeps all.
        keep_checkpoints: Checkpoints kept on disk, the newest included; -1 keeps all.
        start_timeout_s: Deadline for the group to build its model; a run adds a second per 100 MB of the models.
        restarts: How often the ranks are started again in a run in which one of them died or hangs; they go on from the
            run's newest checkpoint. Without one, or with 0, the run ends.
        step_timeout_s: Deadline of one learner step, and of a collective between ranks. The controller gives the first
            step twice as long, since the step before it may still have the ranks; later steps get ten times the
            longest step so far, at least 120 s and at most that. Calls that save, load or publish always get twice.
        optimizer: AdamW and its schedule.
        lora: Adapters on the policy.
        critic: The critic, where the algorithm has one.
        reward_model: The reward model, where there is one.
    """

    num_ranks: int = 1
    sp_size: int = 1
    device: Device = Device.auto
    dtype: Dtype = Dtype.auto
    frozen_dtype: Dtype = Dtype.auto
    attention: AttentionKernel = AttentionKernel.auto
    max_tokens_per_micro_batch: int = 16384
    share_prompts: bool = True
    logprob_chunk_tokens: int = 1024
    activation_checkpointing: bool = False
    torch_compile: bool = False
    skip_selftest: str = ""
    fsdp_size: int = -1
    gradient_sync: GradientSync = GradientSync.update
    resharding: Resharding = Resharding.layer
    offload_policy: bool = False
    param_offload: bool = False
    optimizer_offload: bool = False
    offload_at_transition_only: bool = False
    keep_snapshots: int = 2
    keep_checkpoints: int = 2
    start_timeout_s: float = 300.0
    restarts: int = 1
    step_timeout_s: float = 600.0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)

    def __post_init__(self) -> None:
        _at_least(self, "learner", "num_ranks", 1)
        _at_least(self, "learner", "restarts", 0, remedy="; 0 ends the run where a rank dies")
        _require(
            self.sp_size >= 1 and self.num_ranks % self.sp_size == 0,
            f"learner.sp_size must divide learner.num_ranks, got sp_size={self.sp_size}, num_ranks={self.num_ranks}",
        )
        _require(
            self.fsdp_size == -1 or (self.fsdp_size >= 1 and self.num_ranks % self.fsdp_size == 0),
            f"learner.fsdp_size must be -1 or divide learner.num_ranks, got fsdp_size={self.fsdp_size}, "
            f"num_ranks={self.num_ranks}; -1 shards over all ranks",
        )
        for name in ("max_tokens_per_micro_batch", "logprob_chunk_tokens", "start_timeout_s", "step_timeout_s"):
            _require(getattr(self, name) > 0, f"learner.{name} must be > 0, got {getattr(self, name)}")
        for name in ("keep_checkpoints", "keep_snapshots"):
            kept = getattr(self, name)
            _require(kept == -1 or kept >= 1, f"learner.{name} must be -1 or >= 1, got {kept}")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _at_least(config: object, section: str, name: str, low: int, high: float = math.inf, remedy: str = "") -> None:
    """Require an option to be finite and within its bounds."""
    value, bounds = getattr(config, name), f">= {low}" if high == math.inf else f"in [{low}, {high}]"
    _require(low <= value <= high and value < math.inf, f"{section}.{name} must be {bounds}, got {value}{remedy}")
