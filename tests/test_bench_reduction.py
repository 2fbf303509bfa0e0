"""What coarser scales cost, on models where the answer is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcal import bench
from tests import tiny
from tests.test_calibrate import plan_for, token_set

Kvcal = Callable[..., Any]
OPTIONS = ("--samples", "8", "--seq-len", "48", "--json")


def uneven(folder: Path, factor: float) -> Path:
    """A checkpoint in each of whose layers one head's V is wider by a factor, taken back behind attention."""
    model = tiny.build_model(head_dim=32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.view(2, 32, -1)[0] *= factor
            layer.self_attn.o_proj.weight.view(-1, 2, 3, 32)[:, 0] /= factor
    model.to(torch.bfloat16).save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    return folder


def kl(kvcal: Kvcal, folder: Path, rounded: str) -> dict[str, float]:
    """Mean KL by scales."""
    done = kvcal("bench", "reduction", "--model", folder, *OPTIONS)
    assert done.code == 0, done.stderr
    found = {row["scales"]: row["kl_mean"] for row in done.document if row["rounded"] == rounded}
    assert list(found) == ["per head", "per tensor", "one per layer", "scale 1.0"]
    return found


# 448 is 2^14.8 times the least normal number of E4M3 and an amax some 4 times the rms, so that a head may be
# a thousand times narrower than another and not miss a scale of its own.
@pytest.mark.parametrize("rounded", ["K, V", "K, V, Q"])
def test_each_coarser_scale_costs_more_where_one_head_dwarfs_the_others(
    rounded: str, kvcal: Kvcal, tmp_path: Path
) -> None:
    found = kl(kvcal, uneven(tmp_path / "model", 2.0**14), rounded)
    assert 3 * found["per head"] < found["per tensor"] < found["one per layer"] < found["scale 1.0"]


def test_a_head_100_times_wider_costs_the_others_nothing(kvcal: Kvcal, tmp_path: Path) -> None:
    found = kl(kvcal, uneven(tmp_path / "model", 100.0), "K, V")
    assert found["per tensor"] == pytest.approx(found["per head"], rel=0.03)
    assert found["one per layer"] == pytest.approx(found["per head"], rel=0.03)


def test_rounding_q_costs_too(kvcal: Kvcal, llama_folder: Path) -> None:
    done = kvcal("bench", "reduction", "--model", llama_folder, *OPTIONS)
    found = {(row["scales"], row["rounded"]): row["kl_mean"] for row in done.document}
    assert found["per head", "K, V, Q"] > found["per head", "K, V"] > 0


def test_text_that_sets_the_scales_does_not_judge_them(monkeypatch: pytest.MonkeyPatch) -> None:
    setting, judging, heard = set(), set(), []
    calibrate, fidelities = bench.calibrate.calibrate, bench.evaluate.fidelities

    def set_scales(model: Any, plan: Any, tokens: Any, **options: Any) -> Any:
        setting.update(tokens.samples)
        return calibrate(model, plan, tokens, **options)

    def judge(model: Any, variants: Any, batch_size: int, tokens: Any, **options: Any) -> Any:
        judging.update(tokens.samples)
        return fidelities(model, variants, batch_size, tokens, **options)

    monkeypatch.setattr(bench.calibrate, "calibrate", set_scales)
    monkeypatch.setattr(bench.evaluate, "fidelities", judge)
    model, tokens = tiny.build_model(), token_set([24, 24, 17, 9])
    bench.scale_reductions(model, plan_for(model, granularity="per_head"), tokens, heard.append)
    assert (len(setting), len(judging)) == (2, 2)
    assert setting | judging == set(tokens.samples)
    assert sum(heard) == pytest.approx(tokens.tokens)
