"""Finds an interpreter that has vLLM and asks it what it made of a checkpoint.

vLLM runs in an interpreter of its own (:mod:`kvcal.vllm_probe`), because its requirements rarely agree with
kvcal's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcal.errors import CheckFailed, UsageError
from kvcal.recipe import SIDES

PYTHON_VARIABLE = "KVCAL_VLLM_PYTHON"
TIMEOUT_S = 1800.0

_PROBE = Path(__file__).with_name("vllm_probe.py")
_LONGEST_MESSAGE = 800


def engine_python(explicit: str | None) -> Path:
    """The interpreter that has vLLM.

    In this order: ``explicit``, the variable ``KVCAL_VLLM_PYTHON``, the running interpreter if it has vLLM,
    ``.venv-vllm`` under the current folder or under the repository that holds kvcal.

    Raises:
        UsageError: none of these is there, or the named one is not a program.
    """
    for source, name in (("--engine-python", explicit), (PYTHON_VARIABLE, os.environ.get(PYTHON_VARIABLE))):
        if name:
            found = shutil.which(name)
            if found is None:
                raise UsageError(f"{source} {name!r}: is not a program that can be run")
            # Not resolved: the file that a virtual environment's python links to has none of its packages.
            return Path(found).absolute()
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin is not None:  # a folder that happens to be called vllm has no origin
        return Path(sys.executable)
    for folder in (Path.cwd(), Path(__file__).parent.parent):
        python = folder / ".venv-vllm" / "bin" / "python"
        if python.is_file():
            return python
    raise UsageError(
        "no Python with vLLM was found: run `make vllm-env`, or name one with --engine-python"
        f" or ${PYTHON_VARIABLE}"
    )


@dataclass(frozen=True)
class Answer:
    """The probe's document."""

    engine: str
    cache_dtype: str
    default_cache_dtype: list[str]
    fp8_cache_unsupported: str | None
    layers: dict[str, dict[str, Any]]
    outputs: list[list[int]]


@dataclass(frozen=True)
class Engine:
    """One checkpoint and what the engine is to do with it.

    ``scales_over``: the cache dtype for which scales are loaded, where another makes the engine forget them.
    """

    python: Path
    folder: Path
    prompts: list[list[int]]
    max_new_tokens: int
    timeout_s: float
    scales_over: str | None = None

    def ask(self, cache_dtype: str) -> Answer:
        """Start the engine once, over a cache of this dtype, and read its answer."""
        command = [str(self.python), str(_PROBE), str(self.folder), "--cache-dtype", cache_dtype]
        command += ["--max-new-tokens", str(self.max_new_tokens)]
        if self.scales_over is not None:
            command += ["--scales-over", self.scales_over]
        for ids in self.prompts:
            command += ["--prompt-ids", ",".join(map(str, ids))]
        document = self._document(*self._run(command))
        if "no_engine" in document:
            raise UsageError(
                f"{self.python} cannot import vLLM: {document['no_engine']};"
                " run `make vllm-env` or name another with --engine-python"
            )
        if "error" in document:
            raise CheckFailed(f"vLLM refuses {self.folder}: {str(document['error'])[:_LONGEST_MESSAGE]}")
        return self._checked(document)

    def _run(self, command: list[str]) -> tuple[int, str, str]:
        with tempfile.TemporaryDirectory(prefix="kvcal-live-") as scratch:
            try:
                process = subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    env={**os.environ, "TMPDIR": scratch},  # vLLM leaves rendezvous files behind
                    start_new_session=True,  # so that children of the engine can be ended with it
                )
            except OSError as error:
                raise UsageError(f"{self.python}: cannot be run: {error.strerror}") from None
            try:
                out, err = process.communicate(timeout=self.timeout_s)
            except subprocess.TimeoutExpired:
                raise CheckFailed(
                    f"vLLM gave no answer about {self.folder} in {self.timeout_s:g} s"
                ) from None
            finally:
                _end_session(process)
        return process.returncode, out, err

    def _document(self, code: int, out: str, err: str) -> dict[str, Any]:
        # The document decides, not the exit code: an engine may stumble while it winds down.
        try:
            document = json.loads(_last_line(out))
        except ValueError:
            document = None
        if isinstance(document, dict):
            return document
        ended = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        last = _last_line(err) or "no message"
        raise CheckFailed(f"the vLLM process {ended} and no answer: {last[:_LONGEST_MESSAGE]}")

    def _checked(self, document: dict[str, Any]) -> Answer:
        try:
            answer = Answer(
                engine=f"{document['engine']} {document['version']}",
                cache_dtype=str(document["cache_dtype"]),
                default_cache_dtype=list(document["default_cache_dtype"]),
                fp8_cache_unsupported=document["fp8_cache_unsupported"],
                layers={
                    str(name): {side: tuple(map(float, layer[side])) for side in SIDES}
                    for name, layer in document["layers"].items()
                },
                outputs=[list(map(int, tokens)) for tokens in document["outputs"]],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckFailed(f"the vLLM process gave an answer of another form: {error!r}") from None
        lengths = [len(tokens) for tokens in answer.outputs]
        if lengths != [self.max_new_tokens] * len(self.prompts):
            raise CheckFailed(
                f"vLLM continued {len(self.prompts)} prompts by {lengths} tokens,"
                f" {self.max_new_tokens} each were asked for"
            )
        return answer


def _end_session(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
