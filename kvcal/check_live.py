"""Asks a real vLLM what it made of a checkpoint: the scales its attention layers hold, and greedy text.

The scales prove delivery. The text, generated over a BF16 cache because every processor has one,
is held against transformers: a few tokens show that the engine runs this model, not that it is exact. In
SmolLM2-135M-Instruct one head's V times 1024 stands out by 18 logits; K times 1.1 in all layers does not.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcal import live_engine, probe, sources
from kvcal.arch import ModelSpec
from kvcal.errors import CheckFailed, UsageError
from kvcal.recipe import SIDES, Side

# Logits. vLLM computes in BF16 here and the reference in float32, so tokens that are nearly as likely as
# each other may change places. BF16 keeps 8 significant bits: logits in [16, 32), common for a best token,
# are multiples of 0.125. Rounding two candidates can close a gap of one such step, and the layers below
# lose about as much again. SmolLM2-135M-Instruct: 17 of 1024 tokens differed, the widest gap was 0.18.
# A token within the bound is at least exp(-0.25) = 78 % as probable as the best one.
NEAR_TIE = 0.25
NEAR_TIE_STEPS = 2  # the same in steps, for logits of 32 and more, whose steps are larger

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class ScaleFinding:
    """One side of one layer.

    Attributes:
        written: what the layer must hold, float32: one scale, or one per KV head. Q, written per query head,
            is reduced to the maximum of each GQA group, as vLLM does.
        held: what it holds; None if the engine has no such layer.
        problem: one line; None if ``held`` equals ``written`` bit for bit and every scale can be meant.
    """

    layer: int
    side: Side
    written: tuple[float, ...]
    held: tuple[float, ...] | None
    problem: str | None


@dataclass(frozen=True)
class TextFinding:
    """One prompt continued greedily by the engine and by transformers.

    Attributes:
        prompt: token ids that both were given.
        engine_tokens: ids of the engine's continuation; a stop token does not end it.
        reference_tokens: the same of transformers in float32.
        prompt_text: the prompt as text; None, like the next two, if it was given as ids.
        engine_text: ``engine_tokens``, decoded.
        reference_text: ``reference_tokens``, decoded.
        first_difference: index of the first token that differs; None if all agree.
        gap: logits from transformers' best token down to the engine's, at the position of ``engine_tokens``
            where that is worst; transformers is given the engine's own tokens before it.
        allowed: the gap that BF16 rounding explains there.
        problem: one line; None if ``gap`` is at most ``allowed``.
    """

    prompt: tuple[int, ...]
    engine_tokens: tuple[int, ...]
    reference_tokens: tuple[int, ...]
    prompt_text: str | None
    engine_text: str | None
    reference_text: str | None
    first_difference: int | None
    gap: float
    allowed: float
    problem: str | None


@dataclass(frozen=True)
class Fp8Run:
    """Generation over the FP8 cache, for which not every CPU has kernels.

    Attributes:
        done: whether it was carried out.
        why_not: the reason if it was not.
        scales: what the layers hold then.
        tokens: continuations, one per prompt. An FP8 cache may change them, so they are not judged.
        texts: the same decoded; None for a prompt given as ids.
    """

    done: bool
    why_not: str | None = None
    scales: tuple[ScaleFinding, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()
    texts: tuple[str | None, ...] = ()


@dataclass(frozen=True)
class LiveResult:
    """What the engine said.

    Attributes:
        engine: name and version, ``vllm 0.32.0``.
        cache_dtype: the cache that ``texts`` were generated over.
        default_cache_dtype: what the layers hold if no flag names a cache dtype; None if the engine
            cannot say on this machine.
        scales: a row for each layer and side that was written.
        texts: a row for each prompt.
        fp8: the run over an FP8 cache, or why there was none.
        problems: one line each; empty if everything agrees.
    """

    engine: str
    cache_dtype: str
    default_cache_dtype: str | None
    scales: tuple[ScaleFinding, ...]
    texts: tuple[TextFinding, ...]
    fp8: Fp8Run
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Nothing disagreed."""
        return not self.problems


