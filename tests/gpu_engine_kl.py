"""What a quantized KV cache does to next-token distributions, measured inside vLLM itself.

    python -m tests.gpu_engine_kl --base FOLDER --candidate LABEL=FOLDER --cache auto,fp8 --text FILE

Every (folder, cache dtype) runs in a process of its own, as an offline ``LLM`` that scores the same prompts.
The base model with a 16-bit cache is the reference. With ``auto`` among ``--cache`` it runs a second time:
what that run differs by is the floor below which no number means anything. ``CACHE@BACKEND`` names an
attention backend, as in ``auto@TRITON_ATTN``, which tells a cache's error from that of another kernel, and
``LABEL=FOLDER:CACHE,CACHE`` gives one candidate caches of its own. vLLM attends to prompts through the
cache, so each position reads earlier tokens, and its own, as the cache returns them.

The engine gives the ``--top-k`` largest log probabilities of a position and that of the prompt's own next
token, not all. KL(reference || candidate) is therefore taken over a partition: each token that both runs
list is a cell, and all others together are one more, whose probability is what the listed ones leave to one.
No probability is made up. Merging cells can only lower a divergence, so the number is a lower bound;
``rest`` is the reference's mean probability of that last cell, and ``--self-test`` shows how the bound
closes as more tokens are listed. Top-1 agreement counts a position if the tokens that share the reference's
highest probability and those that share the candidate's have one in common: 16-bit logits tie often.

Needs vLLM 0.26 to 0.33 with its torch and transformers; nothing of kvcal. Prints a table and one JSON
document.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

# What is left to one after summing some forty float32 probabilities is rounding below this.
_REST_FLOOR = 1e-6
_LOG_LINES = 12
_ROWS = 128
_METHOD = (
    "KL(reference || candidate) over the tokens both runs list and one cell for all others: a lower bound"
)


@dataclass(frozen=True)
class Configuration:
    """One run of the engine: a checkpoint, a cache dtype and, unless the engine chooses, a backend."""

    label: str
    folder: str
    cache: str
    backend: str | None = None

    @property
    def name(self) -> str:
        return f"{self.label} {self.cache}" + (f"@{self.backend}" if self.backend else "")


@dataclass(frozen=True)
class Scores:
    """What one run says of each position. Where fewer tokens are listed, -1 and -inf pad."""

    tokens: np.ndarray  # (positions, listed)
    logprobs: np.ndarray  # (positions, listed)
    actual: np.ndarray  # (positions,): log probability of the text's own next token
    prompt: np.ndarray  # (positions,): which prompt a position belongs to

    @classmethod
    def load(cls, path: Path) -> Scores:
        with np.load(path) as data:
            return cls(**{name: data[name] for name in cls.__dataclass_fields__})

    def save(self, path: Path) -> None:
        np.savez(path, **{name: getattr(self, name) for name in self.__dataclass_fields__})


def divergences(reference: Scores, candidate: Scores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per position: KL over shared tokens and the rest, the reference's rest, top-1 agreement."""
    vocabulary = int(max(reference.tokens.max(), candidate.tokens.max())) + 1
    parts = []
    for first in range(0, len(reference.actual), _ROWS):
        rows = slice(first, first + _ROWS)
        tokens, log_p = reference.tokens[rows], reference.logprobs[rows].astype(np.float64)
        listed_q = candidate.logprobs[rows].astype(np.float64)
        whole = np.full((len(tokens), vocabulary + 1), np.nan)  # the last column, -1, takes the padding
        np.put_along_axis(whole, candidate.tokens[rows], listed_q, -1)
        log_q = np.take_along_axis(whole, tokens, -1)
        shared = (tokens >= 0) & ~np.isnan(log_q)
        log_p, log_q = np.where(shared, log_p, -np.inf), np.where(shared, log_q, -np.inf)
        p, q = np.exp(log_p), np.exp(log_q)
        rest_p, rest_q = (np.maximum(1 - x.sum(-1), _REST_FLOOR) for x in (p, q))
        difference = np.subtract(log_p, log_q, out=np.zeros_like(p), where=shared)
        best_p = log_p == reference.logprobs[rows].max(-1, keepdims=True)
        best_q = log_q == listed_q.max(-1, keepdims=True)
        kl = (p * difference).sum(-1) + rest_p * np.log(rest_p / rest_q)
        parts.append((kl, rest_p, (best_p & best_q).any(-1)))
    kl, rest, agrees = (np.concatenate(column) for column in zip(*parts, strict=True))
    return kl, rest, agrees


