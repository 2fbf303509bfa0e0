"""What a model does at attention, from one short run of its code without weights.

The model of a config is built on torch's ``meta`` device, where tensors have shapes and no content, and run
on a few tokens: :mod:`kvcal.capture` then meets the same calls as with weights. That tells of every layer
whether it attends, with which heads, window, softcap and sinks, whose K and V it reads, and under which names
its module stands in the model and in checkpoints. It does not tell what numbers would: how RoPE pairs
channels, which rows of which weight become Q, K and V. Those stay unknown here, and what needs them is
refused; a row of :data:`kvcal.families.FAMILIES` states them, and :func:`verify` holds such a row against the
code.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcal import arch, capture, encoder_decoder, families, model_config
from kvcal.arch import LayerSpec, ModelSpec
from kvcal.errors import KvcalError, ModelError, in_one_line
from kvcal.families import Projections

_TOKENS = 8
_SIZES = ("hidden_size", "vocab_size", "max_position_embeddings")
# Rules for RoPE's frequencies that look at how long the text is, which a tensor without content cannot say.
_BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True)
class Seen:
    """One layer at attention.

    Attributes:
        layer: what the code says of it; ``rope`` is ``unknown``, but ``none`` where no positions were handed
            over and ``rotary_dim`` is that of RoPE's cosines.
        softcap: bound of its logits.
        sinks: whether logits of no key are in its softmax.
        key_bias: whether it has a ``k_proj`` with a bias.
        position_bias: whether a bias by distance is added to its logits.
    """

    layer: LayerSpec
    softcap: float | None
    sinks: bool
    key_bias: bool
    position_bias: bool


def read(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a parsed ``config.json``: by its row if the family has one, else by what its code does.

    Raises:
        ModelError: a field is missing or cannot be meant.
        PlanRefused: the model is not one that kvcal handles.
    """
    model_type = families.model_type_of(config)
    if model_type in families.FAMILIES:
        return arch.read(config)
    parsed = _config_of(model_type, config)
    text = parsed.get_text_config(decoder=True)
    seen = observe(parsed)
    # Asked by their common names, which a class may map to its own.
    common = {name: getattr(text, name, None) for name in _SIZES}
    behind_encoder = encoder_decoder.applies(parsed)
    if behind_encoder:
        common["max_position_embeddings"] = encoder_decoder.context(text)
    sizes = {name: model_config.positive_int(common, name) for name in _SIZES}
    windows = {found.layer.window for found in seen} - {None}
    softcaps = {found.softcap for found in seen}
    if len(softcaps) > 1:
        raise families.unhandled(model_type, "bounds logits in some layers alone")
    return ModelSpec(
        model_type=model_type,
        architecture=model_config.architecture_of(config),
        dtype=model_config.dtype_of(config),
        hidden_size=sizes["hidden_size"],
        vocab_size=sizes["vocab_size"],
        max_context=sizes["max_position_embeddings"],
        softcap=softcaps.pop(),
        sliding_window=max(windows, default=None),  # type: ignore[type-var]
        quant_method=model_config.quant_method_of(config),
        projections=None,
        qk_norm="none",
        norm_adds_one=False,
        q_norm="",
        k_norm="",
        key_bias=any(found.key_bias for found in seen),
        layers=tuple(found.layer for found in seen),
        sinks=any(found.sinks for found in seen),
        layers_without_attention=0 if behind_encoder else max(0, text.num_hidden_layers - len(seen)),
        decoder_start=encoder_decoder.decoder_start(parsed) if behind_encoder else None,
        position_bias=any(found.position_bias for found in seen),
    )


def verify(config: Any, spec: ModelSpec, *, trust_remote_code: bool = False) -> None:
    """Hold a spec against the code of its model; ``config`` is what transformers made of ``config.json``.

    Raises:
        ModelError: naming layer and field that differ.
    """
    if spec.projections is None:
        return  # it was read off this very code
    model = build(config, trust_remote_code=trust_remote_code)
    seen = {found.layer.index: found for found in _run(model, spec.model_type)}
    announced = {layer.index: layer for layer in spec.layers}
    for index in sorted(seen.keys() ^ announced.keys()):
        does = "attends, and the table of families says that it does not"
        if index in announced:
            does = "does not attend, and the table of families says that it does"
        raise ModelError(f"layer {index} {does}")
    for index, layer in announced.items():
        for name, found, wanted in _differences(model, spec, layer, seen[index]):
            raise ModelError(
                f"layer {index}: {name} is {found} in the code of {spec.architecture}, the table of families"
                f" says {wanted}"
            )


def observe(config: Any, *, trust_remote_code: bool = False) -> list[Seen]:
    """What each layer that attends does, in the order of their indices.

    Raises:
        PlanRefused: it is not what a decoder's KV cache could be.
        ModelError: transformers cannot build or run the model.
    """
    return _run(build(config, trust_remote_code=trust_remote_code), config.model_type)


