"""A run that resumes begins with the valid groups, prompts and prefixes of a checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.core.errors import ReplayBufferError
from buffer import Durability
from tests.support.buffer_groups import AnyRole, prompt, rollout, running

B = 2
MAX_LAG = 2
KINDS = {
    "memory": {},
    "disk": {"durability": Durability.disk},
    "memory-store": {"num_store_servers": 1},
    "disk-store": {"durability": Durability.disk, "num_store_servers": 1},
}


def options_of(kind: str, directory: Path, **more: Any) -> dict[str, Any]:
    options = {"max_lag": MAX_LAG, "groups_per_step": B, **KINDS[kind], **more}
    return options | ({"directory": str(directory)} if "durability" in options else {})


async def first_life(client: AnyRole, folder: Path) -> None:
    """Train step 0, and write the checkpoint of version 1.

    As in a run, the checkpoint is written after the plan of step 0 and before its commit. Step 0 consumes groups 0, 1.
    Groups 2 and 3 are stored. Group 4 has a saved prefix of 4 tokens. Group 5 is leased. Groups 6 to 9 are queued.
    """
    await client.enqueue([prompt(i) for i in range(10)])
    leases = await client.lease(0, 6)
    for lease in leases[:4]:
        await client.put(rollout(lease, num_tokens=5 + 40_000 * (lease.prompt.group_id == 3)))
    await client.save_progress(leases[4], rollout(leases[4], num_tokens=4))
    await client.release(leases[4], num_tokens=4, reason="stopped")
    plan = await client.plan(0)
    assert [group.group_id for group in plan.groups] == [0, 1]
    written = await client.checkpoint(folder, 1, key="one")
    assert (written.num_groups, written.num_prefixes) == (4, 1)
    assert written.num_bytes > 4 * 40_000
    assert await client.checkpoint(folder, 1, key="one") == written, "a repeated request must give the same answer"
    await client.commit(0)


async def begin_life(client: AnyRole, *, tokens_generated: int) -> None:
    for version in range((await client.stats()).learner_version, 1):
        await client.commit(version)
    for _ in range(2):  # the second request repeats the first one
        await client.resume(1, key="one", tokens_generated=tokens_generated)


REPORTED = 3 * 5 + 40_005 + 4


@pytest.mark.parametrize("kind", KINDS)
async def test_a_resumed_run_continues_with_the_groups_prompts_and_prefixes_of_its_checkpoint(
    kind: str, tmp_path: Path
):
    folder = tmp_path / "checkpoints" / "v00000001"
    async with running(**options_of(kind, tmp_path / "first")) as run:
        await first_life(run.client(), folder)
    assert [path.name for path in folder.parent.iterdir()] == ["v00000001"]
    async with running(**options_of(kind, tmp_path / "second", checkpoint=str(folder))) as run:
        client = run.client()
        await begin_life(client, tokens_generated=REPORTED + 7)
        stats = await client.stats()
        assert (stats.learner_version, stats.tokens_trained, stats.tokens_buffered) == (1, 10, 5 + 40_005 + 4)
        assert stats.tokens_dropped == {"resume": 7}, "only the tokens of the unreported attempt are lost"
        assert stats.lag_histogram == {0: 2}
        assert {state: stats.groups[state] for state in ("queued", "leased", "stored")} == {
            "queued": 6,
            "leased": 0,
            "stored": 2,
        }
        assert await client.finished() == [(0, 2)]
        await client.enqueue([prompt(i) for i in range(12)])
        plan = await client.plan(1)
        assert [group.group_id for group in plan.groups] == [2, 3]
        two, three = await client.fetch([2, 3])
        assert (two.summary.num_tokens, three.summary.num_tokens) == (5, 40_005)
        np.testing.assert_array_equal(two.trajectories()[0].turns[1].token_ids, [2, 3])
        await client.commit(1)
        leases = await client.lease(2, 4)
        assert [lease.prompt.group_id for lease in leases] == [5, 4, 6, 7]
        assert [lease.attempt for lease in leases] == [1, 1, 0, 0]
        assert client.take_progress(leases[1]).summary.num_tokens == 4
        for lease in leases[:2]:
            await client.put(rollout(lease))
        assert len(await client.fetch([5, 4])) == 2


@pytest.mark.parametrize("kind", ["disk", "disk-store"])
async def test_a_resumed_run_takes_over_a_newer_journal_without_groups_of_lost_versions(kind: str, tmp_path: Path):
    options = options_of(kind, tmp_path / "buffer", epoch="first")
    async with running(**options) as run:
        client = run.client()
        await first_life(client, tmp_path / "v00000001")
        await client.plan(1)
        await client.commit(1)
        old, new = (await client.lease(1, 1))[0], (await client.lease(2, 1))[0]
        assert client.take_progress(old) is not None
        await client.put(rollout(old, version=1))
        await client.put(rollout(new, version=2))
    options = options_of(kind, tmp_path / "buffer", epoch="second", earlier_epoch="first")
    async with running(**options) as run:
        client = run.client()
        await begin_life(client, tokens_generated=REPORTED)
        stats = await client.stats()
        assert (stats.learner_version, stats.tokens_trained) == (1, 10)
        lost = {"rewound": 5 + 40_005 + 5}
        assert stats.tokens_dropped == lost, "batch 1 and the group of version 2 are lost"
        assert stats.groups["stored"] == 1
        assert await client.finished() == [(0, 2)]
    async with running(**{**options, "earlier_epoch": "first"}) as run:
        assert (await run.client().stats()).tokens_dropped == lost, "the resumed run must restart from its own journal"
    with pytest.raises(ValueError, match="epoch='second', but this server has 'third'"):
        running(**options_of(kind, tmp_path / "buffer", epoch="third", earlier_epoch="first"))


@pytest.mark.parametrize(("kind", "file"), [("memory", "journal.1.frames"), ("disk-store", "journal.1.log")])
async def test_a_checkpoint_whose_prompts_are_lost_is_refused(kind: str, file: str, tmp_path: Path):
    folder = tmp_path / "v00000001"
    async with running(**options_of(kind, tmp_path / "first")) as run:
        await first_life(run.client(), folder)
    frames = folder / file
    content = bytearray(frames.read_bytes())
    content[100] ^= 1
    frames.unlink()  # make a new file, because the old one can be a hard link to a file of the journal
    frames.write_bytes(content)
    with pytest.raises(ReplayBufferError, match=r"v00000001/journal lacks the prompts of \d+ unfinished groups"):
        running(**options_of(kind, tmp_path / "second", checkpoint=str(folder)))


async def test_errors_of_checkpoints_name_the_wrong_version_folder_or_option(tmp_path: Path):
    async with running(**options_of("memory", tmp_path)) as run:
        client = run.client()
        await client.enqueue([prompt(0)])
        with pytest.raises(ReplayBufferError, match=r"checkpoint\(1\) was requested at learner version 0"):
            await client.checkpoint(tmp_path / "v00000001", 1, key="one")
        (tmp_path / "file").touch()
        with pytest.raises(ReplayBufferError, match=r"the checkpoint .*/file/v00000000 cannot be written"):
            await client.checkpoint(tmp_path / "file" / "v00000000", 0, key="zero")
        await client.checkpoint(tmp_path / "v00000000", 0, key="again")
        with pytest.raises(ReplayBufferError, match="have different checkpoints of version"):
            await client.resume(0, key="other", tokens_generated=0)
    with pytest.raises(ReplayBufferError, match="v00000007/journal holds no complete log"):
        running(**options_of("memory", tmp_path, checkpoint=str(tmp_path / "v00000007")))
    for number, words in (
        (1, "is_elsewhere=False, but this buffer has True"),
        (2, "num_stores=1, but this buffer has 2"),
    ):
        with pytest.raises(ValueError, match=words):
            running(**options_of("memory", tmp_path, checkpoint=str(tmp_path / "v00000000"), num_store_servers=number))


async def test_a_checkpoint_on_the_disk_of_the_journal_has_hard_links_to_its_files(tmp_path: Path):
    folder = tmp_path / "v00000001"
    async with running(**options_of("disk", tmp_path / "buffer")) as run:
        await first_life(run.client(), folder)
        journal = {path.stat().st_ino for path in (tmp_path / "buffer").iterdir()}
    shared = [path for path in folder.iterdir() if path.stat().st_ino in journal]
    assert sorted(path.name for path in shared) == ["journal.1.frames", "journal.1.log"]
