"""Peaks of memory belong to the part of a run that they were reached in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcal import peaks

MIB = 2**20
SLACK = 24 * MIB  # of an interpreter that goes on allocating


def hold(size: int) -> None:
    """Take so much memory and let it go."""
    torch.ones(size, dtype=torch.uint8)


@pytest.fixture
def resettable() -> None:
    with peaks.measured() as found:
        pass
    if found.host_since != "stage":
        pytest.skip("this system does not let a process set its mark back")


@pytest.mark.usefixtures("resettable")
def test_a_part_knows_nothing_of_the_one_before() -> None:
    with peaks.measured() as large:
        hold(256 * MIB)
    with peaks.measured() as small:
        hold(16 * MIB)
    assert large.host_bytes - small.host_bytes == pytest.approx(240 * MIB, abs=SLACK)
    assert small.host_since == "stage"


@pytest.mark.usefixtures("resettable")
def test_a_part_counts_for_those_around_it_and_not_the_other_way_round() -> None:
    with peaks.measured() as around:
        hold(128 * MIB)
        with peaks.measured() as within:
            hold(64 * MIB)
            peaks.restart()
        with peaks.measured() as later:
            hold(16 * MIB)
    assert around.host_bytes - within.host_bytes == pytest.approx(64 * MIB, abs=SLACK)
    assert within.host_bytes - later.host_bytes == pytest.approx(48 * MIB, abs=SLACK)


def test_where_the_mark_cannot_be_set_back_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peaks, "_CLEAR", tmp_path / "nowhere" / "clear_refs")
    hold(64 * MIB)
    before = peaks.host()
    with peaks.measured() as found:
        pass
    assert found.host_since == "process"
    assert found.host_bytes >= before


def test_of_several_gpus_it_is_the_one_that_held_most(monkeypatch: pytest.MonkeyPatch) -> None:
    marks, reached = [700, 900], [30, 50]
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        reset_peak_memory_stats=lambda index: marks.__setitem__(index, reached[index]),
        max_memory_allocated=lambda index: marks[index],
    )
    monkeypatch.setattr(peaks.sys, "modules", {"torch": SimpleNamespace(cuda=cuda)})
    with peaks.measured() as around:
        marks[0] = 80
        with peaks.measured() as within:
            marks[1] = 60
    assert (around.device_bytes, within.device_bytes) == (80, 60)


def test_no_gpu_is_none() -> None:
    with peaks.measured() as found:
        pass
    if not torch.cuda.is_initialized():
        assert found.device_bytes is None


@pytest.mark.gpu
def test_on_a_gpu_each_part_has_its_own() -> None:
    found: list[Any] = []
    torch.ones(1, device="cuda")
    for size in (256 * MIB, 16 * MIB):
        with peaks.measured() as each:
            torch.ones(size, dtype=torch.uint8, device="cuda")
        found.append(each.device_bytes)
    assert found[0] - found[1] == 240 * MIB
