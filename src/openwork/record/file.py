"""Record files: read and written whole."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from openwork.errors import RecordError
from openwork.files import read_text, write_text
from openwork.record.channels import ChannelPruneRecord, fill_channels, read_channels
from openwork.record.masks import SelectiveMaskRecord, fill_mask, read_mask
from openwork.record.quant import KVCacheFactors, QuantFactors, fill_factors, read_factors
from openwork.record.text import messages, parse_record, write_record

__all__ = ["Record", "dump_record", "load_record", "parse_record_text", "save_record"]

# About 30 million channel indices; far above the largest models.
LARGEST_RECORD = 1 << 30


@dataclass
class Record:
    """A ``ScaleOffsetRecord``.

    Attributes:
        channels: removed channels, group by group.
        masks: N:M masks, by layer.
        factors: quantisation factors, by layer.
        kv_cache: quantisation factors of key / value caches, by layer.
        source: the file it was read from, for messages.
    """

    channels: list[ChannelPruneRecord] = field(default_factory=list)
    masks: dict[str, SelectiveMaskRecord] = field(default_factory=dict)
    factors: dict[str, QuantFactors] = field(default_factory=dict)
    kv_cache: dict[str, KVCacheFactors] = field(default_factory=dict)
    source: str = field(default="record", compare=False)

    def __bool__(self) -> bool:
        """False for a record that says nothing."""
        return bool(self.channels or self.masks or self.factors or self.kv_cache)

    def add_mask(self, mask: SelectiveMaskRecord) -> None:
        """Add a mask, or replace that of its layer."""
        self.masks[mask.name] = mask


def load_record(path: str | os.PathLike[str]) -> Record:
    """Read a record file.

    Args:
        path: the file, protobuf text format, written by openwork or by AMCT.

    Raises:
        FileError: missing, a folder, unreadable, too large, or not UTF-8.
        RecordError: truncated, unknown fields, attributes missing or of the wrong type, positions negative,
            repeated or out of range, a mask of the wrong length; the message says where.
    """
    return parse_record_text(read_text(path, "record file", LARGEST_RECORD), os.fspath(path))


def parse_record_text(text: str, source: str = "record") -> Record:
    """Read a record from its text; see `load_record`."""
    proto = parse_record(text, source)
    record = Record(source=source)
    for index, item in enumerate(proto.prune_record):
        _read_pruned(record, item, f"{source}: prune_record[{index}]")
    for index, item in enumerate(proto.record):
        _read_layer(record, item, f"{source}: record[{index}]")
    return record


def _read_pruned(record: Record, item: Any, where: str) -> None:
    for node in (*item.producer, *item.consumer, *([item.selective_prune] * item.HasField("selective_prune"))):
        if not node.HasField("name"):
            raise RecordError(f"{where}: a node has no name; it is required")
    if not item.HasField("selective_prune"):
        record.channels.append(read_channels(item, where))
        return
    if item.producer or item.consumer:
        raise RecordError(f"{where}: selective_prune and producer or consumer are both given; one is allowed")
    mask = read_mask(item, where)
    if mask.name in record.masks:
        raise RecordError(f"{where}: layer {mask.name!r} has two masks")
    record.masks[mask.name] = mask


def _read_layer(record: Record, item: Any, where: str) -> None:
    if not item.key:
        raise RecordError(f"{where}: key is missing; it names the layer")
    where = f"{where} {item.key!r}"
    if item.key in record.factors or item.key in record.kv_cache:
        raise RecordError(f"{where}: the layer is given twice")
    if item.HasField("kv_cache_value"):
        cache = item.kv_cache_value
        try:
            record.kv_cache[item.key] = KVCacheFactors(list(cache.scale), list(cache.offset))  # type: ignore[arg-type]
        except RecordError as error:
            raise RecordError(f"{where}: {error}") from error
    if item.HasField("value") or not item.HasField("kv_cache_value"):
        record.factors[item.key] = read_factors(item.value, where)


def dump_record(record: Record) -> str:
    """The text of a record file; `parse_record_text` turns it back into an equal record."""
    proto = messages()["ScaleOffsetRecord"]()
    for key in dict.fromkeys((*record.factors, *record.kv_cache)):
        item = proto.record.add(key=key)
        if key in record.factors:
            item.value.SetInParent()
            fill_factors(item.value, record.factors[key])
        if key in record.kv_cache:
            item.kv_cache_value.SetInParent()
            item.kv_cache_value.scale.extend(record.kv_cache[key].scale.tolist())
            item.kv_cache_value.offset.extend(record.kv_cache[key].offset.tolist())
    for group in record.channels:
        fill_channels(proto.prune_record.add(), group)
    for mask in record.masks.values():
        fill_mask(proto.prune_record.add(), mask)
    return write_record(proto)


def save_record(record: Record, path: str | os.PathLike[str]) -> None:
    """Write a record file, whole or not at all.

    Raises:
        FileError: the file cannot be written.
    """
    write_text(path, dump_record(record))
