"""Finds the function or class that an option names: a registered name, ``file.py:function`` or ``module:function``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")
E = TypeVar("E")


class Registry(Generic[T]):
    """The functions or classes that one option can name. Example: the losses for ``algorithm.loss``.

    Attributes:
        entries: The registered functions or classes by name.
    """

    def __init__(self, option: str) -> None:
        self.option = option
        self.entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[E], E]:
        """Return a decorator that registers a function or class under ``name``.

        The decorator returns the function or class unchanged, or raises `ValueError` if the name is already registered.
        """

        def enter(entry: E) -> E:
            if name in self.entries:
                raise ValueError(f"{self.option}={name} is registered already; choose another name")
            self.entries[name] = cast(T, entry)
            return entry

        return enter

    def names(self) -> list[str]:
        """Return the registered names as a sorted list."""
        return sorted(self.entries)

    def get(self, name: str) -> T:
        """Return the function or class with this name. The method imports the file or module in the name, if any.

        Args:
            name: A registered name, ``file.py:name`` or ``module:name``. The text after the colon is a function of the
                module, or a name that the module registers.

        Raises:
            ValueError: there is no such name, file, module or function.
        """
        if name in self.entries:
            return self.entries[name]
        place, colon, attribute = name.rpartition(":")
        if not (place and colon and attribute):
            raise ValueError(
                f"{self.option} must be one of {self.names()}, or file.py:function or module:function of your own, "
                f"got {name!r}"
            )
        module = self._imported(place, name)
        found: Any = getattr(module, attribute, None) or self.entries.get(attribute)
        if found is None:
            known = sorted(known for known, value in vars(module).items() if callable(value) and known[0] != "_")
            raise ValueError(f"{self.option}={name}: {place} has no {attribute!r}, but has {known}; name one of them")
        if not callable(found):
            raise ValueError(f"{self.option}={name} must name a function, got {found!r}; name a function of {place}")
        return cast(T, found)

    def _imported(self, place: str, name: str) -> ModuleType:
        try:
            return _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        except FileNotFoundError as error:
            raise ValueError(f"{self.option}={name}: there is no file {error.filename}; check the path") from error
        except SyntaxError as error:
            raise ValueError(
                f"{self.option}={name}: {error.filename}, line {error.lineno}: {error.msg}; fix the file"
            ) from error
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}; fix the module, or name another one"
            raise ValueError(f"{self.option}={name} cannot be imported: {reason}") from error


def absolute_name(name: str) -> str:
    """If ``name`` is ``file.py:function``, return it with an absolute path; otherwise return it unchanged.

    So a process with another working directory can also use the name.
    """
    place, colon, attribute = name.rpartition(":")
    return f"{Path(place).expanduser().resolve()}:{attribute}" if colon and place.endswith(".py") else name


def _import_file(path: Path) -> ModuleType:
    """Import a file once per process. The file can import other files of its folder.

    The module has the name of the file. So if the file starts processes with `multiprocessing`, these processes can
    import the module too. If another module has this name, the function adds a hash of the path to the name.
    """
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name, spec = path.stem, None
    with suppress(ValueError):  # find_spec raises ValueError for a loaded module without a spec, such as __main__
        spec = importlib.util.find_spec(name) if "." not in name else None
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != path.resolve():
        name = f"{name}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
