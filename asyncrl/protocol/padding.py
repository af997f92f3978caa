"""Padding a `DataProto` so that its rows can be split evenly, and taking the padding off again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from .errors import BatchError

if TYPE_CHECKING:
    from .data_proto import DataProto

_log = logging.getLogger(__name__)

# Dispatch functions put the rows they added under this key of the keyword arguments; the call takes them off again.
_padding_size_key = "_padding_size_key_x123d"


class _CheckedSwitches(type):
    """Refuses a switch that is not a bool when it is set, not when a batch is split."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "auto_padding" and not isinstance(value, bool):
            raise BatchError(f"DataProtoConfig.auto_padding must be a bool, got {value!r}")
        super().__setattr__(name, value)


class DataProtoConfig(metaclass=_CheckedSwitches):
    """Switches of all batches of this process.

    Attributes:
        auto_padding: Whether dispatch pads any batch that cannot be split evenly.
        auto_padding_key: Entry of ``meta_info`` that asks for it for one batch; verl's, as scripts set it by name.
    """

    auto_padding: bool = False
    auto_padding_key: str = "_verl_auto_padding"


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append rows from the beginning of the batch, over and over, until ``size_divisor`` divides their number.

    Returns:
        The padded batch, which is ``data`` itself where nothing is to be done, and the number of rows appended. An
        empty batch stays as it is.

    Raises:
        BatchError: ``data`` is no `DataProto`, or ``size_divisor`` is not positive.
    """
    if not hasattr(data, "select_idxs") or size_divisor < 1:
        raise BatchError(f"a DataProto and a divisor >= 1 are needed, got {type(data).__name__} and {size_divisor}")
    pad_size = -len(data) % size_divisor
    if len(data) == 0:
        _log.warning("an empty DataProto cannot be padded to a multiple of %d; it stays empty", size_divisor)
    if pad_size == 0:
        return data, 0
    rows = [index % len(data) for index in range(len(data) + pad_size)]
    return data.select_idxs(rows), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """The batch without its last ``pad_size`` rows."""
    return data[:-pad_size] if pad_size else data
