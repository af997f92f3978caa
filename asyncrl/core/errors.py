"""The exception tree. Each error carries a single message, so that it survives pickling through Ray.

A user's mistake (a wrong option, a missing file) is a ``ValueError`` raised where the value is read; the errors here
occur while a run is going.
"""


class AsyncRLError(Exception):
    """Base of every run-time error of the system."""


class WireError(AsyncRLError):
    """Bytes from the network or from disk are not a message of this protocol."""


class StalenessError(AsyncRLError):
    """A batch would break the staleness bound. This never happens unless the ledger is wrong."""


class AccountError(AsyncRLError):
    """Tokens or prompt groups are not all accounted for."""


class DeadlineError(AsyncRLError):
    """A configured deadline passed; the message names what was awaited, and for how long."""


class WorkerDiedError(AsyncRLError):
    """A process of the run died; the message names it and ends with the last lines of its log."""


class LearnerDiedError(WorkerDiedError):
    """A learner rank died, hangs, or lost its batch: the group can go on from a checkpoint, and not otherwise."""


class BatchLost(AsyncRLError):
    """Trajectories of a planned batch are gone, and no rank has made its step: the batch can be planned anew."""


class ClusterDiedError(WorkerDiedError):
    """One of Ray's own processes died, or did not come up; nothing can be stopped through Ray any more."""


class CheckpointError(AsyncRLError):
    """A checkpoint could not be written (the one before it is intact), or could not be read."""


class EngineError(AsyncRLError):
    """An inference engine refused a request or broke its contract."""


class EngineLost(EngineError):
    """An engine has failed for good: it was replaced as often as the options allow."""


class MembershipRefused(AsyncRLError):
    """The run does not let an engine join, or leave; the message says why, and what to do."""


class RequestRefused(EngineError):
    """A request that every engine would refuse: the prompt or an option is wrong, and no restart mends it."""


class WeightsError(AsyncRLError):
    """Published weights are missing bytes, or an engine holds other weights than were published."""


class WeightsGone(WeightsError):
    """An offered version was removed, since newer ones took its place; ask for the newest."""


class RewardError(AsyncRLError):
    """A reward function raised, hung, or did not return a number."""


class ReplayBufferError(AsyncRLError):
    """Base of what the replay buffer answers instead of a result."""


class StoreFull(ReplayBufferError):
    """The store's byte bound is reached; the sender waits and sends again."""


class StoreLost(ReplayBufferError):
    """The store that took a group's payload does not hold it any more; the sender sends it again."""


class LeaseExpired(ReplayBufferError):
    """A put, renewal or release came under a lease that is no longer held."""


class UnknownGroup(ReplayBufferError):
    """No such group, or not in the state that the request needs."""


class VersionTooOld(ReplayBufferError):
    """A trajectory holds a token older than the version its lease was granted at."""


class VersionTooNew(ReplayBufferError):
    """An engine or a trajectory names a policy version that no learner step has made."""


class NotLeaseOwner(ReplayBufferError):
    """A put, renewal or release came from another client than the one that holds the lease."""


class DeclaredDead(ReplayBufferError):
    """A message of a rollout worker that was replaced because it seemed dead; it must end."""


class WrongEpoch(ReplayBufferError):
    """A message belongs to another run than the replay buffer's, or to a learner that was replaced: its sender ends."""


class NotAllowed(ReplayBufferError):
    """The key of a client's role does not allow what it asks for."""


class RateExceeded(ReplayBufferError):
    """A client sends more requests per second than the server accepts from one client."""


class UsageError(TypeError, ValueError, AssertionError):
    """A call, a dispatch mode or a pool of the single controller is used in a way that it does not support.

    It is an AssertionError too, so that code written against verl, which raises that, catches it.
    """


class BatchError(ValueError, AssertionError):
    """The parts of a `DataProto` do not fit together, or not the request; an AssertionError as `UsageError` is."""
