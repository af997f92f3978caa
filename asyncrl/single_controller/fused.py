"""Fused workers: one Ray actor holds an instance of several worker classes, and one group per class calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import ray

from asyncrl.protocol.errors import UsageError

from .calls import FUSED_METHOD_SEPARATOR
from .dispatch import MAGIC_ATTR, Dispatch, materialize_async
from .placement import RayClassWithInitArgs, unwrap
from .worker import Worker

FusedWorkerCLSName = "FusedWorker"


def create_colocated_worker_cls(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """One worker class out of several; method ``m`` of role ``r`` becomes its method ``r_m``.

    `RayWorkerGroup.spawn` makes a group for each role out of a group of this class.

    Args:
        class_dict: Role to class and arguments. Example: ``{"actor": ..., "critic": ...}``.

    Raises:
        UsageError: the dict is empty, or two roles have a direct rollout method of the same name.
    """
    raw = _host_class("WorkerDict", class_dict)
    for role, member in class_dict.items():
        _take_over_methods(raw, role, unwrap(member.cls))
    return RayClassWithInitArgs(ray.remote(raw))


def create_colocated_worker_raw_cls(class_dict: dict[str, RayClassWithInitArgs]) -> type[Worker]:
    """A class that holds one instance of each role in an attribute of that name; use it directly or subclass it.

    A subclass may have methods that use several roles. Set ``fused_worker_used = True`` on its
    `RayClassWithInitArgs`, and call ``fuse`` on its group to reach the roles.

    Args:
        class_dict: Role to class and arguments.
    """
    raw: Any = _host_class("_".join([FusedWorkerCLSName, *class_dict]), class_dict)
    raw.is_fused_worker = True
    raw.raw_cls_dict = {role: unwrap(member.cls) for role, member in class_dict.items()}
    raw._fuw_execute = _route_async if any(map(_has_coroutine, raw.raw_cls_dict.values())) else _route
    return raw


def create_colocated_worker_cls_fused(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """As `create_colocated_worker_cls`, with methods looked up by role when they are called."""
    fused = RayClassWithInitArgs(ray.remote(create_colocated_worker_raw_cls(class_dict)))
    fused.fused_worker_used = True
    return fused


def _host_class(name: str, class_dict: dict[str, RayClassWithInitArgs]) -> type[Worker]:
    """A worker class whose instances make one instance of each role and tell each about the others."""
    if not class_dict:
        raise UsageError("class_dict must name at least one role and its class, got none")
    members = [(role, unwrap(member.cls), member.args, member.kwargs) for role, member in class_dict.items()]

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        Worker.__init__(self, *args, **kwargs)
        # verl's names, which subclasses read.
        self.cls_names = [role for role, *_ in members]
        self.init_args_dict = {role: init_args for role, _, init_args, _ in members}
        self.init_kwargs_dict = {role: init_kwargs for role, _, _, init_kwargs in members}
        for role, cls, init_args, init_kwargs in members:
            self.fused_worker_dict[role] = cls(*init_args, **init_kwargs)
            setattr(self, role, self.fused_worker_dict[role])
        for worker in self.fused_worker_dict.values():
            setattr(worker, Worker.fused_worker_attr_name, self.fused_worker_dict)

    return type(name, (Worker,), {"__init__": __init__, "__module__": __name__})


def _take_over_methods(host: type[Worker], role: str, cls: type) -> None:
    """Give the host each method that the role's class registered, under the role's name."""
    for method_name in dir(cls):
        method = getattr(cls, method_name, None)
        attrs = getattr(method, MAGIC_ATTR, None)
        if attrs is None:
            continue
        forward = _forward(role, method_name, inspect.iscoroutinefunction(method))
        setattr(forward, MAGIC_ATTR, {**attrs, "role": role, "method_name": method_name})
        is_direct = attrs["dispatch_mode"] is Dispatch.DIRECT_ROLLOUT_METHOD and "rollout" in role
        if is_direct and hasattr(host, method_name):
            raise UsageError(f"two roles have a direct rollout method {method_name!r}; rename one of them")
        setattr(host, method_name if is_direct else f"{role}_{method_name}", forward)


def _forward(role: str, method_name: str, is_coroutine: bool) -> Callable[..., Any]:
    """A method of the host that calls the role's."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.fused_worker_dict[role], method_name)(*args, **kwargs)

    async def call_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self.fused_worker_dict[role], method_name)(*args, **kwargs)

    return call_async if is_coroutine else call


def _route(self: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
    """Call ``role_fwmn_method`` on the role's worker."""
    role, _, name = method_name.partition(FUSED_METHOD_SEPARATOR)
    worker = self.fused_worker_dict.get(role)
    if worker is None:
        raise UsageError(f"there is no role {role!r} in this worker, only {list(self.fused_worker_dict)}")
    return getattr(worker, name)(*args, **kwargs)


async def _route_async(self: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
    """As `_route`, for hosts with coroutines; futures are fetched here so that no method blocks the event loop."""
    role, _, name = method_name.partition(FUSED_METHOD_SEPARATOR)
    attrs = getattr(getattr(self.raw_cls_dict.get(role), name, None), MAGIC_ATTR, {})
    if attrs.get("materialize_futures"):
        args, kwargs = await materialize_async(args, kwargs)
    result = _route(self, method_name, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def _has_coroutine(cls: type) -> bool:
    return any(inspect.iscoroutinefunction(getattr(cls, name, None)) for name in dir(cls))