def compare(reference: Scores, candidate: Scores) -> dict[str, float]:
    """The figures of one candidate. The standard error is over prompts: positions are not independent."""
    if reference.actual.shape != candidate.actual.shape:
        raise ValueError(f"{candidate.actual.shape} positions against {reference.actual.shape}")
    kl, rest, agrees = divergences(reference, candidate)
    if not np.isfinite(kl).all():
        raise ValueError("a log probability is not finite")
    means = np.array([kl[reference.prompt == i].mean() for i in np.unique(reference.prompt)])
    return {
        "kl_mean": float(kl.mean()),
        "kl_standard_error": float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.nan,
        "kl_p99": float(np.quantile(kl, 0.99)),
        "kl_max": float(kl.max()),
        "top1_agreement": float(agrees.mean()),
        "perplexity": float(np.exp(-candidate.actual.astype(np.float64).mean())),
        "perplexity_reference": float(np.exp(-reference.actual.astype(np.float64).mean())),
        "rest_mass": float(rest.mean()),
        "tokens": len(kl),
    }


# One engine in one process.


def gather(outputs: list[Any]) -> Scores:
    """The prompt log probabilities of vLLM's request outputs. A prompt's first token has none.

    They come flat: per position the prompt's own token, then the largest, which may name that token again.
    """
    tokens, logprobs, prompt = [], [], []
    for index, output in enumerate(outputs):
        flat, scored = output.prompt_logprobs, len(output.prompt_token_ids) - 1
        tokens.append(np.array(flat.token_ids, dtype=np.int64).reshape(scored, -1))
        logprobs.append(np.array(flat.logprobs, dtype=np.float32).reshape(scored, -1))
        prompt.append(np.full(scored, index, dtype=np.int32))
        if tokens[-1][:, 0].tolist() != list(output.prompt_token_ids[1:]):
            raise ValueError("the engine does not list each prompt's own token first")
    token, logprob = np.concatenate(tokens), np.concatenate(logprobs)
    actual = logprob[:, 0].copy()
    again = (token[:, 1:] == token[:, :1]).any(-1)
    token[again, 0], logprob[again, 0] = -1, -np.inf
    return Scores(token, logprob, actual, np.concatenate(prompt))


def held(engine: Any) -> dict[str, Any]:
    """What the engine's attention layers say they run with; empty if this version keeps it elsewhere."""
    with contextlib.suppress(Exception):
        layers = [
            layer
            for layer in engine.llm_engine.vllm_config.compilation_config.static_forward_context.values()
            if hasattr(layer, "kv_cache_dtype")
        ]
        scales = [float(scale) for layer in layers for scale in layer._k_scale.flatten()]
        return {
            "layers": len(layers),
            "held_cache": sorted({str(layer.kv_cache_dtype) for layer in layers}),
            "held_backend": sorted({layer.attn_backend.get_name() for layer in layers}),
            "held_k_scales": [min(scales), max(scales)] if scales else None,
        }
    return {}


