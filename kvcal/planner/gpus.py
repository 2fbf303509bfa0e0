"""GPUs as data: what the capacity planner has to know of each, from its maker's data sheet.

Memory is what the driver counts, in MiB (``nvidia-smi``, ``rocm-smi``): a data sheet's "80 GB" is 79.6 GiB
on an H100, 80 GiB on an A100 and 74.5 GiB to those who take it for decimal, and its "24 GB" is 22.5 GiB on an
L4, which keeps the rest for ECC. Counts of A100, L4, L40S and H100 SXM as listed in
modal-labs/modal-client#2797, that of MI300X in ROCm/legacy-rocm-build#4750. Bandwidth and tensor-core rates
are the peaks of data sheets; rates are dense, half of those with sparsity.

>>> get("H100").memory_bytes / 2**30 > 79, get("a100").fp8
(True, False)
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcal.errors import UsageError
from kvcal.formats import KVFormat


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: what the command line calls it.
        title: what its maker calls it.
        devices: what the driver calls it.
        architecture: generation of the maker's chips.
        memory_mib: what the driver counts.
        bandwidth: of its memory, bytes per second.
        flops: floating-point operations per second of its tensor cores in 16 bits with sums in float32.
        fp8: tensor cores compute in FP8, at twice that rate; without them FP8 is dequantized on load.
        fp4: tensor cores compute in NVFP4.
        source: where the numbers were read.
        aliases: other names.
        note: what else its user should know.
    """

    name: str
    title: str
    devices: tuple[str, ...]
    architecture: str
    memory_mib: int
    bandwidth: float
    flops: float
    fp8: bool
    fp4: bool
    source: str
    aliases: tuple[str, ...] = ()
    note: str | None = None

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * 2**20

    def native(self, fmt: KVFormat) -> bool:
        """Whether its tensor cores take the codes of a format as they are.

        Integers below 8 bits are unpacked, and those with a scale per token are multiplied out, before
        16-bit tensor cores see them, on every GPU; so is a latent in FP8 beside a rotary key in 16 bits.
        """
        if fmt.name == "nvfp4":
            return self.fp4
        return self.fp8 and fmt.storage_dtype == "float8_e4m3fn" and fmt.rounds_query


_FNUZ = (
    "its FP8 is E4M3FNUZ, which ends at 240: scales of amax/448 must be doubled, which vLLM does for"
    " quant_method fp8 and not for compressed-tensors"
)

