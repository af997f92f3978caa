"""Names for algorithms: ours by a short name, a user's own by ``file.py:function`` or ``module:function``.

Imports no torch: a name is checked, in the source that it points to, before anything heavy is loaded or started.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

if TYPE_CHECKING:
    from .advantages import AdvantageEstimator
    from .losses import PolicyLoss

T = TypeVar("T")
E = TypeVar("E")


class Registry(Generic[T]):
    """Named implementations of one kind.

    Args:
        option: The option that names an entry, for messages. Example: ``algorithm.loss``.
        homes: Modules that register ours; imported when an entry is first asked for.
    """

    def __init__(self, option: str, *, homes: Sequence[str]) -> None:
        self._option = option
        self._homes = homes
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[E], E]:
        """Decorator that enters an implementation under a name."""

        def enter(entry: E) -> E:
            if name in self._entries:
                raise ValueError(f"{self._option}={name} is registered already; choose another name")
            self._entries[name] = cast(T, entry)
            return entry

        return enter

    def names(self) -> list[str]:
        """Registered names, sorted."""
        for home in self._homes:
            importlib.import_module(home)
        return sorted(self._entries)

    def get(self, name: str) -> T:
        """Look an implementation up.

        Args:
            name: A registered name, or ``file.py:name`` or ``module:name`` of a function, or of a name that the
                module registers.

        Raises:
            ValueError: there is no such name, file, module or function.
        """
        if name in self.names():
            return self._entries[name]
        self.check(name)
        place, _, attribute = name.rpartition(":")
        try:
            module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        except Exception as error:
            raise ValueError(f"{self._option}={name} cannot be imported: {type(error).__name__}: {error}") from error
        found: Any = getattr(module, attribute, None) or self._entries.get(attribute)
        if not callable(found):
            raise ValueError(f"{self._option}={name} must name a function, got {found!r}; name another one in {place}")
        return cast(T, found)

    def check(self, name: str) -> None:
        """Check by reading source, without running any, that `get` will find a name.

        Raises:
            ValueError: it will not; the message says what there is.
        """
        place, colon, attribute = name.rpartition(":")
        if not colon:
            known = sorted(name for home in self._homes for name in _registered(_parsed(_source_of(home), home)))
            if name not in known:
                raise ValueError(
                    f"{self._option} must be one of {known}, or file.py:function or module:function of your own, "
                    f"got {name!r}"
                )
            return
        source = Path(place) if place.endswith(".py") else _source_of(place)
        if source is None or not source.is_file():
            hint = f"there is no file {source}" if source else f"module {place!r} is not on the path {sys.path[:3]}…"
            raise ValueError(f"{self._option}={name}: {hint}; name a file (file.py:function) or a module")
        if source.suffix != ".py":
            return  # compiled: only its import can tell
        tree = _parsed(source, f"{self._option}={name}")
        names = {*_defined(tree), *_registered(tree)}
        if attribute not in names and not names & {"*", "__getattr__"}:
            known = sorted(name for name in names if not name.startswith("_"))
            raise ValueError(f"{self._option}={name}: {source} has no {attribute!r}, only {known}; name one of them")


def absolute_name(name: str) -> str:
    """The name with its file's whole path, for processes that run elsewhere; other names as they are."""
    place, colon, attribute = name.rpartition(":")
    return f"{Path(place).expanduser().resolve()}:{attribute}" if colon and place.endswith(".py") else name


def _import_file(path: Path) -> ModuleType:
    """Import a file once a process, under a name of its own; files beside it can be imported by it."""
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _source_of(module: str) -> Path | None:
    """The file of a module, not imported (its parent packages are); None where there is none."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def _parsed(source: Path | None, what: str) -> ast.Module:
    assert source is not None, what
    try:
        return ast.parse(source.read_text(), filename=str(source))
    except SyntaxError as error:
        raise ValueError(f"{what}: {source}, line {error.lineno}: {error.msg}; mend the file") from error


def _defined(tree: ast.Module) -> Iterator[str]:
    """Names that a module binds at its top level, ``*`` for those of a star import."""
    for node in _top_level(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))


def _registered(tree: ast.Module) -> Iterator[str]:
    """Names that a module enters with ``SOMETHING.register("name")``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "register":
            yield from (str(value.value) for value in node.args if isinstance(value, ast.Constant))


def _top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run at import, those under ``if``, ``try`` and ``with`` included."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for child in ast.iter_child_nodes(node):
                inner = child.body if isinstance(child, ast.ExceptHandler) else [child]
                yield from _top_level([statement for statement in inner if isinstance(statement, ast.stmt)])


ADVANTAGES: Registry[AdvantageEstimator] = Registry(
    "algorithm.advantage", homes=("learner.advantages", "learner.token_advantages")
)
LOSSES: Registry[PolicyLoss] = Registry("algorithm.loss", homes=("learner.losses",))
