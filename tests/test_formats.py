from __future__ import annotations

import ml_dtypes
import pytest
import torch

from kvcal import formats
from kvcal.errors import UsageError
from kvcal.formats import KVFormat

every_format = pytest.mark.parametrize("fmt", formats.FORMATS, ids=lambda f: f.name)
every_float = pytest.mark.parametrize(
    "fmt", [f for f in formats.FORMATS if not f.integer and not f.block], ids=lambda f: f.name
)
every_block_format = pytest.mark.parametrize(
    "fmt", [f for f in formats.FORMATS if f.block], ids=lambda f: f.name
)
every_integer = pytest.mark.parametrize(
    "fmt", [f for f in formats.FORMATS if f.integer], ids=lambda f: f.name
)


@every_float
def test_constants_are_those_of_torch(fmt: KVFormat) -> None:
    info = torch.finfo(getattr(torch, fmt.storage_dtype))
    assert (fmt.max, fmt.min_normal, fmt.bits) == (info.max, info.smallest_normal, info.bits)


@every_float
def test_constants_are_those_of_ml_dtypes(fmt: KVFormat) -> None:
    info = ml_dtypes.finfo(getattr(ml_dtypes, fmt.storage_dtype))
    assert fmt.max == float(info.max)
    assert fmt.min_normal == float(info.smallest_normal)
    assert fmt.min_subnormal == float(info.smallest_subnormal)
    assert (fmt.exponent_bits, fmt.mantissa_bits) == (info.nexp, info.nmant)


@every_block_format
def test_elements_of_a_block_are_e2m1_of_ml_dtypes(fmt: KVFormat) -> None:
    info = ml_dtypes.finfo(ml_dtypes.float4_e2m1fn)
    assert (fmt.max, fmt.min_normal) == (float(info.max), float(info.smallest_normal))
    assert fmt.min_subnormal == float(info.smallest_subnormal)
    assert (fmt.bits, fmt.exponent_bits, fmt.mantissa_bits) == (info.bits, info.nexp, info.nmant)
    assert torch.finfo(getattr(torch, fmt.block_scale_dtype)).bits == 8
    assert fmt.bits_per_element == {"nvfp4": 4.5, "mxfp4": 4.25}[fmt.name]


@every_format
def test_blocks_have_scales_and_nothing_else_has(fmt: KVFormat) -> None:
    assert bool(fmt.block) == bool(fmt.block_scale_dtype)
    assert (fmt.bits_per_element == fmt.bits) == (fmt.block == 0)
    assert not (fmt.block and (fmt.dynamic or fmt.integer))


@every_float
def test_no_code_decodes_beyond_max_or_below_the_smallest_subnormal(fmt: KVFormat) -> None:
    codes = torch.arange(2**fmt.bits).to(torch.uint8).view(getattr(torch, fmt.storage_dtype)).float()
    positive = codes[codes.isfinite() & (codes > 0)]
    assert (float(positive.max()), float(positive.min())) == (fmt.max, fmt.min_subnormal)


@every_float
def test_rounds_to_zero_is_the_last_magnitude_stored_as_zero(fmt: KVFormat) -> None:
    edge = torch.tensor([fmt.rounds_to_zero])
    beyond = edge.nextafter(torch.tensor([1.0]))
    dtype = getattr(torch, fmt.storage_dtype)
    assert float(edge.to(dtype).float()) == 0.0
    assert float(beyond.to(dtype).float()) == fmt.min_subnormal


@every_integer
def test_integers_are_one_apart(fmt: KVFormat) -> None:
    assert (fmt.min_normal, fmt.min_subnormal, fmt.rounds_to_zero) == (1.0, 1.0, 0.5)
    assert fmt.exponent_bits == 0
    assert fmt.max == 2**fmt.mantissa_bits - 1


@every_integer
def test_integers_of_a_whole_storage_element_are_those_of_torch(fmt: KVFormat) -> None:
    info = torch.iinfo(getattr(torch, fmt.storage_dtype))
    if fmt.bits == info.bits:
        assert (fmt.max, -fmt.max - 1) == (info.max, info.min)
    else:
        assert info.min == 0  # packed codes have no sign of their own
        assert info.bits == 8


@every_integer
def test_integer_codes_spend_all_their_bits(fmt: KVFormat) -> None:
    codes = 2**fmt.bits
    assert fmt.max == (codes - 1 if fmt.rotated else codes // 2 - 1)
    assert fmt.bits == fmt.mantissa_bits + (not fmt.rotated)


@every_format
def test_the_static_scale_costs_nothing_and_the_dynamic_one_a_number_per_vector(fmt: KVFormat) -> None:
    info = torch.finfo(getattr(torch, fmt.scale_dtype))
    assert fmt.scale_bits == (info.bits if fmt.dynamic else 0)


def test_only_dynamic_vectors_are_rotated() -> None:
    assert all(f.dynamic for f in formats.FORMATS if f.rotated)


def test_the_formats_and_their_order() -> None:
    dynamic = ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"]
    integers = [f"int{bits}" for bits in (8, 6, 5, 4, 3, 2)]
    assert [f.name for f in formats.FORMATS] == [
        "fp8_e4m3",
        *dynamic,
        "fp8_e5m2",
        *integers,
        "nvfp4",
        "mxfp4",
        "fp8_latent_bf16_rope",
    ]
    assert formats.names()[len(formats.FORMATS) :] == ["fp8"]
    assert [f.name for f in formats.FORMATS if f.dynamic] == dynamic


@every_format
def test_every_name_leads_to_its_format(fmt: KVFormat) -> None:
    assert all(formats.get(name) is fmt for name in (fmt.name, *fmt.aliases))


def test_names_are_unique() -> None:
    assert len(set(formats.names())) == len(formats.names())


@pytest.mark.parametrize("name", ["", "FP8", "e5m2", "int7", "INT8"])
def test_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError, match=rf"unknown format '{name}'; known: (.*)$") as refused:
        formats.get(name)
    assert str(refused.value).split("known: ")[1].split(", ") == formats.names()
