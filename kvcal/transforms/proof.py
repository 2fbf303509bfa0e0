"""Shows that a fold changes nothing: the model's own attention blocks in float64, before and after."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvcal.arch import LayerSpec, ModelSpec
from kvcal.errors import ModelError
from kvcal.transforms import weights
from kvcal.transforms.record import LayerTransform, Transforms

TOLERANCE = 1e-10
_TOKENS = 24


def block_errors(model: Any, spec: ModelSpec, transforms: Transforms, *, seed: int = 0) -> dict[int, float]:
    """``‖y' - y‖ / ‖y‖`` of each folded layer's attention block in float64, on random hidden states.

    The block is the model's own module, called with the positions and the mask that the model itself hands
    to it; only its weights are folded.
    """
    calls = _calls(model, spec)
    generator = torch.Generator().manual_seed(seed)
    errors = {}
    for layer in spec.layers:
        if layer.index in transforms.layers:
            hidden = torch.randn(1, _TOKENS, spec.hidden_size, generator=generator, dtype=torch.float64)
            errors[layer.index] = _block_error(
                model, spec, layer, transforms.layers[layer.index], calls[layer.index], hidden
            )
    return errors


def require_exact(errors: dict[int, float]) -> None:
    """Refuse folds that are not exact.

    Raises:
        ModelError: naming the layer with the largest error.
    """
    worst = max(errors, key=lambda index: errors[index], default=None)
    if worst is not None and not errors[worst] <= TOLERANCE:
        raise ModelError(
            f"layer {worst}: folding changes its attention by {errors[worst]:.2g} in float64, more than"
            f" {TOLERANCE:g}; its code does more to Q, K or V than config.json says; fold nothing of it"
        )


class FoldedWeights:
    """A model's folded weights, ready to be put in place of its own: ``with folded(): model(...)``.

    Both versions of the touched weights are in memory as long as this object is.
    """

    def __init__(
        self, model: Any, spec: ModelSpec, transforms: Transforms, stored: torch.dtype | None = None
    ):
        """``stored`` is the checkpoint's dtype: weights take its rounding before they return to their own."""
        with torch.inference_mode(False), torch.no_grad():  # a parameter cannot hold an inference tensor
            self._swaps = [
                (parameter, parameter.data, new)
                for layer in spec.layers
                if layer.index in transforms.layers
                for parameter, new in _folded_parameters(
                    model, spec, layer, transforms.layers[layer.index], stored
                )
            ]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Folded inside the context, as it was after it."""
        try:
            for parameter, _, new in self._swaps:
                parameter.data = new
            yield
        finally:
            for parameter, old, _ in self._swaps:
                parameter.data = old


def rounded_again(model: Any, spec: ModelSpec, transforms: Transforms, stored: torch.dtype) -> FoldedWeights:
    """Folded weights, rounded once more: there and back by a factor that no dtype holds.

    What this does to the folded model is the noise of rounding such weights, in the basis that they are in.
    """
    rounded = FoldedWeights(model, spec, transforms, stored)
    factor = 2.0**0.5
    with torch.inference_mode(False), torch.no_grad():
        rounded._swaps = [
            (parameter, old, ((new.double() * factor).to(stored).double() / factor).to(stored).to(old.dtype))
            for parameter, old, new in rounded._swaps
        ]
    return rounded


def _folded_parameters(
    root: Any, spec: ModelSpec, layer: LayerSpec, transform: LayerTransform, stored: torch.dtype | None
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    for name, fold in weights.folds(spec, layer, transform).items():
        module, _, leaf = name.rpartition(".")
        parameter = getattr(root.get_submodule(module), leaf, None)
        if parameter is None:
            continue  # a bias that this model does not have
        source = parameter.data if stored is None else parameter.data.to(stored)
        yield parameter, fold(source).to(parameter.dtype)


class _Calls(dict[int, tuple[tuple[Any, ...], dict[str, Any]]]):
    """Layer -> what its attention module was called with."""


@torch.no_grad()
def _calls(model: Any, spec: ModelSpec) -> _Calls:
    calls = _Calls()
    handles = []
    for layer in spec.layers:

        def remember(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int = layer.index) -> None:
            calls[index] = (args, kwargs)

        module = model.get_submodule(layer.module)
        handles.append(module.register_forward_pre_hook(remember, with_kwargs=True))
    try:
        tokens = torch.arange(_TOKENS, device=model.device)[None] % spec.vocab_size
        model.base_model(input_ids=tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return calls


@torch.no_grad()
def _block_error(
    model: Any,
    spec: ModelSpec,
    layer: LayerSpec,
    transform: LayerTransform,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    hidden: torch.Tensor,
) -> float:
    block = copy.deepcopy(model.get_submodule(layer.module)).double()
    args, kwargs = _in_float64(call)
    hidden = hidden.to(model.device)
    if args:
        args = (hidden, *args[1:])
    else:
        kwargs["hidden_states"] = hidden
    with _Float64():
        before = block(*args, **kwargs)[0]
    holder = torch.nn.Module()
    _place(holder, layer.module, block)
    with FoldedWeights(holder, _only(spec, layer), Transforms({layer.index: transform}))(), _Float64():
        after = block(*args, **kwargs)[0]
    return float((after - before).norm() / before.norm())


class _Float64(TorchFunctionMode):
    """Keeps modeling code that asks for float32, as norms, RoPE and softmax do, in float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = [torch.float64 if a is torch.float32 else a for a in args]
        named = {k: torch.float64 if a is torch.float32 else a for k, a in (kwargs or {}).items()}
        return func(*wide, **named)


def _in_float64(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    if isinstance(value, tuple):
        return tuple(_in_float64(v) for v in value)
    if isinstance(value, dict):
        return {key: _in_float64(v) for key, v in value.items()}
    return value


def _place(root: torch.nn.Module, path: str, module: torch.nn.Module) -> None:
    """Put a module where its path in the whole model says."""
    *parents, leaf = path.split(".")
    for parent in parents:
        inner = torch.nn.Module()
        root.add_module(parent, inner)
        root = inner
    root.add_module(leaf, module)


def _only(spec: ModelSpec, layer: LayerSpec) -> ModelSpec:
    return dataclasses.replace(spec, layers=(layer,))