def work(task_file: Path) -> None:
    """Score the prompts of a task with one engine and leave the scores and a description beside the task."""
    task = json.loads(task_file.read_text())
    os.environ.setdefault(
        "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
    )  # the engine in this process, its layers in reach
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # nothing is sampled: do not compile for it
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import vllm

    started = time.monotonic()
    engine = vllm.LLM(
        task["folder"],
        dtype=task["dtype"],
        kv_cache_dtype=task["cache"],
        max_model_len=task["prompt_tokens"] + 1,
        max_num_seqs=task["batch"],
        max_num_batched_tokens=task["batch"] * task["prompt_tokens"],
        max_logprobs=task["top_k"],
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=int(task["cache_gib"] * 2**30),
        gpu_memory_utilization=0.1,  # only a lower bound on free memory, where the cache's size is given
        seed=0,
        **({"attention_backend": task["backend"]} if task["backend"] else {}),
    )
    loaded = time.monotonic()
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in task["prompts"]],
        vllm.SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=task["top_k"], flat_logprobs=True, detokenize=False
        ),
        use_tqdm=False,
    )
    gather(outputs).save(task_file.with_suffix(".npz"))
    described = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "seconds_loading": round(loaded - started, 2),
        "seconds_scoring": round(time.monotonic() - loaded, 2),
        **held(engine),
    }
    task_file.with_suffix(".held").write_text(json.dumps(described))


# All of them, and the figures.


