"""Record files in AMCT's format: what was removed, masked or quantised, and the whole prune plan."""

from __future__ import annotations

from openwork.record.attributes import AttributeValue, get_attribute, set_attribute
from openwork.record.channels import ChannelPruneRecord, PruneNode
from openwork.record.file import Record, dump_record, load_record, parse_record_text, save_record
from openwork.record.masks import SelectiveMaskRecord, pack_mask, unpack_mask
from openwork.record.plan import LayerKind, PlanCut, PlanGroup, PlanRepair, decode_plan, encode_plan
from openwork.record.quant import KVCacheFactors, QuantFactors

__all__ = [
    "AttributeValue",
    "ChannelPruneRecord",
    "KVCacheFactors",
    "LayerKind",
    "PlanCut",
    "PlanGroup",
    "PlanRepair",
    "PruneNode",
    "QuantFactors",
    "Record",
    "SelectiveMaskRecord",
    "decode_plan",
    "dump_record",
    "encode_plan",
    "get_attribute",
    "load_record",
    "pack_mask",
    "parse_record_text",
    "save_record",
    "set_attribute",
    "unpack_mask",
]
