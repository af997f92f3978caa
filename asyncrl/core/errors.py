"""The exceptions of asyncrl. Each exception has a single string as its argument, so that Ray can pickle it.

A user's mistake (a wrong option, a missing file) raises ``ValueError`` instead.
"""

import math
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

Arguments = ParamSpec("Arguments")


class AsyncRLError(Exception):
    """Base of all exceptions in this module."""


class WireError(AsyncRLError):
    """Bytes from the network or from disk are not a valid message."""


class StalenessError(AsyncRLError):
    """A training batch has tokens that are older than ``buffer.max_lag`` allows. The cause is a bug in the buffer."""


class AccountError(AsyncRLError):
    """Token counts contradict each other, a prompt group is missing, or a step trained on tokens outside its plan."""


class DeadlineError(AsyncRLError):
    """A configured deadline passed."""


class WorkerDiedError(AsyncRLError):
    """A process of the run died. The message ends with the last lines of the process's log."""


class LearnerDiedError(WorkerDiedError):
    """A training process died or hung, or a batch was lost and could not be planned again.

    Training can continue only from a checkpoint.
    """


class BatchLost(AsyncRLError):
    """Trajectories of a planned batch are lost. No rank has trained on the batch, so the step can be planned again."""


class ClusterDiedError(WorkerDiedError):
    """One of Ray's own processes died or did not start. Ray can therefore not stop the workers."""


class CheckpointError(AsyncRLError):
    """A checkpoint could not be written or read. A failed write leaves the previous checkpoint intact."""


class EngineError(AsyncRLError):
    """An inference engine refused a request or violated the engine protocol."""


class EngineLost(EngineError):
    """An inference engine has ended.

    If a rollout worker raises this error, the controller replaces the worker and its engine. If the controller itself
    raises this error, no worker is replaced.
    """


class MembershipRefused(AsyncRLError):
    """The run refused a request to add or remove an engine."""


class RequestRefused(EngineError):
    """Every engine would refuse this request, because the prompt or an option is wrong.

    Restarting the engine does not help.
    """


class EpisodeOverflow(AsyncRLError):
    """An episode has used its budget of turns, tokens or context."""


class EpisodeEnded(AsyncRLError):
    """An episode cannot start a turn: it has ended, or its rollout worker no longer generates the prompt group."""


class WeightsError(AsyncRLError):
    """Published weights are incomplete, or an engine's weights differ from the published weights."""


class WeightsGone(WeightsError):
    """The requested version of the weights was deleted, because newer versions exist. Request the newest version."""


class SamplerError(AsyncRLError):
    """A sampler of prompts raised an error, or chose a row that does not exist."""


class RewardError(AsyncRLError):
    """A reward function raised an exception, timed out, or did not return a number."""


class SandboxError(AsyncRLError):
    """This machine cannot isolate a program, or a sandbox failed.

    Errors of the isolated program do not raise this exception.
    """


class ReplayBufferError(AsyncRLError):
    """Base of the errors that the replay buffer returns to its clients."""


class StoreFull(ReplayBufferError):
    """The replay buffer has reached a limit on its bytes. The client may repeat the request later."""


class StoreLost(ReplayBufferError):
    """A store of the replay buffer has lost a group's trajectories. The worker must send the group again."""


class LeaseExpired(ReplayBufferError):
    """A worker sent trajectories of a group, but the worker's lease (the right to generate the group) has ended."""


class UnknownGroup(ReplayBufferError):
    """The prompt group does not exist, or its state does not allow the request."""


class VersionTooOld(ReplayBufferError):
    """A trajectory has a token whose policy version is older than the version of the group's lease."""


class VersionTooNew(ReplayBufferError):
    """An engine or a trajectory names a policy version that the learner has not produced yet."""


class NotLeaseOwner(ReplayBufferError):
    """A client stores a prompt group, or renews or returns the group's lease, but another client has this lease."""


class DeclaredDead(ReplayBufferError):
    """The buffer has declared this rollout worker dead and replaced it. The worker must exit."""


class WrongEpoch(ReplayBufferError):
    """The sender of the request belongs to another run, or to a learner that was replaced. The sender must exit."""


class NotAllowed(ReplayBufferError):
    """The client's key belongs to a role that is not allowed to send this request."""


class RateExceeded(ReplayBufferError):
    """A client of the buffer server sent more requests per second than the server allows each client."""


class UsageError(TypeError, ValueError, AssertionError):
    """A program used a worker group, a dispatch mode or a resource pool in an unsupported way.

    The class is also an AssertionError, because code written for verl may catch AssertionError.
    """


class BatchError(ValueError, AssertionError):
    """The columns of a `DataProto` do not fit together, or do not fit the arguments of the called function.

    Like `UsageError`, this class is also an AssertionError.
    """


def root_cause(error: BaseException) -> BaseException:
    """Return the exception that caused ``error``: unpack exception groups and Ray's wrappers.

    From an exception group, choose an `AsyncRLError` if there is one. Choose a missed deadline only if the group has no
    other exceptions.
    """
    if isinstance(error, BaseExceptionGroup):
        return min((root_cause(inner) for inner in error.exceptions), key=_rank)
    inside = getattr(error, "cause", None)  # a RayTaskError holds the worker's exception in ``cause``
    return root_cause(inside) if isinstance(inside, BaseException) else error


def _rank(cause: BaseException) -> int:
    if isinstance(cause, DeadlineError | TimeoutError):
        return 2
    return 0 if isinstance(cause, AsyncRLError) else 1


def with_exit_status(command: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """Decorate the main function of a command-line program: turn its exceptions into a message and an exit status.

    The status is 1 after an `AsyncRLError`. It is 2 after a user's mistake (`ValueError`), or if a file cannot be read
    or written (`OSError`). If there is no exception, the status is the result of the function.
    """

    @wraps(command)
    def main(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except (ValueError, OSError, AsyncRLError) as error:
            sys.stderr.write(f"error: {error}\n")
            return 1 if isinstance(error, AsyncRLError) else 2

    return main


def check_bounds(section: str, options: object, **bounds: str) -> None:
    """Check that numeric options are finite and respect their lower bounds. Raise `ValueError` for the first violation.

    Args:
        section: Prefix of the options' names in the message.
        options: Object that has the options as attributes.
        bounds: Maps the name of each option to a text with the option's bound: ``>= LOW`` or ``> LOW``, then
            optionally a unit and ``; REMEDY``.

    Example: ``check_bounds("checkpoint.", self, every_steps=">= 0; 0 saves no checkpoint")``.
    """
    for name, bound in bounds.items():
        value, (wanted, _, remedy) = getattr(options, name), bound.partition("; ")
        relation, low = wanted.split()[0], float(wanted.split()[1])
        if not (low <= value < math.inf if relation == ">=" else low < value < math.inf):
            finite = " and finite" if value == math.inf else ""
            raise ValueError(
                f"{section}{name} must be {wanted}{finite}, got {value}" + (f"; {remedy}" if remedy else "")
            )
