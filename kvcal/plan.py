"""Crosses recipe, model and engine. Whatever cannot work is refused here, before a weight is loaded."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvcal import engines, exactness, formats, granularity
from kvcal.arch import LayerSpec, ModelSpec
from kvcal.engine_spec import Deliver, EngineSpec, Verdict
from kvcal.errors import PlanRefused
from kvcal.formats import REFERENCE_BITS, KVFormat
from kvcal.granularity import Granularity
from kvcal.recipe import MIN_TOKENS, SIDES, Folds, Mixed, Recipe, Side


@dataclass(frozen=True)
class Plan:
    """A calibration that can be carried out and whose result the engine will load.

    ``granularity`` is that of the static scales to be written; None where none are. ``skipped_layers`` stay
    in 16 bits; which ones a mixed recipe leaves to what is measured, and until then there are none.
    """

    recipe: Recipe
    model: ModelSpec
    engine: EngineSpec
    format: KVFormat
    deliver: Deliver
    granularity: Granularity | None
    seq_len: int
    evaluation_seq_len: int
    notices: tuple[str, ...]
    skipped_layers: tuple[int, ...] = ()

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self.model.layers

    @property
    def folds(self) -> bool:
        """Whether weights are to be changed."""
        return self.deliver != "metadata"

    @property
    def scaling(self) -> str:
        """How elements are scaled, in a word."""
        if self.granularity is not None:
            return self.granularity.name
        return "per_token_head" if self.format.dynamic else "scale 1.0"

    @property
    def bytes_per_token_reference(self) -> float:
        """Bytes that one token adds to a 16-bit cache, over all layers."""
        return self.model.cached_elements_per_token * REFERENCE_BITS / 8

    @property
    def bytes_per_token_quantized(self) -> float:
        """The same in the planned format but for skipped layers. Static scales belong to no token."""
        bits = bits_over(self.model.layers_grown_by(encoder=False), self.format, self.skipped_layers)
        return self.model.cached_elements_per_token * bits / 8

    @property
    def bytes_per_encoder_token(self) -> tuple[float, float]:
        """Bytes that one token of the encoder adds to the caches of cross-attention, 16 bits and planned."""
        layers = self.model.layers_grown_by(encoder=True)
        elements = self.model.cached_elements_per_encoder_token
        bits = bits_over(layers, self.format, self.skipped_layers) if layers else 0.0
        return elements * REFERENCE_BITS / 8, elements * bits / 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of all K, V and Q scales that are written, whatever the number of tokens."""
        if self.granularity is None:
            return 0
        shapes = (
            self.granularity.scale_shape(layer.heads_of(side), layer.size_of(side))
            for layer in self.layers
            for side in self.scaled_sides
        )
        return 4 * sum(math.prod(shape) for shape in shapes)

    @property
    def scaled_sides(self) -> tuple[Side, ...]:
        """Which of K, V and Q have scales of their own."""
        if self.format.latent_only:
            return ("k",)
        # To kernels a cached latent and its rotary key are one vector.
        return SIDES if self.model.latent is None else ("k", "q")

    @property
    def bits_per_element(self) -> float:
        """Bits per cached element at the model's full context, all scales included."""
        elements = self.model.elements_held(self.model.max_context)
        return self._bits + 8 * self.scale_bytes / elements

    @property
    def bytes_at_full_context(self) -> tuple[float, float]:
        """Bytes of one sequence as long as the model takes, in 16 bits and in the planned format.

        Layers with a window hold so many tokens of it, layers that read another one's cache none.
        """
        elements = self.model.elements_held(self.model.max_context)
        return elements * REFERENCE_BITS / 8, elements * self._bits / 8 + self.scale_bytes

    @property
    def _bits(self) -> float:
        return bits_over(self.layers, self.format, self.skipped_layers, self.model.max_context)


def bits_over(
    layers: Sequence[LayerSpec], fmt: KVFormat, skipped: Collection[int] = (), context: int = 1
) -> float:
    """Bits per cached element of these layers in a sequence of ``context`` tokens: codes, and the scales of a
    dynamic format; 16 in a skipped layer.
    """
    total = sum(_layer_bits(layer, fmt, layer.index in skipped, context) for layer in layers)
    return total / sum(layer.elements_held(context) for layer in layers)


