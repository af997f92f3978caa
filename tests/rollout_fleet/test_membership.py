"""The desk between the commands and a run, and what the commands say of runs that do not answer."""

import asyncio
import json

import pytest
from ray._private.authentication.authentication_token_setup import AUTH_MODE_ENV_VAR

from rollout_fleet import join
from rollout_fleet.membership import (
    ADDRESS_FILE,
    AUTH_MODE,
    Action,
    FleetAnswer,
    FleetDesk,
    FleetRequest,
    write_address,
)


async def test_each_request_gets_its_own_answer_in_whatever_order_they_come():
    desk = FleetDesk()
    asked = [FleetRequest(action=Action.leave, member=member) for member in range(3)]
    waiting = [asyncio.create_task(desk.ask(request)) for request in asked]
    taken = [await desk.next_request() for _ in asked]
    assert [request for _, request in taken] == asked
    for number, request in reversed(taken):
        await desk.answer(number, FleetAnswer(words=f"rollout worker {request.member} has left"))
    assert [(await one).words for one in waiting] == [f"rollout worker {member} has left" for member in range(3)]


async def test_an_answer_for_somebody_who_waits_no_more_is_dropped():
    desk = FleetDesk()
    waiting = asyncio.create_task(desk.ask(FleetRequest(action=Action.describe)))
    number, _ = await desk.next_request()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await desk.answer(number, FleetAnswer(words="0: serves"))


def test_the_commands_read_how_to_authenticate_where_ray_does():
    assert AUTH_MODE == AUTH_MODE_ENV_VAR


@pytest.mark.parametrize("command", [join.main, join.leave])
def test_a_run_that_does_not_answer_is_refused_by_name_with_a_remedy(tmp_path, capsys, command):
    assert command(["--run", str(tmp_path)]) == 2
    assert f"--run {tmp_path} is not the folder of a run: there is no fleet.json; name a run" in capsys.readouterr().err
    (tmp_path / "config.yaml").touch()
    assert command(["--run", str(tmp_path)]) == 2
    assert "has a fleet of a fixed size" in capsys.readouterr().err
    write_address(tmp_path, address="127.0.0.1:1", node_address="127.0.0.1")
    assert json.loads((tmp_path / ADDRESS_FILE).read_text())["address"] == "127.0.0.1:1"
    assert (tmp_path / ADDRESS_FILE).stat().st_mode & 0o777 == 0o600, "it holds Ray's token"
    assert command(["--run", str(tmp_path)]) == 2
    assert "this run has ended; start another, with checkpoint.resume=auto to continue it" in capsys.readouterr().err
