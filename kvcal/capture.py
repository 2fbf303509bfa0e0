"""One context manager that sees Q, K and V of every attention layer, and may replace them.

It enters through transformers' ``AttentionInterface``: every layer hands its tensors, after RoPE and
QK-norm and before heads are repeated for GQA, to one function. kvcal puts its own in front of the one the
model uses, and afterwards leaves model and registry as they were. A model whose code never looks at that
interface is met where it calls torch's ``scaled_dot_product_attention``. Of a layer that caches a latent
it shows the latent, and puts what comes back through the layer's up-projection again. Of a model with an
encoder it shows what has a cache: both attentions of each decoder layer.

What a layer hands over is brought to the form in which engines hold it: Q without a softmax scale that the
layer has multiplied in beforehand, K and V without heads that the layer has repeated.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from kvcal import encoder_decoder, expansion
from kvcal.encoder_decoder import Role
from kvcal.errors import ModelError
from kvcal.expansion import Cached, Expansion
from kvcal.kernels import reference

_names = (f"kvcal_{n}" for n in itertools.count())


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class AttentionCall:
    """What one layer is about to attend with.

    ``query`` is ``(batch, heads, tokens, head_dim)``, ``key`` and ``value`` are
    ``(batch, kv_heads, tokens, head_dim)``. ``window`` counts visible keys, the query's own included.
    ``rotary`` is what RoPE multiplied Q and K by, ``(cos, sin)``, each ``(1 or batch, tokens, rotary_dim)``;
    None in a layer without positions, or if it was not asked for. ``sinks`` are the logits, one per query
    head, that stand in each softmax beside those of the keys and lead to no value; None where there are none.
    ``module`` is the attention module. ``cross``: K and V are of the encoder's tokens, all of which every
    query sees. ``bias`` ``(1 or batch, heads, tokens, keys)`` is added to the logits, as T5 adds one by
    distance; None where nothing is.

    With an ``expansion``, ``key`` is the cached latent ``(batch, 1, tokens, rank)`` and ``value`` the rotary
    key ``(batch, 1, tokens, rotary)``; ``query`` has the up-projection absorbed and meets both,
    ``(batch, heads, tokens, rank + rotary)``.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    window: int | None
    softcap: float | None
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    sinks: torch.Tensor | None = None
    module: torch.nn.Module | None = None
    expansion: Expansion | None = None
    cross: bool = False
    bias: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether it is causal attention by nothing but Q and K, which is all that kernels know."""
        return not self.cross and self.bias is None

    @property
    def geometry(self) -> dict[str, Any]:
        """Keyword arguments of :func:`kvcal.kernels.reference.attention`; of a kernel's too, if ``plain``."""
        return {
            "scaling": self.scaling,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": self.sinks,
        } | ({} if self.plain else {"causal": not self.cross, "bias": self.bias})

    def attended(self, replaced: Tensors | None = None) -> Tensors:
        """Q, K and V to attend with where ``replaced`` is in place of ``query``, ``key`` and ``value``."""
        query, key, value = replaced or (self.query, self.key, self.value)
        if self.expansion is None:
            return query, key, value
        return self.expansion.attended(None if query is self.query else query, key, value)


@dataclass(frozen=True)
class Versions:
    """Several versions of each cached token, of which every query sees the one that it would find.

    ``keys`` and ``values`` hold one tensor ``(batch, kv_heads, tokens, head_dim)`` per version; ``seen`` one
    mask ``(tokens, tokens)`` bool each, which query meets which key in this version. The layer's own mask
    still applies on top.
    """

    query: torch.Tensor
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    seen: tuple[torch.Tensor, ...]


See = Callable[[AttentionCall], Tensors | Versions | None]
After = Callable[[AttentionCall, torch.Tensor], None]


