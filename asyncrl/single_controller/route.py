"""How a call of a method reaches a worker: directly, through the host it shares a process with, or with futures."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import ray

from .chaining import detach_references, holds_future
from .decorator import MAGIC_ATTR

FUSED_METHOD_SEPARATOR = "_fwmn_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The way of one method's calls.

    Attributes:
        remote_name: The actor's method that is called.
        role_method: What tells a host whose method is meant; None where the worker is called itself.
        is_worker: Whether the actor's class is a `Worker`, which can be given references and told to be silent.
        is_coroutine: Whether the call is a coroutine, which fetches futures itself, without blocking others.
        takes_results: Whether the method wants the results of futures, rather than the futures.
    """

    remote_name: str
    role_method: str | None = None
    is_worker: bool = False
    is_coroutine: bool = False
    takes_results: bool = False

    @classmethod
    def of(cls, actor_class: Any, method_name: str, role: str) -> Route:
        """The way to a method of a class, or of a role of a fused class; ``role`` is empty where there are none."""
        owner = actor_class.raw_cls_dict[role] if role else actor_class
        method = getattr(owner, method_name, None)
        remote_name = "_fuw_execute" if role else method_name
        return cls(
            remote_name=remote_name,
            role_method=f"{role}{FUSED_METHOD_SEPARATOR}{method_name}" if role else None,
            is_worker=hasattr(actor_class, "_call_chained"),
            is_coroutine=inspect.iscoroutinefunction(getattr(actor_class, remote_name, None)),
            takes_results=bool(getattr(method, MAGIC_ATTR, {}).get("materialize_futures")),
        )

    def call(
        self, worker: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_silent: bool = False
    ) -> ray.ObjectRef:
        """Call one worker; a silent one answers nothing but its errors."""
        name = self.remote_name
        if self.role_method is not None:
            args = (self.role_method, *args)
        if self.is_worker and not self.is_coroutine:
            if self.takes_results and holds_future(args, kwargs):
                (blank_args, blank_kwargs), references = detach_references(args, kwargs)
                args, kwargs, name = (name, blank_args, blank_kwargs, *references), {}, "_call_chained"
            if is_silent:
                args, name = (name, *args), "_call_silently"
        return getattr(worker, name).remote(*args, **kwargs)
