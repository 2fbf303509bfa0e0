from __future__ import annotations

import ml_dtypes
import pytest
import torch

from kvcal import formats
from kvcal.errors import UsageError
from kvcal.formats import KVFormat

every_format = pytest.mark.parametrize("fmt", formats.FORMATS, ids=lambda f: f.name)


@every_format
def test_constants_are_those_of_torch(fmt: KVFormat) -> None:
    info = torch.finfo(getattr(torch, fmt.storage_dtype))
    assert (fmt.max, fmt.min_normal, fmt.bits) == (info.max, info.smallest_normal, info.bits)


@every_format
def test_constants_are_those_of_ml_dtypes(fmt: KVFormat) -> None:
    info = ml_dtypes.finfo(getattr(ml_dtypes, fmt.storage_dtype))
    assert fmt.max == float(info.max)
    assert fmt.min_normal == float(info.smallest_normal)
    assert fmt.min_subnormal == float(info.smallest_subnormal)
    assert (fmt.exponent_bits, fmt.mantissa_bits) == (info.nexp, info.nmant)


@every_format
def test_no_code_decodes_beyond_max_or_below_the_smallest_subnormal(fmt: KVFormat) -> None:
    codes = torch.arange(2**fmt.bits).to(torch.uint8).view(getattr(torch, fmt.storage_dtype)).float()
    positive = codes[codes.isfinite() & (codes > 0)]
    assert (float(positive.max()), float(positive.min())) == (fmt.max, fmt.min_subnormal)


@every_format
def test_rounds_to_zero_is_the_last_magnitude_stored_as_zero(fmt: KVFormat) -> None:
    edge = torch.tensor([fmt.rounds_to_zero])
    beyond = edge.nextafter(torch.tensor([1.0]))
    dtype = getattr(torch, fmt.storage_dtype)
    assert float(edge.to(dtype).float()) == 0.0
    assert float(beyond.to(dtype).float()) == fmt.min_subnormal


@every_format
def test_every_name_leads_to_its_format(fmt: KVFormat) -> None:
    assert all(formats.get(name) is fmt for name in (fmt.name, *fmt.aliases))


def test_names_are_unique() -> None:
    assert len(set(formats.names())) == len(formats.names())


@pytest.mark.parametrize("name", ["", "FP8", "fp8_e5m2", "int8"])
def test_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError, match=rf"unknown format '{name}'; known: fp8_e4m3, fp8"):
        formats.get(name)