@contextmanager
def intercept(model: Any, see: See, *, rotary: bool = False, after: After | None = None) -> Iterator[None]:
    """Call ``see`` for each attention layer of each forward pass inside the context.

    ``see`` returns None to let the layer go on as it was, ``(query, key, value)`` to put in place, or
    :class:`Versions`. The model's own attention function then runs on them, so results without replacement
    are bit-identical. ``rotary`` also hands over RoPE's cosines and sines. ``after`` is told what attention
    gave, ``(batch, heads, tokens, head_dim)``.
    """
    rotations: dict[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    def seen(call: AttentionCall) -> Tensors | Versions | None:
        return see(replace(call, rotary=rotations.get(call.module)))  # type: ignore[arg-type]

    latents: Cached = {}
    hooks = expansion.note_cached(model, latents)
    if rotary:
        hooks += _note_rotations(model, rotations)
    try:
        route = _through_interface if knows_interface(model) else _Direct
        with route(model, seen, after or _not_told, latents):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _not_told(call: AttentionCall, output: torch.Tensor) -> None:
    return None


def knows_interface(model: Any) -> bool:
    """Whether code of the model's attention modules can enter transformers' interface."""
    code = {sys.modules[type(module).__module__] for module in _attention_modules(model)}
    return any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in code)


def _attention_modules(model: Any) -> list[torch.nn.Module]:
    """Those that know their layer; decoder layers of some models and other mixers are among them."""
    return [module for module in model.modules() if hasattr(module, "layer_idx")]


@contextmanager
def _through_interface(model: Any, see: See, after: After, latents: Cached) -> Iterator[None]:
    # A model of several modalities attends to text by the config of its text decoder.
    roles = encoder_decoder.roles(model)
    # A decoder may have a copy of its model's config, or share it with the encoder.
    config = model.config.get_text_config(decoder=True) if roles is None else model.get_decoder().config
    own_name = config._attn_implementation
    name = next(_names)

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> Any:
        own = _own_function(own_name, module)
        if roles is not None and module not in roles:  # of the encoder
            return own(module, query, key, value, attention_mask, **kwargs)
        found = _as_engines_hold_it(module, query, key, value, kwargs, latents, roles)
        query, key, value, attention_mask = found.replaced(see(found.call), attention_mask)
        given = own(module, query, key, value, attention_mask, **kwargs)
        after(found.call, given[0].transpose(1, 2))
        return given

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[own_name])
    try:
        config._attn_implementation = name
        yield
    finally:
        config._attn_implementation = own_name
        del AttentionInterface._global_mapping[name]
        del AttentionMaskInterface._global_mapping[name]


def _of_latent(
    call: AttentionCall, module: torch.nn.Module, latent: torch.Tensor, rotary: torch.Tensor
) -> AttentionCall:
    expansion = Expansion(module, call.query)
    return replace(call, query=expansion.absorbed(), key=latent, value=rotary, expansion=expansion)


_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class _Direct(TorchFunctionMode):
    """Meets each call of ``scaled_dot_product_attention`` and knows inside which module it happens."""

    def __init__(self, model: Any, see: See, after: After, latents: Cached):
        super().__init__()
        self._see, self._after, self._latents = see, after, latents
        self._inside: list[torch.nn.Module] = []
        self._roles = encoder_decoder.roles(model)
        self._modules = list(self._roles) if self._roles is not None else _attention_modules(model)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> _Direct:
        for module in self._modules:
            self._hooks.append(module.register_forward_pre_hook(lambda m, _: self._inside.append(m)))
            leave = module.register_forward_hook(self._leave, always_call=True)
            self._hooks.append(leave)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def _leave(self, *_: Any) -> None:
        self._inside.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or not self._inside:
            return func(*args, **kwargs)
        given = dict(zip(_SDPA, args, strict=False))
        given |= kwargs
        query, key, value = (given.pop(name) for name in ("query", "key", "value"))
        found = _as_engines_hold_it(
            self._inside[-1], query, key, value, {"scaling": given.get("scale")}, self._latents, self._roles
        )
        query, key, value, mask = found.replaced(self._see(found.call), given.pop("attn_mask", None))
        if mask is not None:
            given["is_causal"] = False  # the mask says so too
        output = func(query, key, value, attn_mask=mask, **given)
        self._after(found.call, output)
        return output


