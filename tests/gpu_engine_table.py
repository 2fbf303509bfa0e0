"""What each way to deliver a calibration is worth inside vLLM: checkpoints made by kvcal, one table.

    python -m tests.gpu_engine_table --model FOLDER --text FILE --work DIR

Makes, of the model and of the same model with planted outliers (:mod:`tests.planted`, an exact rewrite),
the checkpoints that kvcal writes for vLLM: FP8 scales per tensor and per head, and weights folded for FP8 at
scale 1.0, INT8 and INT4 per token and head. Then :mod:`tests.gpu_engine_kl` serves all of them and the
unchanged models in vLLM and prints KL against the model's own 16-bit cache. Checkpoints that are in
``--work`` already are kept.

Needs kvcal and vLLM 0.26 to 0.33 in one environment, or ``--engine-python`` for vLLM's own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests import planted

# label -> options of kvcal calibrate, and the cache that its outcome is served over
WAYS = {
    "per-tensor": (["--format", "fp8", "--granularity", "per_tensor"], "fp8"),
    "per-head": (["--format", "fp8", "--granularity", "per_head"], "fp8"),
    "folded-fp8": (["--format", "fp8", "--deliver", "fold"], "fp8"),
    "folded-int8": (["--format", "int8_per_token_head"], "int8_per_token_head"),
    "folded-int4": (["--format", "int4_per_token_head"], "int4_per_token_head"),
}
PLAIN_CACHES = "auto,fp8,int8_per_token_head,int4_per_token_head"


def calibrate(model: Path, output: Path, options: list[str], samples: int) -> None:
    """One checkpoint, unless it is there."""
    if output.exists():
        return
    command = [sys.executable, "-m", "kvcal", "calibrate", "--model", str(model), "--output", str(output)]
    subprocess.run([*command, "--samples", str(samples), *options], check=True)


def candidates(model: Path, work: Path, samples: int, jobs: int) -> list[str]:
    """Every checkpoint but the model itself as ``LABEL=FOLDER:CACHE`` of :mod:`tests.gpu_engine_kl`."""
    outliers = work / "planted"
    if not outliers.exists():
        planted.plant(model, outliers)
    found = [f"planted={outliers}:{PLAIN_CACHES}"]
    with ThreadPoolExecutor(jobs) as pool:
        runs = []
        for name, base in (("base", model), ("planted", outliers)):
            for way, (options, cache) in WAYS.items():
                folder = work / f"{name}-{way}"
                runs.append(pool.submit(calibrate, base, folder, options, samples))
                found.append(f"{name}-{way}={folder}:{cache}")
        for run in runs:
            run.result()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--text", required=True, help="text file that the engine scores")
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--samples", type=int, default=64, help="calibration samples")
    parser.add_argument("--jobs", type=int, default=1, help="calibrations, then engines, at a time")
    parser.add_argument("--engine-python", default=sys.executable, help="interpreter that has vLLM")
    parser.add_argument("rest", nargs="*", help="after --: further options of tests.gpu_engine_kl")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    command = [options.engine_python, "-m", "tests.gpu_engine_kl", "--base", str(options.model)]
    command += ["--cache", PLAIN_CACHES, "--text", options.text, "--jobs", str(options.jobs)]
    for candidate in candidates(options.model, options.work, options.samples, options.jobs):
        command += ["--candidate", candidate]
    sys.exit(subprocess.run([*command, *options.rest]).returncode)


if __name__ == "__main__":
    main()