def build(config: Any, *, trust_remote_code: bool = False) -> Any:
    """The model of a config without weights.

    Raises:
        PlanRefused: it is no decoder.
        ModelError: transformers cannot build it.
    """
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for section in _sections(config):
        _without_content(section, keep_padding=encoder_decoder.applies(config))
    refusal = _no_decoder(config)
    if refusal:
        raise families.unhandled(config.model_type, refusal)
    try:
        with torch.device("meta"):
            model = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises whatever its classes raise
        raise ModelError(f"config.json: transformers cannot build its model: {in_one_line(error)}") from None
    if capture.knows_interface(model):
        model.config._attn_implementation = "eager"  # its masks are made without a look at padding
    with contextlib.suppress(ValueError, AttributeError):  # a model without experts
        model.set_experts_implementation("batched_mm")  # the one without control flow by content
    return model.eval()


def auto_class(config: Any) -> Any:
    """The class of transformers that makes a model with text at its end of this config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as OF_IMAGES

    if encoder_decoder.applies(config):
        return AutoModelForSeq2SeqLM
    remote = "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    several = config.get_text_config(decoder=True) is not config
    if several and not remote and type(config) in OF_IMAGES:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def _config_of(model_type: str, config: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise families.unhandled(
            model_type,
            "is not a family that transformers has a class for; the model's own code may have one, but kvcal"
            " runs only for the families that it knows: " + ", ".join(sorted(families.FAMILIES)),
        )
    for section in (config, config.get("text_config")):
        if isinstance(section, Mapping):
            model_config.bounded_layers(section)
    try:
        kind = CONFIG_MAPPING[model_type]
        return kind.from_dict(kind._decode_special_floats(dict(config)))
    except Exception as error:  # transformers raises whatever its validators raise
        raise ModelError(f"config.json: transformers refuses it: {in_one_line(error)}") from None


def _sections(config: Any) -> list[Any]:
    return [config, *(inner for name in config.sub_configs if (inner := getattr(config, name, None)))]


def _without_content(config: Any, *, keep_padding: bool) -> None:
    """Leave out what makes code look into tensors; some encoders count positions from padding, blindly."""
    if not keep_padding:
        with contextlib.suppress(Exception):  # configs that insist on a token have no such look at it
            config.pad_token_id = None  # is the text padded?
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict):
        for section in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):
            if section.get("rope_type") in _BY_LENGTH:
                section["rope_type"] = "default"


def _no_decoder(config: Any) -> str | None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    if encoder_decoder.applies(config):
        return encoder_decoder.refusal(config)
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    if not getattr(config, "auto_map", None) and not any(type(config) in mapping for mapping in mappings):
        return "is no decoder of text, so it has no KV cache"
    return None


@torch.no_grad()
def _run(model: Any, model_type: str) -> list[Seen]:
    calls: list[capture.AttentionCall] = []
    rotations: dict[int, int] = {}
    names = {module: name for name, module in model.named_modules()}

    def see(call: capture.AttentionCall) -> None:
        calls.append(call)
        if call.rotary is not None:
            rotations[call.layer] = call.rotary[0].shape[-1]

    inputs = {"input_ids": torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")}
    if encoder_decoder.applies(model.config):
        inputs = encoder_decoder.probe_inputs()
    try:
        with capture.intercept(model, see, rotary=True):
            model.base_model(**inputs, use_cache=True)
    except KvcalError:
        raise
    except Exception as error:  # whatever modeling code raises
        raise families.unhandled(
            model_type, f"cannot be run without weights, to see what it does: {in_one_line(error)}"
        ) from None
    reasons = [why for why in _oddities(calls, model) if why]
    if reasons:
        raise families.unhandled(model_type, reasons[0])
    owners: dict[int, int] = {}
    found = []
    for call in calls:
        owner = owners.setdefault(id(call.key), call.layer)
        shares = owner if owner != call.layer else None
        found.append(_seen(call, names, model, rotations.get(call.layer), shares))
    return sorted(found, key=lambda each: each.layer.index)


def _seen(
    call: capture.AttentionCall,
    names: Mapping[torch.nn.Module, str],
    model: Any,
    rotary_dim: int | None,
    shares: int | None,
) -> Seen:
    module = call.module
    assert module is not None
    name = names[module]
    stored = _name_in_checkpoints(model, module, name)
    layer = LayerSpec(
        index=call.layer,
        kind="full" if call.window is None else "sliding",
        module=name,
        heads=call.query.shape[1],
        kv_heads=call.key.shape[1],
        head_dim=call.query.shape[3],
        rope="none" if rotary_dim is None else "unknown",
        rotary_dim=rotary_dim or 0,
        window=call.window,
        shares=shares,
        stored=None if stored == name else stored,
        own_tensors=tuple(sorted(n for n, _ in module.named_parameters(recurse=False))),
        cross=call.cross,
    )
    bias = getattr(getattr(module, "k_proj", None), "bias", None)
    return Seen(layer, call.softcap, call.sinks is not None, bias is not None, call.bias is not None)


def _oddities(calls: Sequence[capture.AttentionCall], model: Any) -> Iterator[str]:
    """What of the calls does not fit a KV cache with one entry per layer."""
    if not calls:
        yield (
            "computes attention by code of its own, neither through transformers' interface nor by"
            " scaled_dot_product_attention, so kvcal cannot see K and V"
        )
    yield from encoder_decoder.oddities(calls, model.config)
    layers = [call.layer for call in calls]
    if not all(isinstance(layer, int) for layer in layers):
        yield "has attention that knows no layer index"
    elif min(layers, default=0) < 0:
        yield "has attention in blocks that several layers use, which know no index of a cache"
    elif len(set(layers)) < len(layers):
        yield f"attends more than once in layer {min(x for x in layers if layers.count(x) > 1)}"
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    if "chunked_attention" in kinds:
        yield "attends in chunks (layer_types chunked_attention), which kvcal does not emulate"
    known = model.config.model_type in families.FAMILIES
    for call in calls:
        if call.expansion is not None:
            if not known:
                yield "caches a latent in a way of its own; kvcal knows that of deepseek_v2 and deepseek_v3"
            continue
        if call.key.shape[3] != call.value.shape[3]:
            sizes = f"{call.key.shape[3]} and {call.value.shape[3]}"
            yield f"has heads of K and V of different size ({sizes}), which no format here describes"
        if not getattr(call.module, "is_causal", True) and not call.cross:
            yield "attends to later tokens too"
        if call.key.shape[2] != call.query.shape[2] and not call.cross:
            yield f"attends to {call.key.shape[2]} keys for {call.query.shape[2]} tokens"


def _name_in_checkpoints(model: Any, module: torch.nn.Module, name: str) -> str:
    """Where checkpoints keep the module's weights; transformers renames some as it loads them."""
    from transformers.core_model_loading import revert_weight_conversion

    parameter, tensor = next(iter(module.named_parameters()), (None, None))
    if parameter is None:
        return name
    (found,) = revert_weight_conversion(model, {f"{name}.{parameter}": tensor})
    return str(found).removesuffix(f".{parameter}")