def _layer_bits(layer: LayerSpec, fmt: KVFormat, skipped: bool, context: int) -> float:
    """Bits that a layer's own cache holds of a sequence."""
    if skipped:
        return REFERENCE_BITS * layer.elements_held(context)
    if not layer.cached_elements:
        return 0.0
    bits = 0.0
    for side in ("k", "v"):
        size = layer.size_of(side)
        in_16_bits = fmt.latent_only and side == "v"
        each = REFERENCE_BITS if in_16_bits else fmt.bits_per_element + fmt.scale_bits / size
        bits += layer.kv_heads * size * each
    return bits * layer.elements_held(context) / layer.cached_elements


def resolve(recipe: Recipe, model: ModelSpec) -> Plan:
    """Make the plan.

    Raises:
        PlanRefused: with every reason found, each saying what would work.
    """
    engine = engines.get(recipe.engine)
    fmt = formats.get(recipe.format)
    deliver = recipe.deliver or engine.deliveries(fmt, model)[0]
    static = not fmt.dynamic and deliver != "fold"
    gran = granularity.get(recipe.granularity or "per_tensor") if static else None
    reasons = engine.refusals(model, fmt, gran, deliver)
    if engine.standalone and deliver != "metadata":
        reasons.append(f"{engine.name} has no weights to fold into; leave --deliver {deliver} out")
    if gran is None and recipe.granularity is not None:
        what = (
            f"{fmt.name} is scaled per token and head by the engine"
            if fmt.dynamic
            else ("with --deliver fold the engine scales by 1.0")
        )
        reasons.append(f"{what}, so --granularity {recipe.granularity} has no effect; leave it out")
    if recipe.schemes:
        reasons.append("the recipe names schemes to compare; use kvcal compare --recipe")
    if fmt.block and static and recipe.scale.objective != "amax":
        reasons.append(f"scale.objective {recipe.scale.objective} is not measured for {fmt.name}; use amax")
    if model.latent is not None and static and recipe.scale.objective != "amax":
        reasons.append(
            f"scale.objective {recipe.scale.objective} is not measured for a cached latent; use amax"
        )
    if static and recipe.scale.objective == "attention" and model.projections is None:
        reasons.append(
            f"scale.objective attention weighs V by what reads it, which for {model.model_type} is not known;"
            " use amax"
        )
    reasons += _about_transforms(recipe, model, engine, deliver)
    if recipe.mixed is not None:
        reasons += _about_mixed(recipe.mixed, model, engine, fmt)
    if model.encoder_decoder:
        reasons += _about_encoders(recipe, model, fmt, static=static)
    if model.max_context < MIN_TOKENS:
        reasons.append(
            f"the model's context of {model.max_context} tokens is shorter than the {MIN_TOKENS} of a sample;"
            " is max_position_embeddings right?"
        )
    if reasons:
        raise PlanRefused(reasons)
    lengths, notices = sample_lengths(recipe, model)
    if fmt.name in engine.approximations:
        notices = (*notices, f"{engine.title}: {engine.approximations[fmt.name]}")
    return Plan(
        recipe=recipe,
        model=model,
        engine=engine,
        format=fmt,
        deliver=deliver,
        granularity=gran,
        seq_len=lengths["calibration"],
        evaluation_seq_len=lengths["evaluation"],
        notices=notices,
    )


@dataclass(frozen=True)
class EngineVerdict:
    """One engine's answer to a recipe."""

    engine: EngineSpec
    deliver: Deliver
    verdict: Verdict


def verdicts(recipe: Recipe, model: ModelSpec) -> list[EngineVerdict]:
    """What every engine would make of a recipe; its own ``engine`` does not count.

    A recipe that does not say how it is delivered gets the way that each engine reads.
    """
    fmt = formats.get(recipe.format)
    found = []
    for engine in engines.ENGINES:
        deliver = recipe.deliver or engine.deliveries(fmt, model)[0]
        static = not fmt.dynamic and deliver != "fold"
        gran = granularity.get(recipe.granularity or "per_tensor") if static else None
        found.append(EngineVerdict(engine, deliver, engine.verdict(model, fmt, gran, deliver)))
    return found


def _about_encoders(recipe: Recipe, model: ModelSpec, fmt: KVFormat, *, static: bool) -> list[str]:
    """What kvcal does for decoders alone."""
    reasons = []
    if static and recipe.scale.objective != "amax":
        reasons.append(
            f"scale.objective {recipe.scale.objective} is not measured behind an encoder; use amax"
        )
    if recipe.weights is not None:
        reasons.append(
            f"weights: {model.model_type} is an encoder-decoder, and llm-compressor is run on decoders alone;"
            " leave weights out"
        )
    lengths, _ = sample_lengths(recipe, model)
    for name, text in (("calibration", recipe.calibration), ("evaluation", recipe.evaluation)):
        half = (lengths[name] + 1) // 2
        if half > text.chunk:
            reasons.append(
                f"{name}.chunk {text.chunk}: an encoder-decoder reads its samples whole, {half} tokens in a"
                f" half; give a chunk of {half} or more, or a --seq-len of {2 * text.chunk} or less"
            )
    return reasons