@dataclass(frozen=True)
class _Handed:
    """What a layer handed over, as a call in the form of engines, and the way back.

    ``factor`` is the softmax scale that was in Q already; ``repeated`` how often each head of K and V comes.
    """

    call: AttentionCall
    given: Tensors
    factor: float
    repeated: int

    def replaced(
        self, replaced: Tensors | Versions | None, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Q, K, V and the mask to attend with, in the layer's own form."""
        if replaced is None:
            return *self.given, mask
        if isinstance(replaced, Versions):
            query, key, value, mask = _side_by_side(replaced, mask, self.call.window)
        else:
            query, key, value = self.call.attended(replaced)
        query = self.given[0] if query is self.call.query else query * self.factor
        key, value = (x.repeat_interleave(self.repeated, 1) if self.repeated > 1 else x for x in (key, value))
        return query, key, value, mask


def _as_engines_hold_it(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kwargs: dict[str, Any],
    latents: Cached,
    roles: Mapping[torch.nn.Module, Role] | None,
) -> _Handed:
    scaling = kwargs.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    own, factor = getattr(module, "scaling", scaling), 1.0
    if scaling == 1.0 and isinstance(own, float) and own != 1.0:
        scaling = factor = own  # Q has it already, and the call says 1 in its place
    repeated = _repetitions(module, key, value)
    role = Role(module.layer_idx, False) if roles is None else roles[module]  # type: ignore[arg-type]
    call = AttentionCall(
        layer=role.index,
        query=query if factor == 1.0 else query / factor,
        key=key if repeated == 1 else key[:, ::repeated],
        value=value if repeated == 1 else value[:, ::repeated],
        scaling=scaling,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        module=module,
        cross=role.cross,
        bias=kwargs.get("position_bias"),
    )
    if module in latents:
        call = _of_latent(call, module, *latents.pop(module))
    return _Handed(call, (query, key, value), factor, repeated)


def _repetitions(module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor) -> int:
    """How often each head of K and V comes, where a module says that it has fewer.

    Raises:
        ModelError: heads that ought to be one differ.
    """
    heads = getattr(module, "num_kv_heads", key.shape[1])
    if not isinstance(heads, int) or heads < 1 or heads == key.shape[1] or key.shape[1] % heads:
        return 1
    repeated = key.shape[1] // heads
    for x in (key, value):
        if not x.is_meta and not torch.equal(x[:, ::repeated].repeat_interleave(repeated, 1), x):
            raise ModelError(
                f"layer {module.layer_idx}: {x.shape[1]} heads of K and V are no copies of {heads}, which"
                f" {type(module).__name__} says it has"
            )
    return repeated


def _own_function(name: str, module: torch.nn.Module) -> Callable[..., Any]:
    if name in ALL_ATTENTION_FUNCTIONS:
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[name]
        return function
    # Eager attention is no member of the registry: each modeling file defines its own.
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise ModelError(f"{type(module).__name__} defines no eager attention to capture from")
    return own  # type: ignore[no-any-return]


def _side_by_side(
    versions: Versions, mask: torch.Tensor | None, window: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every version as further keys, with a mask that leaves each query one of them."""
    key = versions.keys[0]
    tokens = key.shape[2]
    if mask is None:  # the fast causal path, without padding
        mask = reference.visible(tokens, tokens, window, key.device)[None, None]
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ModelError(
            f"a mask of {mask.dtype} cannot be split by the age of keys; use sdpa or eager attention"
        )
    parts = []
    for seen in versions.seen:
        if mask.dtype == torch.bool:
            parts.append(mask & seen)
        else:
            parts.append(mask.masked_fill(~seen, torch.finfo(mask.dtype).min))
    return versions.query, torch.cat(versions.keys, 2), torch.cat(versions.values, 2), torch.cat(parts, -1)


def _note_rotations(
    model: Any, found: dict[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Keep the last ``position_embeddings`` that each attention module was called with."""

    def note(module: torch.nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
        given = kwargs.get("position_embeddings")
        if isinstance(given, torch.Tensor):  # DeepSeek-V2: cos + i sin, once per pair of neighbours
            given = (given.real.repeat_interleave(2, -1), given.imag.repeat_interleave(2, -1))
        if given is not None:
            found[module] = given

    attention = _attention_modules(model)
    return [module.register_forward_pre_hook(note, with_kwargs=True) for module in attention]
