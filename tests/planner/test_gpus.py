from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcal import formats
from kvcal.errors import UsageError
from kvcal.planner import gpus, local_gpu

every_gpu = pytest.mark.parametrize("gpu", gpus.GPUS, ids=lambda gpu: gpu.name)


@every_gpu
def test_a_row_is_whole_and_plausible(gpu: gpus.Gpu) -> None:
    assert gpu.source
    assert gpus.get(gpu.name) is gpus.get(gpu.name.upper().replace("-", " ")) is gpu
    assert 20 * 1024 < gpu.memory_mib < 260 * 1024
    assert 2e11 < gpu.bandwidth < 1e13
    # Tensor cores do some hundred operations for each byte of memory.
    assert 80 < gpu.flops / gpu.bandwidth < 450
    assert gpu.fp4 <= gpu.fp8 == (gpu.architecture != "Ampere")


def test_names_are_those_of_one_row() -> None:
    every = [name for gpu in gpus.GPUS for name in (gpu.name, *gpu.aliases)]
    assert len(every) == len(set(every))
    with pytest.raises(UsageError, match="unknown GPU 'T4'; known: auto, a100-40gb"):
        gpus.get("T4")


def test_memory_is_near_the_name_of_the_data_sheet() -> None:
    for name, gb in (("a100-40gb", 40), ("a100", 80), ("h100", 80), ("h200", 141), ("mi300x", 192)):
        assert gb * 1e9 < gpus.get(name).memory_bytes <= gb * 2**30


def test_native_formats() -> None:
    fp8, nvfp4, token = (formats.get(n) for n in ("fp8", "nvfp4", "fp8_per_token_head"))
    assert [gpus.get(n).native(fp8) for n in ("a100", "h100", "b200")] == [False, True, True]
    assert [gpus.get(n).native(nvfp4) for n in ("a100", "h100", "b200")] == [False, False, True]
    assert not gpus.get("b200").native(token)
    assert not gpus.get("b200").native(formats.get("fp8_latent_bf16_rope"))
    assert not gpus.get("b200").native(formats.get("int8_per_token_head"))


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI300X VF", "mi300x"),
        ("AMD Instinct MI325X", "mi325x"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
    ],
)
def test_devices_are_known_by_what_drivers_call_them(device: str, name: str) -> None:
    assert gpus.of_device(device).name == name


@every_gpu
def test_no_row_answers_to_the_name_of_another(gpu: gpus.Gpu) -> None:
    for device in gpu.devices:
        answering = [each for each in gpus.GPUS if any(device.endswith(known) for known in each.devices)]
        assert answering == [gpu]


UNKNOWN = [
    "NVIDIA L40",
    "NVIDIA H200 NVL",
    "NVIDIA H100 NVL",
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "AMD Radeon Graphics",
    "Tesla T4",
]


@pytest.mark.parametrize("device", UNKNOWN)
def test_devices_without_a_row_are_refused(device: str) -> None:
    with pytest.raises(
        UsageError, match=f"'{device}' is not among the GPUs .* one that comes near: a100-40gb"
    ):
        gpus.of_device(device)


def answer(monkeypatch: pytest.MonkeyPatch, stdout: str, code: int = 0) -> None:
    monkeypatch.setattr(local_gpu.shutil, "which", lambda _: "/bin/nvidia-smi")

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        assert command == ["/bin/nvidia-smi", "--query-gpu=name,mig.mode.current", "--format=csv,noheader"]
        return SimpleNamespace(stdout=stdout, returncode=code)

    monkeypatch.setattr(local_gpu.subprocess, "run", run)


def test_the_driver_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, "NVIDIA H200, Disabled\nNVIDIA H200, Disabled\n")
    assert local_gpu.detect().name == "h200"
    answer(monkeypatch, "NVIDIA GeForce RTX 4090, [N/A]\n")
    assert local_gpu.detect().name == "rtx-4090"


def test_a_part_of_a_gpu_is_not_taken_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi names the whole card, whatever part of it a process may use."""
    answer(monkeypatch, "NVIDIA H200, Enabled\n")
    with pytest.raises(UsageError, match="--gpu auto: NVIDIA H200 is cut into parts"):
        local_gpu.detect()


def only_torch(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(local_gpu.shutil, "which", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: device)


@every_gpu
def test_torch_is_asked_where_there_is_no_driver_program(
    gpu: gpus.Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in gpu.devices:
        only_torch(monkeypatch, f"{gpu.title.split()[0]} {device}")
        assert local_gpu.detect() is gpu


@pytest.mark.parametrize("device", UNKNOWN)
def test_unknown_gpus_are_refused_by_name(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only_torch(monkeypatch, device)
    with pytest.raises(UsageError, match=f"'{device}' is not among the GPUs that kvcal knows"):
        local_gpu.detect()


def test_the_command_says_what_gpu_it_lacks(kvcal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ("plan", "--shape", "llama-3-8b", "--gpu", "auto")
    only_torch(monkeypatch, "NVIDIA L40S")
    assert "NVIDIA L40S" in kvcal(*line).stdout
    only_torch(monkeypatch, "NVIDIA GH200 480GB")
    outcome = kvcal(*line)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "'NVIDIA GH200 480GB' is not among the GPUs" in outcome.stderr
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = kvcal(*line)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "--gpu auto: no GPU here; name one: a100-40gb" in outcome.stderr


@pytest.mark.parametrize(("stdout", "code"), [("", 0), ("NVIDIA-SMI has failed", 9)])
def test_no_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, stdout: str, code: int) -> None:
    answer(monkeypatch, stdout, code)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="--gpu auto: no GPU here; name one: a100-40gb"):
        local_gpu.detect()


def test_a_driver_that_hangs_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_gpu.shutil, "which", lambda _: "/bin/nvidia-smi")

    def run(command: list[str], **_: Any) -> Any:
        raise subprocess.TimeoutExpired(command, 30)

    monkeypatch.setattr(local_gpu.subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no GPU here"):
        local_gpu.detect()
