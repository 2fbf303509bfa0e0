"""A model that need not fit on its device: each decoder layer goes there alone and meets all batches.

Weights come from the checkpoint when their layer's turn comes and are dropped after it; hidden states wait on
the CPU. How a layer is called is for the model to say: its own forward pass runs first with layers that
compute nothing, and what each was called with (masks, positions, caches) is kept. It runs once more behind
the last layer where logits are wanted. The arithmetic is that of the whole model, so results are bit-equal.

Embeddings stay on the CPU, where a look-up is as exact; what else is outside the layers stays on the device,
but for the output head, which goes there when logits are made.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import set_module_tensor_to_device
from transformers import Cache, DynamicCache

from kvcal.data import Batch
from kvcal.errors import ModelError

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Step:
    """A piece of a forward pass, to be run by whoever was handed it.

    Attributes:
        batch: whose tokens are run.
        queries: columns of the batch that are run; those before them are in a cache.
        tokens: what of the batch's tokens is done after it; over all steps of a batch they add up to its own.
        run: does it, without the output head.
    """

    batch: Batch
    queries: slice
    tokens: float
    run: Callable[[], Any]


def cache_for(model: Any, batch: Batch, first: slice) -> Cache | None:
    """A cache for a batch that is run in several pieces, of which this is the first; None for a whole one."""
    return DynamicCache(config=model.config) if first.stop < batch.input_ids.shape[1] else None


def inputs(
    batch: Batch,
    queries: slice,
    device: torch.device,
    cache: Cache | None,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Keyword arguments of a forward pass over a piece, images in ``dtype``."""
    return batch.inputs(device, queries, dtype) | {"past_key_values": cache, "use_cache": cache is not None}


@dataclass(frozen=True)
class _Call:
    """What a decoder layer was called with beside hidden states; None stands in their place."""

    args: tuple[Any, ...]
    named: dict[str, Any]


@dataclass
class _Piece:
    """Columns of a batch on their way through the layers: hidden states of each variant, on the CPU."""

    batch: Batch
    queries: slice
    calls: list[_Call]
    hidden: list[torch.Tensor]


