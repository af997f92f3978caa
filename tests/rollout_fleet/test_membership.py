"""Workers join and leave a fleet. Tests of the commands, of the roster, and of runs that do not answer."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from ray._private.authentication.authentication_token_setup import AUTH_MODE_ENV_VAR

from asyncrl.core.errors import MembershipRefused
from rollout_fleet import join
from rollout_fleet.membership import (
    ADDRESS_FILE,
    AUTH_MODE,
    Action,
    FleetAnswer,
    FleetDesk,
    FleetRequest,
    Presence,
    Roster,
    write_address,
)
from tests.support.ray_cluster import ENVIRONMENT


async def test_each_fleet_request_gets_its_own_answer_in_any_order():
    desk = FleetDesk()
    asked = [FleetRequest(action=Action.leave, member=member) for member in range(3)]
    waiting = [asyncio.create_task(desk.ask(request)) for request in asked]
    taken = [await desk.next_request() for _ in asked]
    assert [request for _, request in taken] == asked
    for number, request in reversed(taken):
        await desk.answer(number, FleetAnswer(words=f"rollout worker {request.member} has left"))
    assert [(await one).words for one in waiting] == [f"rollout worker {member} has left" for member in range(3)]


async def test_an_answer_to_a_cancelled_fleet_request_is_dropped():
    desk = FleetDesk()
    waiting = asyncio.create_task(desk.ask(FleetRequest(action=Action.describe)))
    number, _ = await desk.next_request()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await desk.answer(number, FleetAnswer(words="0: serves"))
    waiting = asyncio.create_task(desk.ask(FleetRequest(action=Action.describe)))
    number, _ = await desk.next_request()
    await desk.answer(number, FleetAnswer(words="0: drains"))
    assert (await waiting).words == "0: drains"


def test_the_commands_read_the_same_authentication_variable_as_ray():
    assert AUTH_MODE == AUTH_MODE_ENV_VAR


@pytest.mark.parametrize("command", [join.main, join.leave])
def test_the_error_for_a_run_that_does_not_answer_has_a_remedy(tmp_path, capsys, command):
    assert command(["--run", str(tmp_path)]) == 2
    assert f"--run {tmp_path} is not the folder of a run: there is no fleet.json; name a run" in capsys.readouterr().err
    (tmp_path / "config.yaml").touch()
    assert command(["--run", str(tmp_path)]) == 2
    assert "has a fleet of a fixed size" in capsys.readouterr().err
    write_address(tmp_path, address="127.0.0.1:1", node_address="127.0.0.1")
    assert json.loads((tmp_path / ADDRESS_FILE).read_text())["address"] == "127.0.0.1:1"
    assert (tmp_path / ADDRESS_FILE).stat().st_mode & 0o777 == 0o600, "only the owner may read Ray's token"
    assert command(["--run", str(tmp_path)]) == 2
    assert "this run has ended; to continue it, start a new run with checkpoint.resume=auto" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["127.0.0.1:1", "/no/such/folder"])
def test_an_address_without_a_ray_cluster_is_refused_immediately(capsys, address):
    assert join.main(["--run", address]) == 2
    assert f"--run {address} must be the folder of a run, or the address" in capsys.readouterr().err


CLUSTER = """
import asyncio, sys, ray
from rollout_fleet.membership import NAMESPACE, FleetDesk
own = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False, "log_to_driver": False}
ray.init(address="local", namespace=NAMESPACE, **own)
desk = ray.remote(FleetDesk).options(name="the run", num_cpus=0).remote()
asked = desk.next_request.remote()
print(ray.get_runtime_context().gcs_address, flush=True)
ray.get(asked)
print("asked", flush=True)
sys.stdin.read()
"""


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_command_reports_that_the_cluster_died_before_it_answered():
    piped = {"stdout": subprocess.PIPE, "text": True, "env": os.environ | ENVIRONMENT}
    with subprocess.Popen([sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, **piped) as cluster:
        family = []
        try:
            address = cluster.stdout.readline().strip()
            family = psutil.Process(cluster.pid).children(recursive=True)
            command = [sys.executable, "-m", "asyncrl", "join", "--run", address]
            with subprocess.Popen(command, stderr=subprocess.PIPE, **piped) as asking:
                assert cluster.stdout.readline() == "asked\n"
                next(one for one in family if one.name() == "gcs_server").send_signal(signal.SIGKILL)
                _, errors = asking.communicate(timeout=30)
        finally:
            cluster.kill()
            for process in family:
                if process.is_running():
                    process.kill()
    assert f"error: run {address} ended before it answered" in errors.splitlines(), errors  # Ray may write later lines
    assert asking.returncode == 2


FEWEST, MOST, NEEDED = 2, 5, 1
ranks = st.integers(0, 12)


class RosterMachine(RuleBasedStateMachine):
    """Calls the methods of a roster in any order: join, arrived, leave, gone. ``lives`` lists each rank given out."""

    def __init__(self):
        super().__init__()
        self.roster = Roster(fewest=FEWEST, most=MOST, needed=NEEDED)
        self.lives = list(range(FEWEST))

    @rule(number=st.integers(0, 4), kept=st.booleans())
    def join(self, number, kept):
        before, free = set(self.roster.ranks), self.roster.num_free
        try:
            given = self.roster.join(number, in_kept_places=kept)
        except MembershipRefused:
            assert number < 1 or number > free
            assert set(self.roster.ranks) == before
        else:
            assert len(given) == number
            assert not before & set(given), "no two members may have the same rank"
            assert kept or min(given) >= FEWEST
            self.lives += given

    @rule(rank=ranks)
    def arrived(self, rank):
        self.roster.arrived(rank)

    @rule(rank=ranks)
    def leave(self, rank):
        before = self.roster.presence_of(rank)
        others = [one for one in self.roster.ranks if one != rank and self.is_present(one)]
        try:
            self.roster.leave(rank)
        except MembershipRefused:
            assert before in (None, Presence.leaving) or (before is Presence.present and len(others) < NEEDED)
        else:
            assert before is Presence.coming or len(others) >= NEEDED
            assert self.roster.presence_of(rank) is Presence.leaving

    @rule(rank=ranks)
    def gone(self, rank):
        self.roster.gone(rank)

    def is_present(self, rank):
        return self.roster.presence_of(rank) is Presence.present

    @invariant()
    def the_fleet_is_never_larger_than_it_may_be(self):
        assert len(self.roster.ranks) + self.roster.num_free == MOST

    @invariant()
    def a_rank_beyond_the_kept_places_has_one_life(self):
        later = [rank for rank in self.lives if rank >= FEWEST]
        assert len(later) == len(set(later))


RosterMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_a_roster_keeps_its_promises_whoever_comes_and_goes_when = RosterMachine.TestCase


def test_a_join_reuses_a_free_reserved_rank_before_new_ranks():
    roster = Roster(fewest=2, most=4, needed=1)
    roster.leave(0)
    assert roster.num_free == 2
    roster.gone(0)
    assert roster.join(2) == [0, 2]
    roster.gone(2)
    assert roster.join(1) == [3]


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (
            lambda roster: roster.join(3),
            r"allows 3 engines, and 2 are present, coming or leaving; got a request for 3 more; add at most 1",
        ),
        (lambda roster: roster.join(0), "--num must be >= 1 engines, got 0"),
        (lambda roster: roster.leave(7), r"no rollout worker 7, only \[0, 1\]"),
        (lambda roster: (roster.leave(0), roster.leave(0)), "rollout worker 0 is leaving already"),
        (lambda roster: (roster.leave(0), roster.leave(1)), "rollout worker 1 must stay: 0 engines would be left"),
        (lambda _: Roster(fewest=2, most=None, needed=1).join(1), r"a fixed size; .*num_engines=\{min: 2, max: 4\}"),
        (lambda _: Roster(fewest=2, most=None, needed=1).leave(1), "engines can leave only an elastic fleet"),
    ],
)
def test_the_error_of_a_refused_join_or_leave_names_the_cause(ask, words):
    with pytest.raises(MembershipRefused, match=words):
        ask(Roster(fewest=2, most=3, needed=1))
