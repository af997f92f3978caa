"""What it costs the buffer that many engines wait whose weights are too old for any group to begin."""

from buffer import BufferConfig
from buffer.messages import Message
from buffer.service import BufferService


class CountedRequests:
    """A service without sockets; counts the leases that its ledger was asked for."""

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

    def ask(self, client: bytes, name: str, **fields) -> None:
        self.last_id += 1
        self.service.handle(client, Message(name=name, request_id=self.last_id, fields=fields))
        self.service.settle()

    def granted(self) -> dict[bytes, int]:
        answers = [(client, reply.fields["leases"]) for client, reply in self.replies if "leases" in reply.fields]
        return {client: len(leases) for client, leases in answers}


def put_fields(group_id: int) -> dict:
    numbers = dict.fromkeys(("attempt", "oldest_version", "newest_version", "num_truncated"), 0)
    lists = {"response_lengths": [3], "branch_tokens": [], "num_branches": [], "rewards": [1.0], "metrics": []}
    return {"group_id": group_id, "num_prompt_tokens": 1, "num_tokens": 3, **numbers, **lists}


def after_one_step(requests: CountedRequests) -> None:
    """The learner at version 1, prompts queued, nothing open."""
    requests.ask(b"controller", "enqueue", groups=list(range(16)), counts=[0] * 16)
    requests.ask(b"worker", "lease", engine_version=0, max_groups=2)
    for group_id in (0, 1):
        requests.ask(b"worker", "put", **put_fields(group_id))
    requests.ask(b"controller", "plan", version=0)
    requests.ask(b"controller", "commit", version=0)
    requests.replies.clear()


async def test_engines_whose_version_is_refused_cost_nothing_while_others_work():
    requests = CountedRequests(max_lag=1)
    after_one_step(requests)
    requests.ask(b"worker", "lease", engine_version=0, max_groups=2)  # all that version 1 can consume
    for number in range(100):
        requests.ask(b"old-%d" % number, "lease", engine_version=0, max_groups=1)
    requests.num_lease_commands = 0
    requests.ask(b"controller", "stats")
    assert requests.num_lease_commands == 0
    requests.ask(b"new", "lease", engine_version=1, max_groups=1)
    assert requests.num_lease_commands == 1
    assert requests.granted() == {b"worker": 2, b"new": 1}
    requests.service.close()


async def test_workers_of_both_versions_are_served_by_turn_as_far_as_each_is_admitted():
    requests = CountedRequests(max_lag=1)
    after_one_step(requests)
    for client, version in ((b"old", 0), (b"new", 1)):
        requests.last_id += 1
        fields = {"engine_version": version, "max_groups": 4}
        requests.service.handle(client, Message(name="lease", request_id=requests.last_id, fields=fields))
    requests.service.settle()
    # Four groups may be open: two of them due by version 1, which engines at version 0 may begin.
    assert requests.granted() == {b"old": 2, b"new": 2}
    requests.service.close()


async def test_a_commit_answers_who_is_too_old_for_any_group_unless_newer_weights_wake_it_anyway():
    requests = CountedRequests(max_lag=0)
    requests.ask(b"controller", "enqueue", groups=list(range(16)), counts=[0] * 16)
    requests.ask(b"worker", "lease", engine_version=0, max_groups=2)
    requests.ask(b"alone", "lease", engine_version=0, max_groups=1)
    requests.ask(b"follows", "lease", engine_version=0, max_groups=1)
    requests.ask(b"follows", "next_offer", at_least=1)
    for group_id in (0, 1):
        requests.ask(b"worker", "put", **put_fields(group_id))
    requests.ask(b"controller", "plan", version=0)
    requests.replies.clear()
    requests.ask(b"controller", "commit", version=0)
    assert requests.granted() == {b"alone": 0}
    requests.ask(b"follows", "lease", engine_version=1, max_groups=1)
    assert requests.granted() == {b"alone": 0, b"follows": 1}
