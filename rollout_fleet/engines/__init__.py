"""The inference engines, and the function that makes the configured engine."""

from __future__ import annotations

import importlib.util
import logging
import pkgutil

from asyncrl.core.host import visible_gpus
from asyncrl.core.image_files import is_vision_model
from rollout_fleet.config import EngineDevice, EngineKind, RolloutFleetConfig

from .engine import Engine

logger = logging.getLogger(__name__)


def make_engine(config: RolloutFleetConfig, *, model_path: str, rank: int, log_dir: str, seed: int) -> Engine:
    """Make the inference engine of the rollout worker with number ``rank``. Call `Engine.start` next.

    The engine samples with the seed ``seed + rank``. If the engine is a server, its log goes to the folder ``log_dir``.

    Raises `ValueError` if SGLang is configured but not installed, or if ``model_path`` has no model in Hugging Face
    layout.
    """
    if config.engine is EngineKind.scripted:
        from .scripted import ScriptedEngine

        return ScriptedEngine(pkgutil.resolve_name(config.script))
    device = resolve_device(config)
    if config.engine is EngineKind.transformers:
        from .transformers import TransformersEngine

        return TransformersEngine(config, model_path=model_path, device=device, rank=rank, seed=seed + rank)
    check_engine_installed(config)
    check_images(config, model_path)
    from .sglang import SGLangEngine

    return SGLangEngine(config, model_path=model_path, device=device, rank=rank, log_dir=log_dir, seed=seed + rank)


def check_engine_installed(config: RolloutFleetConfig) -> None:
    """Raise `ValueError` if the configured engine is SGLang and the package ``sglang`` is not installed."""
    if config.engine is EngineKind.sglang and importlib.util.find_spec("sglang") is None:
        raise ValueError(
            "rollout_fleet.engine is sglang, but SGLang is not installed in this environment; install it "
            "(pip install 'asyncrl[sglang]'), or generate in process with rollout_fleet.engine=transformers"
        )


def check_images(config: RolloutFleetConfig, model_path: str) -> None:
    """Raise `ValueError` if the model takes images and the engine is SGLang on a CPU.

    SGLang 0.5.21 did not answer requests with images on a CPU.
    """
    if config.engine is EngineKind.sglang and is_vision_model(model_path) and resolve_device(config) != "cuda":
        raise ValueError(
            f"rollout_fleet.engine is sglang on a CPU, where SGLang 0.5.21 did not answer requests with images, and "
            f"the model {model_path!r} takes images; set rollout_fleet.engine=transformers, or use a GPU"
        )


def resolve_device(config: RolloutFleetConfig) -> EngineDevice:
    """Return the device that an engine in this process computes on, ``cpu`` or ``cuda``.

    ``rollout_fleet.device=auto`` becomes ``cuda`` if this process sees as many GPUs as one engine needs.
    """
    if config.device is not EngineDevice.auto:
        return config.device
    num_gpus = config.sglang.tp_size if config.engine is EngineKind.sglang else 1
    num_visible = visible_gpus()
    if 0 < num_visible < num_gpus:
        logger.warning(
            "rollout_fleet.device: auto is cpu, because rollout_fleet.sglang.tp_size=%d needs as many GPUs and %d is "
            "visible",
            num_gpus,
            num_visible,
        )
    return EngineDevice.cuda if num_visible >= num_gpus else EngineDevice.cpu