def cut_prompts(folder: str, text: Path, tokens: int, prompt_tokens: int) -> list[list[int]]:
    """As many prompts as give ``tokens`` scored positions, spread evenly over the text.

    Each begins as the tokenizer begins a text.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    opening = [t for t in tokenizer("").input_ids if t != tokenizer.eos_token_id]
    ids = tokenizer(text.read_text(), add_special_tokens=False, verbose=False).input_ids
    body = prompt_tokens - len(opening)
    windows, wanted = len(ids) // body, math.ceil(tokens / (prompt_tokens - 1))
    if windows < wanted:
        raise SystemExit(f"{text}: {len(ids)} tokens give {windows} prompts of {prompt_tokens}, not {wanted}")
    starts = [i * windows // wanted * body for i in range(wanted)]
    return [opening + ids[start : start + body] for start in starts]


def run(configuration: Configuration, shared: dict[str, Any], folder: Path, timeout: float) -> dict[str, Any]:
    """Run one configuration in its own process; on failure the result holds the end of its log."""
    stem = "".join(c if c.isalnum() or c in "-_" else "_" for c in configuration.name)
    task_file = folder / f"{stem}.task"
    task_file.write_text(json.dumps(shared | asdict(configuration)))
    log_file = folder / f"{stem}.log"
    started = time.monotonic()
    with log_file.open("w") as log:
        # -P keeps this file's own folder off the import path.
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--work", str(task_file)]
        try:
            code: int | str = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=timeout, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"no end after {timeout:g} s"
    result = asdict(configuration) | {"seconds": round(time.monotonic() - started, 1)}
    print(f"{configuration.name}: {code or 'done'} after {result['seconds']} s", file=sys.stderr, flush=True)
    if code:
        tail = log_file.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return result | {"error": f"exit {code}", "log": tail}
    return (
        result
        | {"scores": str(task_file.with_suffix(".npz"))}
        | json.loads(task_file.with_suffix(".held").read_text())
    )


def parse_cache(spec: str) -> tuple[str, str | None]:
    cache, _, backend = spec.partition("@")
    return cache, backend or None


def configurations(args: argparse.Namespace) -> tuple[Configuration, list[Configuration]]:
    """The reference, and everything that is compared with it."""
    caches = args.cache.split(",")
    found = [Configuration("base", args.base, *parse_cache(spec)) for spec in caches]
    for candidate in args.candidate:
        label, equals, rest = candidate.partition("=")
        if not equals or not label or not rest:
            raise SystemExit(f"--candidate {candidate}: LABEL=FOLDER or LABEL=FOLDER:CACHE,CACHE")
        folder, _, own = rest.partition(":")
        found += [Configuration(label, folder, *parse_cache(s)) for s in (own.split(",") if own else caches)]
    names = [c.name for c in found]
    if repeated := sorted({n for n in names if names.count(n) > 1}):
        raise SystemExit(f"named twice: {', '.join(repeated)}")
    for folder in {args.base, *(c.folder for c in found)}:
        if not (Path(folder) / "config.json").is_file():
            raise SystemExit(f"{folder}: not a folder with a config.json")
    return Configuration("reference", args.base, *parse_cache(args.reference)), found


def unusable(reference: dict[str, Any]) -> str | None:
    """Why nothing can be compared with this run, if so."""
    if "error" in reference:
        return "failed:\n" + "\n".join(reference["log"])
    caches = reference.get("held_cache", [])
    if any(cache.startswith(("fp8", "int", "nvfp4", "turbo")) for cache in caches):
        return f"has a quantized cache: {', '.join(caches)}"
    return None


def table(results: list[dict[str, Any]]) -> str:
    """The figures as fixed-width text."""
    lines = [
        f"{'checkpoint':16s} {'cache':30s} {'KL mean':>9s} {'± s.e.':>8s} {'KL p99':>8s} {'top-1':>8s} "
        f"{'perplexity':>10s} {'rest':>7s} {'tokens':>7s}  {'backend':12s} {'s':>5s}"
    ]
    for r in results:
        cache = r["cache"] + (f"@{r['backend']}" if r["backend"] else "")
        start = f"{r['label']:16s} {cache:30s} "
        if "error" in r:
            lines.append(start + f"{r['error']}: {' | '.join(line.strip() for line in r['log'][-2:])[-200:]}")
            continue
        lines.append(
            start + f"{r['kl_mean']:9.5f} {r['kl_standard_error']:8.5f} {r['kl_p99']:8.4f} "
            f"{100 * r['top1_agreement']:7.2f}% {r['perplexity']:10.3f} {r['rest_mass']:7.4f} "
            f"{r['tokens']:7d}  {'/'.join(r.get('held_backend', [])):12s} {r['seconds']:5.0f}"
        )
    return "\n".join(lines)


def self_test() -> None:
    """The arithmetic against exact divergences of synthetic distributions over a whole vocabulary."""
    rng = np.random.default_rng(0)
    vocabulary, positions = 5000, 200

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    def listed(logp: np.ndarray, k: int, actual: np.ndarray) -> Scores:
        order = np.argsort(-logp, axis=-1)[:, :k]
        tokens = np.full((len(logp), k + 1), -1, dtype=np.int64)
        tokens[:, :k] = order
        extra = (order != actual[:, None]).all(-1)
        tokens[extra, k] = actual[extra]
        values = np.where(tokens >= 0, np.take_along_axis(logp, np.maximum(tokens, 0), -1), -np.inf)
        rows = np.arange(len(logp))
        return Scores(tokens, values.astype(np.float32), logp[rows, actual].astype(np.float32), rows // 50)

    for noise in (0.02, 0.1, 0.5):
        # Steep, like a language model's: the top few tokens hold most of the mass.
        logits = rng.standard_normal((positions, vocabulary)) * rng.uniform(2, 5, (positions, 1))
        log_p = log_softmax(logits)
        log_q = log_softmax(logits + noise * rng.standard_normal(logits.shape))
        exact = (np.exp(log_p) * (log_p - log_q)).sum(-1)
        actual = np.array([rng.choice(vocabulary, p=np.exp(row)) for row in log_p])
        previous = 0.0
        for k in (10, 40, 1000, vocabulary):
            got = compare(listed(log_p, k, actual), listed(log_q, k, actual))
            print(
                f"noise {noise:4.2f}, top {k:4d} of {vocabulary}: {got['kl_mean']:.6f} of "
                f"{exact.mean():.6f}, rest {got['rest_mass']:.4f}, top-1 {got['top1_agreement']:.3f}"
            )
            assert previous <= got["kl_mean"] + 1e-5 <= exact.mean() + 2e-5, "not a growing lower bound"
            previous = got["kl_mean"]
        assert abs(previous - exact.mean()) < 1e-4 * exact.mean() + 2e-6, (
            "not exact where everything is listed"
        )
        assert got["top1_agreement"] == (log_p.argmax(-1) == log_q.argmax(-1)).mean()
        rows = np.arange(positions)
        assert math.isclose(got["perplexity"], np.exp(-log_q[rows, actual].mean()), rel_tol=1e-5)
    same = compare(listed(log_p, 40, actual), listed(log_p, 40, actual))
    assert same["kl_mean"] == 0
    assert same["top1_agreement"] == 1
    tied, tilted = np.log([[0.4, 0.4, 0.1]]), np.log([[0.4, 0.4, 0.1]]) - [[0, 0.1, 0]]
    one = np.zeros(1)
    kl, rest, agrees = divergences(
        Scores(np.array([[1, 2, 3]]), tied, one, one), Scores(np.array([[2, 1, 4]]), tilted, one, one)
    )
    rest_q = 1 - 0.4 - 0.4 * math.exp(-0.1)
    assert agrees[0], "a tie counts for either token"
    assert math.isclose(rest[0], 0.2, rel_tol=1e-9)
    assert math.isclose(kl[0], 0.4 * 0.1 + 0.2 * math.log(0.2 / rest_q), rel_tol=1e-9)
    print("self-test passed")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", metavar="FOLDER", help="the unquantized checkpoint")
    parser.add_argument("--candidate", metavar="LABEL=FOLDER[:CACHE,...]", action="append", default=[])
    parser.add_argument("--cache", default="auto,fp8", help="cache dtypes, CACHE or CACHE@BACKEND (auto,fp8)")
    parser.add_argument("--reference", default="auto", help="the base's cache in the reference run (auto)")
    parser.add_argument("--text", type=Path, metavar="FILE")
    parser.add_argument("--tokens", type=int, default=16384, help="positions to score, at least (16384)")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--top-k", type=int, default=256, help="tokens listed per position (256)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=8, help="prompts that the engine takes at once (8)")
    parser.add_argument("--cache-gib", type=float, default=4.0, help="memory of the KV cache (4)")
    parser.add_argument("--jobs", type=int, default=1, help="engines at a time on the one device (1)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one configuration (600)")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep each engine's log and scores here")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the JSON document (standard output)")
    parser.add_argument("--self-test", action="store_true", help="check the arithmetic; no engine is needed")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work)
        return 0
    if args.self_test:
        self_test()
        return 0
    if not args.base or not args.text:
        parser.error("--base and --text are needed")

    reference, others = configurations(args)
    shared = {
        "prompts": cut_prompts(args.base, args.text, args.tokens, args.prompt_tokens),
        "prompt_tokens": args.prompt_tokens,
        "top_k": args.top_k,
        "dtype": args.dtype,
        "batch": args.batch,
        "cache_gib": args.cache_gib,
    }
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.jobs) as pool:
        folder = args.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        first = pool.submit(run, reference, shared, folder, args.timeout)

        def judged(configuration: Configuration) -> dict[str, Any]:
            result = run(configuration, shared, folder, args.timeout)
            if "error" not in result and "error" not in first.result():
                expected = Scores.load(Path(first.result()["scores"]))
                result |= compare(expected, Scores.load(Path(result.pop("scores"))))
            return result

        futures = [pool.submit(judged, configuration) for configuration in others]
        base = first.result()
        if problem := unusable(base):
            pool.shutdown(cancel_futures=True)
            raise SystemExit(f"the reference {problem}")
        results = [future.result() for future in futures]
        base.pop("scores")
    document = {
        "method": _METHOD,
        "settings": {name: value for name, value in shared.items() if name != "prompts"}
        | {"text": str(args.text), "prompts": len(shared["prompts"])},
        "reference": base,
        "results": results,
    }
    text = json.dumps(document, indent=1)
    if args.output:
        args.output.write_text(text + "\n")
    else:
        print(text)
    print(table(results), flush=True)
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