def check_live(
    folder: Path,
    expected: Mapping[int, Mapping[Side, Sequence[float]]],
    module_paths: Mapping[int, str],
    python: Path,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    announced: bool = True,
    scales_over: str | None = None,
    timeout_s: float = live_engine.TIMEOUT_S,
) -> LiveResult:
    """Load ``folder`` in vLLM and compare with the written scales and with transformers.

    Disagreement is reported in the result; what keeps the comparison from being made is raised.

    Args:
        folder: checkpoint with ``config.json`` and safetensors.
        expected: layer -> side -> scales as written: one, or one per KV head (K, V) and query head (Q).
            A side that is not there is not compared.
        module_paths: layer -> path of its attention module, ``model.layers.0.self_attn``.
        python: interpreter that has vLLM, from :func:`kvcal.live_engine.engine_python`.
        prompts: text, for which the folder needs a tokenizer, or token ids. None at all: scales only.
        max_new_tokens: length of each continuation.
        announced: whether ``config.json`` asks for the FP8 cache; a folded checkpoint leaves that to a flag.
        scales_over: cache dtype for which scales are loaded, if over 16 bits the engine forgets them.
        timeout_s: seconds that one run of the engine may take.

    Raises:
        CheckFailed: nothing was written, or vLLM refuses the checkpoint, crashes, or gives no answer in time.
        UsageError: the interpreter has no vLLM, or a prompt or length cannot be meant.
        ModelError: transformers cannot load the folder.
    """
    folder = folder.resolve()
    spec = probe.read(sources.read_config(folder))
    if not any(expected.values()):
        raise CheckFailed(f"{folder}: no scales were written, so there is nothing to ask the engine about")
    asked = _Prompts.of(prompts, folder, spec, max_new_tokens)
    engine = live_engine.Engine(python, folder, asked.ids, max_new_tokens, timeout_s, scales_over)

    answer = engine.ask("bfloat16")
    scales, problems = _compare_scales(expected, module_paths, answer)
    fp8, fp8_problems = _fp8_run(engine, answer, expected, module_paths, asked)
    problems += fp8_problems + (_default_problems(answer) if announced else [])
    texts = _compare_texts(folder, spec, asked, answer) if asked.ids else ()
    problems += [f"prompt {i}: {text.problem}" for i, text in enumerate(texts, 1) if text.problem]
    return LiveResult(
        engine=answer.engine,
        cache_dtype=answer.cache_dtype,
        default_cache_dtype="/".join(answer.default_cache_dtype) or None,
        scales=scales,
        texts=texts,
        fp8=fp8,
        problems=tuple(problems),
    )


@dataclass(frozen=True)
class _Prompts:
    ids: list[list[int]]
    texts: list[str | None]
    tokenizer: Any

    @classmethod
    def of(cls, prompts: Sequence[Prompt], folder: Path, spec: ModelSpec, max_new_tokens: int) -> _Prompts:
        from kvcal import models

        texts = [p if isinstance(p, str) else None for p in prompts]
        needed = any(text is not None for text in texts)
        tokenizer: Any = models.load_tokenizer(folder, models.Trust()) if needed else None
        ids = [tokenizer(p).input_ids if isinstance(p, str) else list(p) for p in prompts]
        if max_new_tokens < 1:
            raise UsageError(f"a continuation of {max_new_tokens} tokens cannot be compared; use 1 or more")
        for number, tokens in enumerate(ids, 1):
            if not tokens or not all(0 <= token < spec.vocab_size for token in tokens):
                raise UsageError(
                    f"prompt {number}: must hold one token or more, ids from 0 to {spec.vocab_size - 1}"
                )
            if len(tokens) + max_new_tokens > spec.max_context:
                raise UsageError(
                    f"prompt {number}: {len(tokens)} tokens and {max_new_tokens} new ones exceed the model's"
                    f" context of {spec.max_context}"
                )
        return cls(ids, texts, tokenizer)

    def decode(self, index: int, tokens: Sequence[int]) -> str | None:
        return None if self.texts[index] is None else str(self.tokenizer.decode(tokens))


def _compare_scales(
    expected: Mapping[int, Mapping[Side, Sequence[float]]],
    module_paths: Mapping[int, str],
    answer: live_engine.Answer,
) -> tuple[tuple[ScaleFinding, ...], list[str]]:
    findings = []
    unasked = set(answer.layers)
    for index, sides in sorted(expected.items()):
        path = module_paths[index]
        names = [name for name in answer.layers if name == path or name.startswith(path + ".")]
        unasked.difference_update(names)
        for side in SIDES:
            if side not in sides:
                continue
            written = _as_held(side, sides)
            held = answer.layers[names[0]][side] if len(names) == 1 else None
            if held is None:
                problem: str | None = f"vLLM has {len(names)} attention layers under {path}, not one"
            else:
                problem = _scale_problem(written, held)
            findings.append(ScaleFinding(index, side, written, held, problem))
    problems = [f"layer {f.layer} {f.side}_scale: {f.problem}" for f in findings if f.problem]
    problems += [f"vLLM's layer {name} is none whose scales were written" for name in sorted(unasked)]
    return tuple(findings), problems


def _as_held(side: Side, sides: Mapping[Side, Sequence[float]]) -> tuple[float, ...]:
    """Written scales in float32 and in the form that vLLM keeps: Q reduced to one per KV head."""
    written = tuple(array("f", sides[side]))
    groups = len(sides.get("k", sides.get("v", written)))
    if side != "q" or groups == 0 or len(written) % groups:
        return written  # if the lengths do not fit, they will differ from the engine's and be reported
    size = len(written) // groups
    return tuple(max(written[start : start + size]) for start in range(0, len(written), size))