class Layerwise:
    """A model whose decoder layers are on the disk. It is run by :meth:`steps` and :meth:`logits` alone."""

    def __init__(
        self, model: Any, path: str, device: torch.device, scratch: tempfile.TemporaryDirectory[str]
    ):
        """Take over a model that transformers loaded with its layers offloaded to the disk.

        Args:
            model: its decoder layers are on ``meta``, with accelerate's hooks; the rest is on the CPU.
            path: of the list of decoder layers.
            device: where layers compute.
            scratch: holds weights that are not in the checkpoint as the model has them; removed with it.
        """
        self.config, self.dtype, self.device = model.config, model.dtype, device
        self._model, self._path, self._scratch = model, path, scratch
        self._layers = model.get_submodule(path)
        self._sound: set[str] = set()  # parameters that were looked at
        self._maps = {
            f"{name}.{leaf}": (module._hf_hook.weights_map, leaf)
            for name, module in model.named_modules()
            for leaf, parameter in module.named_parameters(recurse=False)
            if parameter.is_meta
        }
        remove_hook_from_module(model, recurse=True)
        model.requires_grad_(False)
        self._place_outside()
        self._returns = self._what_layers_return()

    def modules(self) -> Iterator[torch.nn.Module]:
        """Every module, as of the model."""
        found: Iterator[torch.nn.Module] = self._model.modules()
        return found

    def get_submodule(self, path: str) -> torch.nn.Module:
        """A module by its path; the weights of a layer are on ``meta`` but for its turn."""
        found: torch.nn.Module = self._model.get_submodule(path)
        return found

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those outside the layers; a layer's are looked at when they are loaded."""
        return ((name, p) for name, p in self._model.named_parameters() if name not in self._maps)

    def get_parameter(self, name: str) -> torch.Tensor:
        """A parameter by name, read from the disk if it is of a layer."""
        if name in self._maps:
            weights, leaf = self._maps[name]
            found: torch.Tensor = weights[leaf]
            return found
        parameter: torch.Tensor = self._model.get_parameter(name)
        return parameter

    def steps(self, batches: Sequence[Batch]) -> Iterator[Step]:
        """Every layer over every batch, layer by layer; run each step before the next is taken."""
        yield from self._steps(self._pieces(batches, 1), (nullcontext,))

    def logits(
        self,
        batches: Sequence[Batch],
        variants: Sequence[Context],
        on_tokens: Callable[[float], None],
    ) -> Iterator[tuple[Batch, slice, int, torch.Tensor]]:
        """Logits ``(batch, tokens, vocab)`` of each batch, piece and variant, in this order."""
        pieces = self._pieces(batches, len(variants))
        for step in self._steps(pieces, variants):
            step.run()
            on_tokens(step.tokens)
        with self._head_on_device():
            for piece in pieces:
                for index, hidden in enumerate(piece.hidden):
                    yield piece.batch, piece.queries, index, self._finished(piece, hidden)
                piece.hidden.clear()

    def _steps(self, pieces: list[_Piece], variants: Sequence[Context]) -> Iterator[Step]:
        for index in range(len(self._layers)):
            with self._loaded(index) as layer:
                caches: list[Cache | None] = []
                for piece in pieces:
                    if piece.queries.start == 0:
                        caches = [cache_for(self, piece.batch, piece.queries) for _ in variants]
                    for variant, context in enumerate(variants):
                        yield Step(
                            piece.batch,
                            piece.queries,
                            piece.batch.tokens_in(piece.queries) / (len(self._layers) * len(variants)),
                            _Run(layer, piece, index, variant, context, caches[variant], self.device),
                        )

    def _pieces(self, batches: Sequence[Batch], variants: int) -> list[_Piece]:
        """What every layer will be called with, and the hidden states before the first."""
        pieces = []
        for batch in batches:
            cache: Cache | None = None
            for queries in batch.pieces():
                if queries.start == 0:
                    cache = cache_for(self, batch, queries)
                hidden, calls = self._caught(inputs(batch, queries, self.device, cache))
                memo: dict[int, torch.Tensor] = {}
                parked = [_moved(call, torch.device("cpu"), memo) for call in calls]
                pieces.append(_Piece(batch, queries, parked, [hidden.cpu()] * variants))
        return pieces

    def _caught(self, inputs: dict[str, Any]) -> tuple[torch.Tensor, list[_Call]]:
        """Hidden states before the first layer, and the call of each."""
        calls: list[_Call] = []
        seen: list[torch.Tensor] = []

        def catch(index: int, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            hidden, call = _without_hidden(args, named)
            if len(calls) != index or (seen and hidden is not seen[-1]):
                raise ModelError(
                    f"{type(self._model).__name__} does more between its layers than hand on hidden states,"
                    " so it cannot run layer by layer; use --device-map auto"
                )
            calls.append(call)
            seen.append(hidden)
            _lengthen(inputs["past_key_values"], self._layers[index], hidden)
            return self._returns(hidden)

        with self._instead(catch):
            self._model.base_model(**inputs)
        if len(calls) != len(self._layers):
            raise ModelError(
                f"{type(self._model).__name__} ran {len(calls)} of its {len(self._layers)} layers;"
                " use --device-map auto"
            )
        return seen[0], calls

    def _finished(self, piece: _Piece, hidden: torch.Tensor) -> torch.Tensor:
        """Logits from what the last layer gave out."""
        last = len(self._layers) - 1
        final = hidden.to(self.device)

        def skip(index: int, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return self._returns(final if index == last else _without_hidden(args, named)[0])

        ids = piece.batch.input_ids[:, piece.queries].to(self.device)
        with self._instead(skip):
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits
        return logits

    @torch.inference_mode()
    def _what_layers_return(self) -> Callable[[torch.Tensor], Any]:
        """From hidden states to what a layer returns with them: a tensor, or a tuple with more in it."""
        found: list[Any] = []

        def stop(index: int, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            raise _EnoughError

        with self._loaded(0) as first, self._instead(stop, but_for=0):
            hook = first.register_forward_hook(lambda _m, _a, out: found.append(out))
            with suppress(_EnoughError):
                self._model.base_model(
                    torch.zeros(1, 2, dtype=torch.long, device=self.device), use_cache=False
                )
            hook.remove()
        others = found[0][1:] if isinstance(found[0], tuple) else None
        return lambda hidden: hidden if others is None else (hidden, *others)

    @contextmanager
    def _instead(
        self, call: Callable[[int, tuple[Any, ...], dict[str, Any]], Any], but_for: int | None = None
    ) -> Iterator[None]:
        """Every layer calls this, with its index and arguments, in place of its own forward."""
        replaced = [(i, layer) for i, layer in enumerate(self._layers) if i != but_for]
        try:
            for index, layer in replaced:
                layer.forward = lambda *args, _index=index, **named: call(_index, args, named)
            yield
        finally:
            for _, layer in replaced:
                layer.__dict__.pop("forward", None)

    @contextmanager
    def _loaded(self, index: int) -> Iterator[torch.nn.Module]:
        """A layer with its weights on the device.

        Raises:
            ModelError: one of them holds NaN or infinity.
        """
        layer = self._layers[index]
        names = [name for name, _ in layer.named_parameters()]
        buffers = [name for name, _ in layer.named_buffers()]
        try:
            for name in names:
                whole = f"{self._path}.{index}.{name}"
                _place(layer, name, self.device, self.get_parameter(whole))
                if whole not in self._sound:
                    _require_finite(index, whole, layer.get_parameter(name))
                    self._sound.add(whole)
            for name in buffers:
                _place(layer, name, self.device)
            yield layer
        finally:
            for name in names:
                _place(layer, name, torch.device("meta"))
            for name in buffers:
                _place(layer, name, torch.device("cpu"))

    def _place_outside(self) -> None:
        if self.device.type == "cpu":
            return
        head = self._model.get_output_embeddings()
        for name, module in self._model.named_modules():
            if module is head or name.startswith(f"{self._path}."):
                continue
            if isinstance(module, torch.nn.Embedding):
                module.register_forward_pre_hook(_to_cpu, with_kwargs=True)
                module.register_forward_hook(lambda _m, _a, out: out.to(self.device))
                continue
            for leaf, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                _place(module, leaf, self.device)

    @contextmanager
    def _head_on_device(self) -> Iterator[None]:
        """The output head on the device; if its weight is that of the embedding, this is a second one."""
        head = self._model.get_output_embeddings()
        held = dict(head.named_parameters())
        try:
            for name, parameter in held.items():
                _place(head, name, self.device, parameter)
            yield
        finally:
            for name, parameter in held.items():
                setattr(head, name, parameter)


class _EnoughError(Exception):
    """Ends a forward pass of which no more is wanted."""


class _Run:
    """One layer on one piece in one variant."""

    def __init__(
        self,
        layer: torch.nn.Module,
        piece: _Piece,
        index: int,
        variant: int,
        context: Context,
        cache: Cache | None,
        device: torch.device,
    ):
        self._layer, self._piece, self._index, self._variant = layer, piece, index, variant
        self._context, self._cache, self._device = context, cache, device

    def __call__(self) -> None:
        hidden = self._piece.hidden[self._variant].to(self._device)
        call = _moved(self._piece.calls[self._index], self._device, {})
        given = tuple(self._cache if isinstance(v, Cache) else v for v in call.args)
        args = tuple(hidden if value is None and i == 0 else value for i, value in enumerate(given))
        named = {name: self._cache if isinstance(v, Cache) else v for name, v in call.named.items()}
        if not args:
            named["hidden_states"] = hidden
        with self._context():
            out = self._layer(*args, **named)
        self._piece.hidden[self._variant] = (out[0] if isinstance(out, tuple) else out).cpu()


def _require_finite(index: int, name: str, weight: torch.Tensor) -> None:
    if weight.is_floating_point() and not bool(torch.stack(weight.aminmax()).isfinite().all()):
        raise ModelError(f"layer {index}: {name} holds NaN or infinity; download the model again")


def _without_hidden(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[torch.Tensor, _Call]:
    if args:
        return args[0], _Call((None, *args[1:]), named)
    return named["hidden_states"], _Call((), {k: v for k, v in named.items() if k != "hidden_states"})


def _lengthen(cache: Cache | None, layer: torch.nn.Module, hidden: torch.Tensor) -> None:
    """Let a cache count tokens of a layer that computes none, since masks go by its length."""
    indices = {module.layer_idx for module in layer.modules() if hasattr(module, "layer_idx")}
    if cache is not None:
        for index in indices:
            if not hasattr(cache.layers[index], "update"):
                raise ModelError(
                    f"layer {index} keeps a state instead of K and V, of which a layer that computes nothing"
                    " knows no length; run samples whole (--chunk) or use --device-map auto"
                )
            nothing = hidden.new_empty(hidden.shape[0], 1, hidden.shape[1], 1)
            cache.update(nothing, nothing, index)


def _moved(call: _Call, device: torch.device, memo: dict[int, torch.Tensor]) -> _Call:
    """Every tensor of a call on a device; one that calls share is moved once, as long as all of them live."""

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in memo:
                memo[id(value)] = value.to(device)
            return memo[id(value)]
        if isinstance(value, tuple | list):
            return type(value)(move(each) for each in value)
        if isinstance(value, dict):
            return {key: move(each) for key, each in value.items()}
        return value

    return _Call(move(call.args), move(call.named))


def _place(
    module: torch.nn.Module, name: str, device: torch.device, value: torch.Tensor | None = None
) -> None:
    set_module_tensor_to_device(module, name, device, value=value, clear_cache=False)


def _to_cpu(
    _: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    moved = _moved(_Call(args, named), torch.device("cpu"), {})
    return moved.args, moved.named
