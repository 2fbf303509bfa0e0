"""Which format to serve, with reasons that can be checked against the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcal import formats
from kvcal.errors import PlanRefused
from kvcal.planner.capacity import PLAIN, Capacity, Deployment, Row


@dataclass(frozen=True)
class Recommendation:
    """A format, and why it and not another, one line each."""

    format: str
    reasons: tuple[str, ...]


def choose(capacity: Capacity, measured: Mapping[str, float], max_kl: float) -> Recommendation:
    """The format that generates most tokens per second here, of those whose loss is known to be small.

    Formats of 8 bits need no measurement to be proposed, but one above the limit rules them out; those of
    fewer bits need one within it.

    Args:
        capacity: what fits, and what a step costs.
        measured: format -> KL to the 16-bit cache, measured on this model.
        max_kl: the largest that is acceptable, in nats.

    Raises:
        PlanRefused: nothing is left.
    """
    deployment = capacity.deployment
    taken = [row for row in capacity.rows if row.refused is None and row.requests]
    objections = {row.format: _objection(row.format, measured, max_kl) for row in taken}
    allowed = [row for row in taken if objections[row.format] is None]
    if not allowed:
        raise PlanRefused(
            [
                f"nothing that {deployment.engine.name} takes holds so many requests within a KL of"
                f" {max_kl:g}; use a shorter --context, fewer --requests or more GPUs (--tensor-parallel)"
            ]
        )
    best = max(allowed, key=lambda row: row.rate)
    reasons = _why(best, capacity.rows[0], deployment, measured)
    for row in taken:
        if row is not best and row.format != PLAIN:
            reasons.append(f"not {row.format}: {objections[row.format] or _slower(row, best, deployment)}")
    return Recommendation(best.format, tuple(reasons))


def _objection(name: str, measured: Mapping[str, float], max_kl: float) -> str | None:
    kl = measured.get(name)
    if kl is not None:
        return None if kl <= max_kl else f"its measured KL of {kl:.4g} exceeds {max_kl:g}"
    if name == PLAIN or formats.get(name).bits >= 8:
        return None
    return (
        "below 8 bits the loss depends on the model; measure it (kvcal compare, kvcal calibrate) and give"
        " --measured"
    )


def _why(best: Row, plain: Row, deployment: Deployment, measured: Mapping[str, float]) -> list[str]:
    gpu = deployment.gpu
    if best.format == PLAIN:
        return ["no quantized cache that the engine takes does better within the limits"]
    reasons = [f"{best.fitting:,} requests instead of {plain.fitting:,} beside the weights"]
    fmt = formats.get(best.format)
    if gpu.native(fmt):
        reasons.append(f"{gpu.architecture} computes attention in it natively")
    elif fmt.storage_dtype == "float8_e4m3fn" and not gpu.fp8:
        reasons.append(
            f"{gpu.architecture} has no FP8 units: codes are dequantized on load, which saves memory and"
            " bandwidth, not arithmetic"
        )
    else:
        reasons.append("codes are dequantized on load, which saves memory and bandwidth, not arithmetic")
    if best.limit == "compute":
        reasons.append("at so many requests arithmetic, not bandwidth, bounds the step")
    kl = measured.get(best.format)
    reasons.append(
        f"measured KL {kl:.4g}" if kl is not None else "its loss was not measured here: kvcal calibrate does"
    )
    return reasons


def _slower(row: Row, best: Row, deployment: Deployment) -> str:
    times = deployment.engine.decode_time.get(row.format)
    slower = f"{row.rate:,.0f} tokens/s, {best.format} {best.rate:,.0f}"
    if times is None or times <= 1 or row.kernel_latency is None:
        return slower
    return (
        f"{slower}; {deployment.engine.title}'s kernel took up to {times:g} times the attention time of"
        " 16 bits, measured on an H200"
    )
