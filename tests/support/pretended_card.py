"""Resolves the arguments of SGLang servers for each kind of GPU: ``python pretended_card.py < ARGUMENT_LISTS``.

The program reads a JSON list of argument lists. For each kind of GPU, it writes a JSON list of the resolved arguments.
It forks one process per kind. In this process, torch reports GPUs of the kind. Empty modules replace packages that are
compiled for GPUs.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import multiprocessing
import os
import sys
import types

CARDS = {"A100": ((8, 0), 80), "H100": ((9, 0), 80), "B200": ((10, 0), 180)}
"""Compute capability and GiB of memory."""
COMPILED = ("flashinfer", "sgl_kernel", "deep_gemm", "torch_memory_saver", "flash_attn")
VERSIONS = {"flashinfer_python": "0.6.18", "sglang-kernel": "0.4.7"}
"""The versions that SGLang 0.5.21 requires."""


class Absent:
    """Replaces a function or class of a compiled package. The code can import it, but a call raises an error."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *arguments, **options):
        raise NotImplementedError(f"{self._name} is not on this machine")


class StandIn(types.ModuleType):
    __path__ = ()
    __version__ = VERSIONS["flashinfer_python"]

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in COMPILED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


def let_compiled_packages_be_imported():
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: VERSIONS.get(name) or version(name)
    sys.meta_path.insert(0, Finder())


def pretend(card):
    """Patch torch so that it reports eight GPUs of the kind ``card``."""
    import torch

    capability, gib = CARDS[card]
    properties = types.SimpleNamespace(
        name=f"NVIDIA {card}",
        major=capability[0],
        minor=capability[1],
        total_memory=gib << 30,
        multi_processor_count=132,
    )
    torch.version.cuda = "13.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 8
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.get_device_name = lambda device=None: properties.name
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.mem_get_info = lambda device=None: (gib << 30, gib << 30)


def resolve(card, lists):
    """Return the arguments that SGLang would use on the GPU ``card``: a JSON list with one entry per argument list."""
    from sglang.srt.server_args import prepare_server_args

    pretend(card)
    results = [prepare_server_args(arguments) for arguments in lists]
    for resolved in results:
        resolved.resolve_once()
    return json.dumps([resolved.resolved_dict() for resolved in results], default=str)


if __name__ == "__main__":
    out = os.dup(1)
    os.dup2(2, 1)  # SGLang's output goes to stderr
    let_compiled_packages_be_imported()
    pretend("A100")  # the import of SGLang needs a GPU
    importlib.import_module("sglang.srt.server_args")
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        lists = json.load(sys.stdin)
        made = [pool.apply(resolve, (card, lists)) for card in CARDS]
    with open(out, "w") as stream:
        stream.write(json.dumps({card: json.loads(results) for card, results in zip(CARDS, made, strict=True)}))
