"""The buffer does no work for waiting engines whose weights are too old for any group."""

from asyncrl.core.types import GroupSummary
from buffer import BufferConfig, commands, operations
from buffer.encoding import Message
from buffer.records import Operation
from buffer.service import BufferService


class CountedRequests:
    """A buffer service without sockets. It counts how often the service requests leases from its ledger."""

    def __init__(self, *, max_lag: int) -> None:
        self.replies: list[tuple[bytes, Message]] = []
        self.service = BufferService(
            BufferConfig(max_lag=max_lag),
            groups_per_step=2,
            send=lambda client, reply: self.replies.append((client, reply)),
        )
        self.num_lease_commands = self.last_id = 0
        apply = self.service.ledger.apply

        def counted(command, *arguments, **options):
            self.num_lease_commands += type(command).__name__ == "LeaseGroups"
            return apply(command, *arguments, **options)

        self.service.ledger.apply = counted

    def ask(self, client: bytes, operation: Operation) -> None:
        self.hand_in(client, operation)
        self.service.settle()

    def hand_in(self, client: bytes, operation: Operation) -> None:
        self.last_id += 1
        self.service.handle(Message(client=client, request_id=self.last_id, body=operation))

    def granted(self) -> dict[bytes, int]:
        return {
            client: len(reply.body.leases) for client, reply in self.replies if isinstance(reply.body, commands.Leased)
        }


def put(group_id: int) -> commands.Put:
    numbers = dict.fromkeys(("attempt", "oldest_version", "newest_version"), 0)
    lists = {"response_lengths": (3,), "rewards": (1.0,)}
    return commands.Put(summary=GroupSummary(group_id=group_id, num_prompt_tokens=1, num_tokens=3, **numbers, **lists))


def after_one_step(requests: CountedRequests) -> None:
    """Make one learner step. The ledger is then at version 1, with queued prompts and no open groups."""
    requests.ask(b"controller", commands.Enqueue(tuple(range(16)), (0,) * 16))
    requests.ask(b"worker", commands.LeaseGroups(engine_version=0, max_groups=2))
    for group_id in (0, 1):
        requests.ask(b"worker", put(group_id))
    requests.ask(b"controller", commands.PlanBatch(0))
    requests.ask(b"controller", commands.Commit(0))
    requests.replies.clear()


async def test_waiting_engines_with_too_old_weights_cost_the_ledger_no_work():
    requests = CountedRequests(max_lag=1)
    after_one_step(requests)
    # the learner can consume only two groups of version 0, and this worker leases both
    requests.ask(b"worker", commands.LeaseGroups(engine_version=0, max_groups=2))
    for number in range(100):
        requests.ask(b"old-%d" % number, commands.LeaseGroups(engine_version=0, max_groups=1))
    requests.num_lease_commands = 0
    requests.ask(b"controller", operations.Stats())
    assert requests.num_lease_commands == 0
    requests.ask(b"new", commands.LeaseGroups(engine_version=1, max_groups=1))
    assert requests.num_lease_commands == 1
    assert requests.granted() == {b"worker": 2, b"new": 1}
    requests.service.close()


async def test_workers_of_an_old_and_a_new_version_share_the_groups_that_may_begin():
    requests = CountedRequests(max_lag=1)
    after_one_step(requests)
    for client, version in ((b"old", 0), (b"new", 1)):
        requests.hand_in(client, commands.LeaseGroups(engine_version=version, max_groups=4))
    requests.service.settle()
    # The rule permits four running groups, of which two may be due by version 1. So the old worker gets two leases.
    assert requests.granted() == {b"old": 2, b"new": 2}
    requests.service.close()


async def test_a_commit_does_not_answer_an_outdated_worker_that_also_waits_for_an_offer():
    requests = CountedRequests(max_lag=0)
    requests.ask(b"controller", commands.Enqueue(tuple(range(16)), (0,) * 16))
    requests.ask(b"worker", commands.LeaseGroups(engine_version=0, max_groups=2))
    requests.ask(b"alone", commands.LeaseGroups(engine_version=0, max_groups=1))
    requests.ask(b"follows", commands.LeaseGroups(engine_version=0, max_groups=1))
    requests.ask(b"follows", operations.NextOffer(1))
    for group_id in (0, 1):
        requests.ask(b"worker", put(group_id))
    requests.ask(b"controller", commands.PlanBatch(0))
    requests.replies.clear()
    requests.ask(b"controller", commands.Commit(0))
    assert [reply.body for client, reply in requests.replies if client == b"alone"] == [operations.NothingYet()]
    requests.ask(b"follows", commands.LeaseGroups(engine_version=1, max_groups=1))
    assert requests.granted() == {b"follows": 1}
