"""Layer by layer is bit-equal to the whole model, and never holds more than one layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcal import arch, calibrate, layerwise, models, sources
from kvcal.calibrate import View
from kvcal.layerwise import Layerwise
from kvcal.statistics import Statistics
from tests import tiny
from tests.test_calibrate import MIXED, token_set

CPU = torch.device("cpu")


def both(folder: Path) -> tuple[Any, Layerwise, arch.ModelSpec]:
    spec = arch.read(sources.read_config(folder))
    whole = models.load(folder, spec, CPU, models.TRUST_NOTHING)
    return whole, layerwise.load(folder, spec, CPU, models.TRUST_NOTHING), spec


def require_equal(found: Statistics, expected: Statistics) -> None:
    assert found.layers.keys() == expected.layers.keys()
    for index, sides in expected.layers.items():
        for side, seen in sides.items():
            for name, value in seen.tensors().items():
                assert torch.equal(found.layers[index][side].tensors()[name], value), (index, side, name)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_statistics_are_those_of_the_whole_model_bit_for_bit(family: str, tmp_path: Path) -> None:
    """Padded batches too: masks, positions and their kinds are the model's own."""
    whole, streamed, spec = both(tiny.save(tmp_path / "model", family))
    wanted = (View(), View(before_rope=True, skip=3))
    plain, found = (
        calibrate.views(model, spec.layers, 3, token_set(MIXED), wanted, collect="distribution")
        for model in (whole, streamed)
    )
    for view in wanted:
        require_equal(found[view], plain[view])
