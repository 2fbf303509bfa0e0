from __future__ import annotations

import ml_dtypes
import pytest
import torch

from kvcal import formats
from kvcal.errors import UsageError
from kvcal.formats import KVFormat

every_format = pytest.mark.parametrize("fmt", formats.FORMATS, ids=lambda f: f.name)
every_float = pytest.mark.parametrize(
    "fmt", [f for f in formats.FORMATS if not f.integer], ids=lambda f: f.name
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
        assert fmt.max == info.max
    else:
        assert info.bits % fmt.bits == 0
        assert info.min == 0  # packed codes have no sign of their own
        assert fmt.max == 2**fmt.bits - 1


@every_integer
def test_integer_codes_spend_all_their_bits(fmt: KVFormat) -> None:
    signed = torch.iinfo(getattr(torch, fmt.storage_dtype)).min < 0
    assert fmt.bits == fmt.mantissa_bits + signed


@every_format
def test_the_static_scale_costs_nothing_and_the_dynamic_one_a_number_per_vector(fmt: KVFormat) -> None:
    info = torch.finfo(getattr(torch, fmt.scale_dtype))
    assert fmt.scale_bits == (info.bits if fmt.dynamic else 0)


def test_integers_need_a_scale_of_their_own_and_only_dynamic_vectors_are_rotated() -> None:
    assert all(f.dynamic for f in formats.FORMATS if f.integer or f.rotated)


@every_format
def test_every_name_leads_to_its_format(fmt: KVFormat) -> None:
    assert all(formats.get(name) is fmt for name in (fmt.name, *fmt.aliases))


def test_names_are_unique() -> None:
    assert len(set(formats.names())) == len(formats.names())


@pytest.mark.parametrize("name", ["", "FP8", "fp8_e5m2", "int8"])
def test_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError, match=rf"unknown format '{name}'; known: (.*)$") as refused:
        formats.get(name)
    assert str(refused.value).split("known: ")[1].split(", ") == formats.names()