def _scale_problem(written: tuple[float, ...], held: tuple[float, ...]) -> str | None:
    if len(held) != len(written):
        return f"vLLM holds {len(held)} scales where {len(written)} were written"
    for position, (right, found) in enumerate(zip(written, held, strict=True)):
        where = f" for head {position}" if len(held) > 1 else ""
        if not (math.isfinite(found) and found > 0):
            return f"vLLM holds {found:.9g}{where}, which is no scale"
        if found != right:  # both come from float32, so equal means bit-equal
            return f"vLLM holds {found:.9g}{where}, written was {right:.9g}"
    return None


def _default_problems(answer: live_engine.Answer) -> list[str]:
    wrong = [dtype for dtype in answer.default_cache_dtype if not dtype.startswith("fp8")]
    if not wrong:
        return []
    return [f"vLLM keeps a cache of dtype {wrong[0]} unless it is started with --kv-cache-dtype fp8"]


def _fp8_run(
    engine: live_engine.Engine,
    answer: live_engine.Answer,
    expected: Mapping[int, Mapping[Side, Sequence[float]]],
    module_paths: Mapping[int, str],
    asked: _Prompts,
) -> tuple[Fp8Run, list[str]]:
    if answer.fp8_cache_unsupported is not None:
        return Fp8Run(done=False, why_not=answer.fp8_cache_unsupported), []
    try:
        over_fp8 = engine.ask("fp8")
    except CheckFailed as error:  # kernels of this processor do not take every head size
        return Fp8Run(done=False, why_not=str(error)), []
    scales, problems = _compare_scales(expected, module_paths, over_fp8)
    texts = tuple(asked.decode(index, tokens) for index, tokens in enumerate(over_fp8.outputs))
    tokens = tuple(map(tuple, over_fp8.outputs))
    return Fp8Run(True, None, scales, tokens, texts), [f"FP8 cache: {problem}" for problem in problems]


def _compare_texts(
    folder: Path, spec: ModelSpec, asked: _Prompts, answer: live_engine.Answer
) -> tuple[TextFinding, ...]:
    import torch

    from kvcal import models

    model = models.load(folder, spec, torch.device("cpu"), models.Trust())
    with torch.inference_mode():
        return tuple(
            _compare_text(model, asked, index, tokens) for index, tokens in enumerate(answer.outputs)
        )


def _compare_text(model: Any, asked: _Prompts, index: int, tokens: list[int]) -> TextFinding:
    prompt = asked.ids[index]
    reference = _greedy(model, prompt, len(tokens))
    gap, allowed, problem = _worst_gap(model, prompt, tokens)
    differing = (i for i, (ours, theirs) in enumerate(zip(reference, tokens, strict=True)) if ours != theirs)
    return TextFinding(
        prompt=tuple(prompt),
        engine_tokens=tuple(tokens),
        reference_tokens=tuple(reference),
        prompt_text=asked.texts[index],
        engine_text=asked.decode(index, tokens),
        reference_text=asked.decode(index, reference),
        first_difference=next(differing, None),
        gap=gap,
        allowed=allowed,
        problem=problem,
    )


def _greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """``count`` most likely tokens one by one; ``generate`` would add the checkpoint's own sampling rules."""
    import torch

    tokens: list[int] = []
    cache, step = None, prompt
    for _ in range(count):
        out = model(input_ids=torch.tensor([step]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        tokens.append(int(out.logits[0, -1].argmax()))
        step = tokens[-1:]
    return tokens


def _worst_gap(model: Any, prompt: list[int], tokens: list[int]) -> tuple[float, float, str | None]:
    """Gap and bound, in logits, at the position where ``tokens`` stray furthest from the most likely."""
    import torch

    # One pass over prompt and continuation: position i is judged given the engine's own tokens before it,
    # so that a first near-tie does not end the comparison.
    logits = model(input_ids=torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0]
    logits = logits[len(prompt) - 1 :]  # (tokens, vocab)
    outside = [token for token in tokens if not 0 <= token < logits.shape[-1]]
    if outside:
        return math.inf, NEAR_TIE, f"vLLM chose {outside[0]}, which is no token of the model"
    best, best_token = logits.max(-1)
    gap = best - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    step = torch.exp2(torch.frexp(best).exponent - 8.0)  # frexp's mantissa is in [0.5, 1): 8 bits below 1
    allowed = (NEAR_TIE_STEPS * step).clamp(min=NEAR_TIE)
    worst = int((gap / allowed).argmax())  # argmax takes NaN for the largest
    found, bound = float(gap[worst]), float(allowed[worst])
    if found <= bound:
        return found, bound, None
    return (
        found,
        bound,
        f"token {worst + 1}: vLLM chose {tokens[worst]}, which transformers puts {found:.3g} logits below"
        f" {int(best_token[worst])}; BF16 rounding explains {bound:.3g}",
    )
