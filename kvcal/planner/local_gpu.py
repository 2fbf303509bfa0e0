"""Which GPU this machine has. Asks ``nvidia-smi``, and torch only where there is none (ROCm)."""

from __future__ import annotations

import shutil
import subprocess

from kvcal.errors import UsageError
from kvcal.planner import gpus
from kvcal.planner.gpus import Gpu


def detect() -> Gpu:
    """The row of the first GPU here; all of a machine's are taken to be alike.

    Raises:
        UsageError: there is none, kvcal has no row for it, or what is here is a part of one.
    """
    device = _from_driver() or _from_torch()
    if device is None:
        raise UsageError(f"--gpu auto: no GPU here; name one: {', '.join(gpus.names())}")
    return gpus.of_device(device)


def _from_driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=name,mig.mode.current", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode or not done.stdout.strip():
        return None
    name, _, parts = done.stdout.strip().splitlines()[0].rpartition(", ")
    if parts.strip() == "Enabled":
        raise UsageError(
            f"--gpu auto: {name} is cut into parts (MIG), whose memory and bandwidth are not known"
        )
    return name.strip()


def _from_torch() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
