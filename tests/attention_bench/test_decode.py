"""``kvcal bench attention`` without a GPU: what it refuses, what it checks, and what it reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from kvcal.attention_bench import decode, peers, report
from kvcal.errors import UsageError
from kvcal.kernels import paged_reference
from kvcal.kernels.paged import Segment

Kvcal = Callable[..., Any]

PEAK = 4e12
SHAPE = decode.Shape(2, 4, 2, 64, 64)
cuda_is_away = pytest.mark.skipif(torch.cuda.is_available(), reason="refuses only where no GPU is")


def entry(name: str, ours: bool, times: list[float], **fields: Any) -> decode._Entry:
    return decode._Entry(name, ours, 400_000_000, times=times, **{"error": 1e-3, **fields})


@pytest.fixture
def found() -> decode.Measurement:
    """bf16 in 200 µs, int8 twice as fast, one wrong row, one peer missing."""
    bf16 = [200e-6, 220e-6, 210e-6]
    entries = [
        entry("bf16", True, bf16),
        entry("int8", True, [t / 2 for t in bf16]),
        entry("int4", True, [1e-6] * 3, error=0.5, failure="wrong: relative error 5.0e-01, limit 1e-02"),
        entry("FlashInfer bf16", False, [], error=None, failure="ModuleNotFoundError: No module named 'x'"),
    ]
    environment = {"card": "Some GPU", "driver": None, "repeats": 3}
    return decode.Measurement(environment, PEAK, decode.rows_of(str(SHAPE), entries, PEAK))


def printed(found: decode.Measurement) -> str:
    console = Console(width=80, file=StringIO())
    report.show(console, found)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@cuda_is_away
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_without_a_gpu_it_refuses(kvcal: Kvcal, more: tuple[str, ...]) -> None:
    done = kvcal("bench", "attention", *more)
    assert done.code == 2
    assert "bench attention measures a GPU" in done.stderr


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ("1,2,3", "give BATCH,HEADS,KV_HEADS,LENGTH,HEAD_DIM"),
        ("a,4,2,64,64", "give BATCH,HEADS,KV_HEADS,LENGTH,HEAD_DIM"),
        ("0,4,2,64,64", "positive"),
        ("1,4,3,64,64", "multiple of KV heads"),
        ("1,34,2,64,64", "at most 16 heads share"),
        ("1,4,2,64,65", "heads of 64"),
        ("1,4,2,65,64", "whole pages of 16"),
    ],
)
def test_bad_shapes_are_refused(kvcal: Kvcal, shape: str, reason: str) -> None:
    done = kvcal("bench", "attention", "--shape", shape)
    assert done.code == 2
    assert shape in done.stderr
    assert reason in done.stderr


def test_an_unknown_format_is_refused(kvcal: Kvcal) -> None:
    done = kvcal("bench", "attention", "--format", "int3")
    assert done.code == 2
    assert "'int3'" in done.stderr
    assert "int4" in done.stderr


def test_bf16_is_always_measured() -> None:
    assert {case.fmt for case in decode.cases_named(["int4"])} == {None, "int4"}


def test_a_shape_that_does_not_fit_is_refused() -> None:
    decode.require_room(SHAPE, decode.CASES, peers.PEERS, free=10**10, l2_bytes=10**6)
    with pytest.raises(UsageError, match="of GPU memory, and 1.0 GB are free"):
        decode.require_room(SHAPE, decode.CASES, peers.PEERS, free=10**9, l2_bytes=10**6)


def test_caches_pass_l2_five_times_and_are_never_one() -> None:
    assert decode._copies(10, l2_bytes=20) == 10
    assert decode._copies(10**6, l2_bytes=20) == 2


def test_rates_and_ratios(found: decode.Measurement) -> None:
    bf16, int8 = found.rows[:2]
    assert bf16.microseconds == pytest.approx(210)
    assert bf16.terabytes_per_second == pytest.approx(400e6 / 210e-6 / 1e12)
    assert bf16.percent_of_peak == pytest.approx(100 * 400e6 / 210e-6 / PEAK)
    assert int8.speed_of_bf16 == pytest.approx(2)
    assert int8.low is not None
    assert int8.low <= 105 <= (int8.high or 0)


def test_ratios_are_of_the_same_round() -> None:
    """A clock that drops in the middle of the run slows both."""
    entries = [entry("bf16", True, [2.0, 20.0, 20.0]), entry("int8", True, [1.0, 1.0, 10.0])]
    assert decode.rows_of("s", entries, PEAK)[1].speed_of_bf16 == 2.0


def test_nothing_is_compared_with_a_wrong_bf16() -> None:
    entries = [entry("bf16", True, [1.0, 1.0], failure="wrong"), entry("int8", True, [1.0, 1.0])]
    assert decode.rows_of("s", entries, PEAK)[1].speed_of_bf16 is None


def test_a_wrong_row_has_no_speed_anywhere(found: decode.Measurement, tmp_path: Path) -> None:
    report.write(found, tmp_path)
    row = json.loads((tmp_path / "attention.json").read_text())["rows"][2]
    assert row["name"] == "int4"
    assert row["error"] == 0.5
    speeds = ("microseconds", "low", "high", "terabytes_per_second", "percent_of_peak", "speed_of_bf16")
    assert {row[key] for key in speeds} == {None}
    line = next(x for x in (tmp_path / "attention.md").read_text().splitlines() if "int4" in x)
    assert "wrong: relative error" in line
    assert line.replace(" ", "").endswith("||||||")
    line = next(x for x in printed(found).splitlines() if "int4" in x)
    assert "wrong: relative error" in line
    assert "│" not in line
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_peer_is_named_with_the_reason(found: decode.Measurement, tmp_path: Path) -> None:
    report.write(found, tmp_path)
    texts = [(tmp_path / "attention.md").read_text(), (tmp_path / "attention.json").read_text()]
    for text in (*texts, printed(found)):
        assert "FlashInfer bf16" in text
        assert "No module named 'x'" in text


def test_the_table_fits_80_columns(found: decode.Measurement) -> None:
    assert max(map(len, printed(found).splitlines())) <= 80


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_output_of_nan_fails_and_json_takes_it(value: float) -> None:
    right = torch.ones(1, dtype=torch.float64)
    checked = decode._checked(decode._Entry("int8", True, 1), torch.full((1,), value), right, decode.LIMIT)
    assert checked.failure is not None
    assert checked.error is None
    json.dumps(decode.Measurement({}, 1.0, decode.rows_of("s", [checked], 1.0)).document, allow_nan=False)


@pytest.mark.parametrize(("off", "fails"), [(0.009, False), (0.011, True)])
def test_the_limit_of_the_check(off: float, fails: bool) -> None:
    right = torch.ones(4, dtype=torch.float64)
    checked = decode._checked(decode._Entry("int8", True, 1), right + off, right, decode.LIMIT)
    assert checked.error == pytest.approx(off)
    assert (checked.failure is not None) == fails


@pytest.mark.parametrize("case", decode.CASES, ids=lambda case: case.name)
def test_the_check_would_see_a_kernel_that_ignores_k_or_drops_keys(case: decode.Case) -> None:
    """Caches whose logits are all equal, or whose V has a common part, would hide either."""
    torch.manual_seed(0)
    shape = decode.Shape(1, 4, 1, 4096, 64)
    pages = shape.length // peers.PAGE
    k, v = (decode._random_pages(case, shape, pages, "cpu") for _ in range(2))
    segment = Segment(k, v, torch.randperm(pages, dtype=torch.int32).view(1, -1))
    q = torch.randn(1, 4, 1, 64)

    def attention(q: torch.Tensor, length: int) -> torch.Tensor:
        lengths = torch.tensor([length], dtype=torch.int32)
        return paged_reference.paged_attention(q, [segment], lengths, scaling=64**-0.5, dtype=torch.float64)

    right = attention(q, shape.length)
    assert right.isfinite().all()
    for wrong in (attention(torch.zeros_like(q), shape.length), attention(q, shape.length - 64)):
        assert float((wrong - right).norm() / right.norm()) > 3 * decode.LIMIT


def test_peers_that_are_not_installed_say_so() -> None:
    away = peers.Peer("x", "no_such_module", "x", torch.bfloat16, peers._sdpa)
    assert away.missing() == "ModuleNotFoundError: No module named 'no_such_module'"


def test_sdpa_agrees_with_float64_over_its_own_cache() -> None:
    peer = peers.PEERS[-1]
    assert peer.missing() is None
    assert peer.version() is not None
    step = _decode()
    cache = peer.cache(step, torch.Generator().manual_seed(0))
    out = peer.bind(step, peer.query(step))(*cache)
    right = peer.expected(step, cache, [0, 1])
    assert float((out.double() - right).norm() / right.norm()) < peer.limit


@pytest.mark.parametrize("peer", peers.PEERS[:6], ids=lambda peer: peer.name)
def test_the_float64_of_a_paged_peer_follows_its_table(peer: peers.Peer) -> None:
    step = _decode()
    k, v = peer.cache(step, torch.Generator().manual_seed(0))
    tokens = [
        torch.stack([side.double()[step.table[1, p // 16], p % 16] for p in range(step.length)], 1)
        for side in (k, v)
    ]
    right = peers.exact(peer.query(step)[1], *tokens)
    torch.testing.assert_close(peer.expected(step, (k, v), [1])[0], right)
    assert step.q.dtype == torch.bfloat16
    assert (peer.query(step).dtype == torch.float8_e4m3fn) == peer.fp8_query


def _decode() -> peers.Decode:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 64, dtype=torch.bfloat16)
    table = torch.randperm(8, dtype=torch.int32).view(2, 4)
    return peers.Decode(q, table, torch.full((2,), 64, dtype=torch.int32), kv_heads=2)