def sample_lengths(recipe: Recipe, model: ModelSpec) -> tuple[dict[str, int], tuple[str, ...]]:
    """Tokens per sample for ``calibration`` and ``evaluation``, and what the user should know about them.

    Behind an encoder a sample is two halves, each as long as the model takes.
    """
    notices: list[str] = []
    lengths = {}
    longest, what = model.max_context, "the model's context"
    if model.encoder_decoder:
        longest, what = 2 * model.max_context, "the contexts of encoder and decoder"
        notices.append(
            "each sample is cut in two: the encoder reads the first half, the decoder is given the second"
            f" behind token {model.decoder_start}"
        )
    for name, wanted in (
        ("calibration", recipe.calibration.seq_len),
        ("evaluation", recipe.evaluation.seq_len),
    ):
        lengths[name] = min(wanted, longest)
        if wanted > longest:
            notices.append(f"{name}: samples are cut from {wanted} to {longest} tokens, {what}")
    return lengths, tuple(notices)


def _about_mixed(mixed: Mixed, model: ModelSpec, engine: EngineSpec, fmt: KVFormat) -> list[str]:
    if not engine.skips_layers:
        return [f"mixed: {engine.name} keeps one format in all layers; leave mixed out"]
    if model.shares_caches:
        return [
            "mixed: some layers of this model read another layer's cache, which cannot be in the formats of"
            " both; leave mixed out"
        ]
    if mixed.bits_budget is None:  # with every layer in 16 bits any KL is kept
        return []
    fewest = bits_over(model.layers, fmt, context=model.max_context)
    if mixed.bits_budget < fewest:
        return [
            f"mixed.bits_budget {mixed.bits_budget:g} is below the {fewest:g} bits per element of {fmt.name},"
            f" and {engine.name} can only leave layers in {REFERENCE_BITS} bits; allow {fewest:g} or more, or"
            " choose another format"
        ]
    if mixed.bits_budget >= REFERENCE_BITS:
        return [
            f"mixed.bits_budget {mixed.bits_budget:g} leaves the whole cache in {REFERENCE_BITS} bits;"
            f" give {fewest:g} or more and less than {REFERENCE_BITS}"
        ]
    return []


def _about_transforms(recipe: Recipe, model: ModelSpec, engine: EngineSpec, deliver: Deliver) -> list[str]:
    if deliver == "metadata" or model.projections is None:
        return []
    why_not = exactness.table(model)
    return [
        f"folds.transforms: {name} cannot be folded into {model.model_type} exactly: {why_not[name]}"
        + ("" if engine.executes_online else f"; and {engine.name} ignores what it would have to do online")
        for name in recipe.folds.transforms
        # The default list is what kvcal would try; it leaves out by itself what this model cannot take.
        if why_not[name] is not None and recipe.folds.transforms != Folds().transforms
    ]


def advice(plan: Plan) -> list[str]:
    """Formats of the engine that are worth a look for this model, with the reasons."""
    engine, model = plan.engine, plan.model
    if model.latent is not None:
        return [f"{name}: {engine.name} stores a cached latent so" for name in engine.latent_formats]
    if not {"int8_per_token_head", "fp8_e4m3"} <= engine.decode_time.keys():
        return []
    slow = engine.decode_time["int8_per_token_head"] / engine.decode_time["fp8_e4m3"]
    int8 = (
        "int8_per_token_head with --deliver fold: nearly FP8's bytes, and about 9 dB less error once folds"
        f" have balanced Q and K; {engine.name} scales it online, in a kernel whose decode attention takes"
        f" up to {slow:.0f} times that of FP8 at long context"
    )
    fp8 = "fp8: the fastest cache of this engine"
    if model.key_bias:
        return [
            f"{int8}; recommended here, since K has biases and FP8's error grows with them at every scale",
            f"{fp8}; fold first (--deliver both) and look at the KL with Q rounded",
        ]
    return [
        f"{fp8}; recommended where long-context speed counts",
        f"{int8}; recommended where fidelity counts",
    ]