def _differences(model: Any, spec: ModelSpec, layer: LayerSpec, seen: Seen) -> Iterator[tuple[str, Any, Any]]:
    """Field, what the code does, what the spec says."""
    for name in ("module", "kind", "window", "heads", "kv_heads", "head_dim", "shares", "own_tensors"):
        yield from _differs(name, getattr(seen.layer, name), getattr(layer, name))
    if layer.rope != "none":  # layers that do not rotate may be handed positions too
        each = 2 if families.FAMILIES[spec.model_type].cosines == "pair" else 1
        yield from _differs("rotary_dim", seen.layer.rotary_dim * each, layer.rotary_dim)
    yield from _differs("softcap", seen.softcap, spec.softcap)
    yield from _differs("sinks", seen.sinks, spec.sinks)
    names = spec.projections
    assert names is not None
    if layer.latent is not None:
        return  # which is proven where it is folded
    for path, shape in _shapes(spec, layer, names).items():
        weight = getattr(_submodule(model, f"{layer.module}.{path}"), "weight", None)
        yield from _differs(f"{path}.weight", None if weight is None else tuple(weight.shape), shape)
    bias = getattr(_submodule(model, f"{layer.module}.{names.k}"), "bias", None)
    yield from _differs("key_bias", bias is not None, spec.key_bias)


def _differs(name: str, found: Any, wanted: Any) -> Iterator[tuple[str, Any, Any]]:
    if found != wanted:
        yield name, found, wanted


def _shapes(spec: ModelSpec, layer: LayerSpec, names: Projections) -> dict[str, tuple[int, ...]]:
    """Weight of an attention module -> its shape, by the spec."""
    q, kv = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    rows = {names.q: 2 * q if spec.output_gate else q, names.k: kv, names.v: kv}
    if names.fused != "no":
        rows = {names.q: q + 2 * kv}
    found = {path: (count, spec.hidden_size) for path, count in rows.items()}
    found[names.o] = (spec.hidden_size, q)
    if names.transposed:
        found = {path: (inner, outer) for path, (outer, inner) in found.items()}
    gains: dict[str, tuple[int, ...]] = {}
    if spec.qk_norm == "head":
        gains = {spec.q_norm: (layer.head_dim,), spec.k_norm: (layer.head_dim,)}
    elif spec.qk_norm == "full":
        gains = {spec.q_norm: (q,), spec.k_norm: (kv,)}
    return {**found, **gains}


def _submodule(model: Any, path: str) -> Any:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None
