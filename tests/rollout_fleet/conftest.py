"""What the fleet's tests share: a tiny model, and a replay buffer in memory with the admission rule of the real one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from asyncrl.protocol.errors import LeaseExpired
from asyncrl.protocol.trajectory import TrajectoryGroup
from asyncrl.protocol.types import Lease, Prompt

VOCABULARY = ["<pad>", "<eos>", "<bos>", *"0123456789", *">+=- r"]
EOS_ID = VOCABULARY.index("<eos>")


class InMemoryBuffer:
    """Implements `RolloutBuffer`; tests commit steps and revoke leases by hand."""

    def __init__(self, prompts: Sequence[Prompt], *, groups_per_step: int = 1000, max_lag: int = 0) -> None:
        self.queue = deque(prompts)
        self.groups_per_step = groups_per_step
        self.max_lag = max_lag
        self.learner_version = 0
        self.outstanding = 0
        self.held: dict[tuple[int, int], Lease] = {}
        self.attempts: dict[int, int] = {}
        self.groups: list[TrajectoryGroup] = []
        self.released: list[tuple[int, int, str]] = []
        self.tokens_dropped = 0
        self.progress: dict[int, TrajectoryGroup] = {}
        self.renewals = 0
        self.leases_asked: list[tuple[int, int]] = []
        self.closed = False
        self._changed = asyncio.Event()
        self._revocations: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self._stored = asyncio.Event()

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def commit(self) -> None:
        """The learner consumes a batch: it is one version further."""
        self.learner_version += 1
        self.outstanding -= self.groups_per_step
        self.notify()

    def revoke(self, group_id: int) -> None:
        attempt = self.attempts[group_id]
        del self.held[group_id, attempt]
        self._revocations.put_nowait((group_id, attempt))

    def _admits(self, version: int) -> bool:
        slack = (self.max_lag + 1 - (self.learner_version - version)) * self.groups_per_step
        return bool(self.queue) and self.outstanding < slack

    async def lease(self, engine_version: int, max_groups: int) -> list[Lease]:
        self.leases_asked.append((engine_version, max_groups))
        while not self._admits(engine_version):
            await self._changed.wait()
        leases = []
        while len(leases) < max_groups and self._admits(engine_version):
            prompt = self.queue.popleft()
            attempt = self.attempts[prompt.group_id] = self.attempts.get(prompt.group_id, -1) + 1
            deadline = engine_version + self.max_lag
            lease = Lease(prompt=prompt, attempt=attempt, engine_version=engine_version, deadline_version=deadline)
            self.held[prompt.group_id, attempt] = lease
            self.outstanding += 1
            leases.append(lease)
        return leases

    async def renew(self, leases: Sequence[Lease]) -> None:
        self.renewals += len(leases)

    async def put(self, group: TrajectoryGroup) -> None:
        await asyncio.sleep(0)
        if self.held.pop((group.group_id, group.attempt), None) is None:
            self.tokens_dropped += group.summary.num_tokens
            raise LeaseExpired(f"group {group.group_id} attempt {group.attempt} is no longer held")
        self.groups.append(group)
        self._stored.set()
        self._stored = asyncio.Event()

    async def release(self, lease: Lease, *, num_tokens: int, reason: str) -> None:
        self.released.append((lease.prompt.group_id, num_tokens, reason))
        self.tokens_dropped += num_tokens
        self.outstanding -= 1
        self.held.pop((lease.prompt.group_id, lease.attempt), None)
        self.queue.append(lease.prompt)

    def take_progress(self, lease: Lease) -> TrajectoryGroup | None:
        return self.progress.pop(lease.prompt.group_id, None)

    async def save_progress(self, lease: Lease, group: TrajectoryGroup) -> None:
        await asyncio.sleep(0)
        if (lease.prompt.group_id, lease.attempt) not in self.held:
            raise LeaseExpired(f"group {lease.prompt.group_id} attempt {lease.attempt} is no longer held")
        self.progress[lease.prompt.group_id] = group

    async def revocation(self) -> tuple[int, int]:
        return await self._revocations.get()

    async def close(self) -> None:
        self.closed = True

    async def stored(self, num_groups: int) -> None:
        """Wait until this many groups are stored."""
        async with asyncio.timeout(20):
            while len(self.groups) < num_groups:
                await self._stored.wait()

    @property
    def num_tokens(self) -> int:
        return sum(group.summary.num_tokens for group in self.groups)


def make_prompts(num_prompts: int) -> list[Prompt]:
    """Prompts of different lengths: digits and ``>``; the ground truth is the last digit."""
    prompts = []
    for index in range(num_prompts):
        digits = [(index + position) % 10 for position in range(3 + index % 4)]
        ids = np.asarray([VOCABULARY.index(str(digit)) for digit in digits], dtype=np.int32)
        prompts.append(Prompt(group_id=index, prompt_ids=ids, ground_truth=str(digits[-1]), data_source="last_digit"))
    return prompts


@pytest.fixture(name="make_prompts")
def make_prompts_fixture():
    return make_prompts


@pytest.fixture
def make_buffer():
    """Return a maker of `InMemoryBuffer` with this many prompts."""

    def make(num_prompts: int = 8, **options: int) -> InMemoryBuffer:
        return InMemoryBuffer(make_prompts(num_prompts), **options)

    return make


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen3 of 75k parameters with a character tokenizer."""
    return write_model(tmp_path_factory.mktemp("model"), seed=0)


def write_model(directory: Path, *, seed: int) -> str:
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    characters = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    ).save_pretrained(directory)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=EOS_ID,
        bos_token_id=2,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return str(directory)
