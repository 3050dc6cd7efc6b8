"""Devices and number formats of models. Importing them does not import the engine."""

from typing import Literal, TypeAlias, get_args

Device: TypeAlias = Literal["auto", "cpu", "metal"]
ComputeMode: TypeAlias = Literal["int8", "w8a8", "int16", "bf16", "f32"]
Compute: TypeAlias = Literal["auto", ComputeMode]
KVDtype: TypeAlias = Literal["f16", "f32", "q8_0"]

AUTO: Literal["auto"] = "auto"
DEVICES: tuple[Device, ...] = get_args(Device)
COMPUTE: tuple[Compute, ...] = get_args(Compute)
KV_DTYPES: tuple[KVDtype, ...] = get_args(KVDtype)
