"""Requests for a checkpoint, sent to a running training."""

import asyncio

import pytest

from asyncrl.cli.checkpoint_command import main
from asyncrl.core.errors import AsyncRLError, CheckpointError, DeadlineError
from asyncrl.run.run_folder import shared_folder
from asyncrl.run.run_socket import answered_requests, ask_for_checkpoint


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "config.yaml").touch()
    yield tmp_path
    shared_folder(tmp_path).rmdir()


async def ask(run_dir, timeout_s=10.0):
    return await asyncio.to_thread(ask_for_checkpoint, run_dir, timeout_s=timeout_s)


async def test_the_command_prints_the_folder_of_the_requested_checkpoint(run_dir, capsys):
    async def checkpoint():
        return run_dir / "checkpoints" / "v00000007"

    async with answered_requests(run_dir, checkpoint=checkpoint):
        assert await asyncio.to_thread(main, [str(run_dir)]) == 0
    assert capsys.readouterr().out == f"{run_dir}/checkpoints/v00000007\n"


async def test_a_failed_or_late_checkpoint_is_an_error_with_its_reason(run_dir):
    async def fails():
        raise CheckpointError("no space left on device")

    withdrawn = asyncio.Event()

    async def waits():
        try:
            await asyncio.sleep(3600)
        finally:
            withdrawn.set()

    async with answered_requests(run_dir, checkpoint=fails):
        with pytest.raises(AsyncRLError, match="no space left on device"):
            await ask(run_dir)
    async with answered_requests(run_dir, checkpoint=waits):
        with pytest.raises(DeadlineError, match=r"within --timeout-s=0\.1 s"):
            await ask(run_dir, timeout_s=0.1)
        await asyncio.wait_for(withdrawn.wait(), 10)
        withdrawn.clear()
        asking = asyncio.create_task(ask(run_dir))
        await asyncio.sleep(0.1)
    with pytest.raises(AsyncRLError, match="the training ended"):
        await asking


def test_a_folder_without_a_training_is_refused_by_name(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "it has no config.yaml" in capsys.readouterr().err
    (tmp_path / "config.yaml").touch()
    assert main([str(tmp_path)]) == 2
    assert f"no training of {tmp_path} runs on this host" in capsys.readouterr().err