GPUS: tuple[Gpu, ...] = (
    Gpu(
        "a100-40gb",
        "NVIDIA A100 SXM 40GB",
        ("A100-SXM4-40GB",),
        "Ampere",
        40960,
        1555e9,
        312e12,
        fp8=False,
        fp4=False,
        source="NVIDIA A100 Tensor Core GPU data sheet (nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf)",
    ),
    Gpu(
        "a100-80gb",
        "NVIDIA A100 SXM 80GB",
        ("A100-SXM4-80GB",),
        "Ampere",
        81920,
        2039e9,
        312e12,
        fp8=False,
        fp4=False,
        source="NVIDIA A100 Tensor Core GPU data sheet (nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf)",
        aliases=("a100",),
    ),
    Gpu(
        "a100-80gb-pcie",
        "NVIDIA A100 PCIe 80GB",
        ("A100 80GB PCIe",),
        "Ampere",
        81920,
        1935e9,
        312e12,
        fp8=False,
        fp4=False,
        source="NVIDIA A100 Tensor Core GPU data sheet (nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf)",
    ),
    Gpu(
        "l4",
        "NVIDIA L4",
        ("NVIDIA L4",),
        "Ada",
        23034,
        300e9,
        121e12,
        fp8=True,
        fp4=False,
        source="NVIDIA L4 Tensor Core GPU data sheet",
    ),
    Gpu(
        "l40s",
        "NVIDIA L40S",
        ("NVIDIA L40S",),
        "Ada",
        46068,
        864e9,
        362.05e12,
        fp8=True,
        fp4=False,
        source="NVIDIA L40S data sheet (nvidia.com/en-us/data-center/l40s)",
    ),
    Gpu(
        "h100",
        "NVIDIA H100 SXM 80GB",
        ("H100 80GB HBM3",),
        "Hopper",
        81559,
        3350e9,
        989.4e12,
        fp8=True,
        fp4=False,
        source="NVIDIA H100 Tensor Core GPU data sheet (nvidia.com/en-us/data-center/h100)",
        aliases=("h100-sxm",),
    ),
    Gpu(
        "h100-pcie",
        "NVIDIA H100 PCIe 80GB",
        ("H100 PCIe",),
        "Hopper",
        81559,
        2000e9,
        756e12,
        fp8=True,
        fp4=False,
        source="NVIDIA H100 PCIe GPU product brief (PB-11133-001)",
    ),
    Gpu(
        "h200",
        "NVIDIA H200 SXM 141GB",
        ("NVIDIA H200",),
        "Hopper",
        143771,
        4800e9,
        989.4e12,
        fp8=True,
        fp4=False,
        source="NVIDIA H200 Tensor Core GPU data sheet (nvidia.com/en-us/data-center/h200)",
    ),
    Gpu(
        "b200",
        "NVIDIA HGX B200, one GPU",
        ("NVIDIA B200",),
        "Blackwell",
        183359,
        8000e9,
        2250e12,
        fp8=True,
        fp4=True,
        source="NVIDIA HGX B200 data sheet (nvidia.com/en-us/data-center/hgx), a GPU of eight",
        note="drivers count a bus of 7,680 bits, so 7.67 TB/s, where the data sheet has 8 (pytorch/ao#4002)",
    ),
    Gpu(
        "mi300x",
        "AMD Instinct MI300X",
        ("MI300X", "MI300X VF"),
        "CDNA 3",
        196592,
        5300e9,
        1307.4e12,
        fp8=True,
        fp4=False,
        source="AMD Instinct MI300X accelerator data sheet",
        note=_FNUZ,
    ),
    # No driver's count was seen: AMD's 256 GiB, less the 16 MiB that the MI300X's driver keeps of 192 GiB.
    Gpu(
        "mi325x",
        "AMD Instinct MI325X",
        ("MI325X",),
        "CDNA 3",
        262128,
        6000e9,
        1307.4e12,
        fp8=True,
        fp4=False,
        source="AMD Instinct MI325X accelerator data sheet; memory: ROCm, AMD GPU specifications",
        note=_FNUZ,
    ),
    Gpu(
        "rtx-4090",
        "NVIDIA GeForce RTX 4090",
        ("GeForce RTX 4090",),
        "Ada",
        24564,
        1008e9,
        165.2e12,
        fp8=True,
        fp4=False,
        source="NVIDIA Ada GPU Architecture whitepaper, appendix A",
    ),
    Gpu(
        "rtx-5090",
        "NVIDIA GeForce RTX 5090",
        ("GeForce RTX 5090",),
        "Blackwell",
        32607,
        1792e9,
        209.5e12,
        fp8=True,
        fp4=True,
        source="NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A",
    ),
)


def names() -> list[str]:
    return [gpu.name for gpu in GPUS]


def get(name: str) -> Gpu:
    """Look a GPU up by name or alias, in any case, with blanks for hyphens."""
    wanted = name.strip().lower().replace(" ", "-")
    for gpu in GPUS:
        if wanted == gpu.name or wanted in gpu.aliases:
            return gpu
    raise UsageError(f"unknown GPU {name!r}; known: auto, {', '.join(names())}")


def of_device(device: str) -> Gpu:
    """The GPU that a driver means.

    >>> of_device("NVIDIA H100 80GB HBM3").name, of_device("NVIDIA L40S").name
    ('h100', 'l40s')

    Raises:
        UsageError: no row is about it.
    """
    for gpu in GPUS:
        if any(device.endswith(known) for known in gpu.devices):
            return gpu
    raise UsageError(
        f"{device!r} is not among the GPUs that kvcal knows, and no driver tells a bandwidth; --gpu takes one"
        f" that comes near: {', '.join(names())}"
    )
