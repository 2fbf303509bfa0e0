"""What the page counts for models whose layers are not all alike; runs are made of what it reads of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from kvcal.page import serving
from tests import tiny


def run(family: str, layers: list[int]) -> Any:
    config = CONFIG_MAPPING[family](**tiny.fields(family)).to_dict()
    return SimpleNamespace(
        config=config | {"model_type": family, "architectures": ["A"]},
        report={"layers": [{"index": index} for index in layers]},
        skipped=(),
        records=SimpleNamespace(plan={"format": "fp8_e4m3"}),
    )


TOKEN = 2 * 2 * 16  # elements of K and V


@pytest.mark.parametrize(
    ("family", "layers", "plain", "stored"),
    [
        # Windows of 24 tokens in three pages, and a full layer; the other two layers share their caches.
        ("gemma3n_text", [0, 1, 2, 3], 2 * TOKEN * (48 + 208), TOKEN * (48 + 208)),
        # One layer attends; two keep 3 inputs of 192 + 2 * 8 channels and 12 * 16 * 8 numbers in 16 bits.
        (
            "granitemoehybrid",
            [1],
            2 * TOKEN * 208 + 2 * 2 * (3 * 208 + 1536),
            TOKEN * 208 + 2 * 2 * (3 * 208 + 1536),
        ),
    ],
)
def test_shared_caches_count_once_and_states_at_any_length(
    family: str, layers: list[int], plain: int, stored: int
) -> None:
    found = run(family, layers)
    kept = serving._kept(found)
    assert serving.request_bytes(found, kept, 200, quantized=False) == plain
    assert serving.request_bytes(found, kept, 200) == stored
