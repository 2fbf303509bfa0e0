"""What a layer without K and V keeps of a request, however long it is: the state of its recurrence.

Mamba (Gu and Dao, arXiv 2312.00752; Mamba-2, arXiv 2405.21060), gated delta networks (arXiv 2412.06464) and
short convolutions keep the latest inputs of a causal convolution, and all but the last kind a matrix per head
or a vector per channel that every token updates. Shapes and dtypes are those of vLLM 0.32
(``MambaStateShapeCalculator``, ``MambaStateDtypeCalculator``): both parts in the 16 bits that the model is
served in, but for families whose configs ask for a wider recurrence. transformers' caches have one input of
the convolution more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcal.errors import ModelError, PlanRefused, UsageError
from kvcal.model_config import positive_int

_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class LayerState:
    """The state of one layer.

    Attributes:
        taps: inputs of the convolution that it keeps, one less than the convolution is wide.
        channels: of the convolution that are dealt out with the heads.
        heads: that ranks deal out among them; channels where each is a recurrence of its own, or none is.
        head_elements: of a head's recurrence; 0 without one.
        groups: of inputs that several heads share; ranks that are no divisor of them hold a copy each.
        group_channels: of the convolution, in each.
        recurrent_bytes: of an element of the recurrence.
    """

    taps: int
    channels: int
    heads: int
    head_elements: int
    groups: int = 0
    group_channels: int = 0
    recurrent_bytes: int = 2

    def bytes_on(self, ranks: int = 1) -> int:
        """Bytes on one of ``ranks`` GPUs.

        >>> LayerState(3, 8192, 16, 2 * 128 * 128).bytes_on(1)  # Qwen3-Next-80B-A3B
        1097728

        Raises:
            UsageError: its heads cannot be dealt out.
        """
        if self.heads % ranks:
            raise UsageError(
                f"{self.heads} heads of a recurrent state cannot be dealt out to {ranks} GPUs;"
                f" --tensor-parallel takes divisors of {self.heads}"
            )
        groups = self.groups if self.groups % ranks == 0 else ranks
        convolved = (self.channels + groups * self.group_channels) // ranks
        return 2 * self.taps * convolved + self.recurrent_bytes * self.heads // ranks * self.head_elements


def read(config: Mapping[str, Any], model_type: str, without_attention: int) -> tuple[LayerState, ...]:
    """The states of a model, from its ``config.json``, and how many of its layers do not attend.

    Raises:
        ModelError: a field is missing or cannot be meant.
        PlanRefused: what its other layers keep is not known.
    """
    section = config.get("text_config") or config
    names = (str(section.get("model_type")), model_type)
    of_layer = next((_ROWS[name] for name in names if name in _ROWS), None)
    if of_layer is None:
        if not without_attention:
            return ()
        raise PlanRefused(
            [
                f"what the {without_attention} layers without attention of model_type {model_type!r} keep is"
                f" not known; it is for {', '.join(sorted(_ROWS))}"
            ]
        )
    return (of_layer(section),) * _count(section, model_type, without_attention)


def _count(section: Mapping[str, Any], model_type: str, without_attention: int) -> int:
    """Layers with a state: in some families every layer, in others those that do not attend."""
    if model_type in _IN_EVERY_LAYER:
        return positive_int(section, "num_hidden_layers")
    if model_type != "nemotron_h":
        return without_attention
    # Its MLPs are layers too. Checkpoints have a letter for each layer, or its kind in a list.
    letters, kinds = section.get("hybrid_override_pattern"), section.get("layers_block_type")
    if isinstance(kinds, list):
        return sum(kind in ("mamba", "linear_attention") for kind in kinds)
    if isinstance(letters, str):
        return letters.count("M")
    raise ModelError("config.json: neither hybrid_override_pattern nor layers_block_type lists the layers")


def _mamba(section: Mapping[str, Any]) -> LayerState:
    """A vector per channel."""
    inner = positive_int(section, "mamba_expand") * positive_int(section, "hidden_size")
    return LayerState(
        taps=positive_int(section, "mamba_d_conv") - 1,
        channels=inner,
        heads=inner,
        head_elements=positive_int(section, "mamba_d_state"),
    )


def _mamba_2(
    heads: str = "mamba_n_heads",
    groups: str = "mamba_n_groups",
    state: str = "mamba_d_state",
    taps: str = "mamba_d_conv",
) -> Callable[[Mapping[str, Any]], LayerState]:
    """A matrix per head, and inputs that groups of heads share. Takes the names of a family's fields."""

    def read(section: Mapping[str, Any]) -> LayerState:
        count, wide = positive_int(section, heads), positive_int(section, state)
        inner = _inner(section, count)
        if inner % count:
            raise ModelError(f"config.json: {inner} channels do not divide into {heads} {count}")
        return LayerState(
            taps=positive_int(section, taps) - 1,
            channels=inner,
            heads=count,
            head_elements=inner // count * wide,
            groups=positive_int(section, groups),
            group_channels=2 * wide,
            recurrent_bytes=_wider(section, "mamba_ssm_cache_dtype"),
        )

    return read


def _inner(section: Mapping[str, Any], heads: int) -> int:
    """Channels of the recurrence, which families say in three ways."""
    if section.get("mamba_head_dim") is not None:  # nemotron_h
        return heads * positive_int(section, "mamba_head_dim")
    if section.get("mamba_d_ssm") is not None:  # falcon_h1
        return positive_int(section, "mamba_d_ssm")
    return positive_int(section, "mamba_expand") * positive_int(section, "hidden_size")


def _delta(section: Mapping[str, Any]) -> LayerState:
    """A gated delta network: a matrix per head of V."""
    keys, values = (positive_int(section, f"linear_num_{side}_heads") for side in ("key", "value"))
    key, value = (positive_int(section, f"linear_{side}_head_dim") for side in ("key", "value"))
    if values % keys:
        raise ModelError(f"config.json: {values} heads of V do not divide into {keys} of K")
    return LayerState(
        taps=positive_int(section, "linear_conv_kernel_dim") - 1,
        channels=2 * keys * key + values * value,
        heads=keys,
        head_elements=values // keys * key * value,
        recurrent_bytes=_wider(section, "mamba_ssm_dtype"),
    )


def _convolution(section: Mapping[str, Any]) -> LayerState:
    """Nothing but the inputs of a short convolution."""
    channels = positive_int(section, "hidden_size")
    return LayerState(positive_int(section, "conv_L_cache") - 1, channels, channels, head_elements=0)


def _wider(section: Mapping[str, Any], field: str) -> int:
    """Bytes of an element of the recurrence where the engine heeds a field of the config."""
    if section.get("model_type") not in _HEEDED:
        return 2
    name = section.get(field, _HEEDED[section["model_type"]])
    if name not in _DTYPES:
        raise ModelError(f"config.json: {field} must be one of {', '.join(_DTYPES)}, found {name!r}")
    return _DTYPES[name]


# Families whose config names the dtype of the recurrence -> what it is where it does not (vLLM 0.32's
# model_executor/models/config.py).
_HEEDED = {
    "nemotron_h": "float32",
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"), "bfloat16"),
}
_IN_EVERY_LAYER = ("falcon_h1", "zamba2")  # beside attention
_ROWS: dict[str, Callable[[Mapping[str, Any]], LayerState]] = {
    "jamba": _mamba,
    "bamba": _mamba_2(),
    "granitemoehybrid": _mamba_2(),
    "falcon_h1": _mamba_2(),
    "zamba2": _mamba_2(heads="n_mamba_heads", groups="mamba_ngroups"),
    "nemotron_h": _mamba_2("mamba_num_heads", "n_groups", "ssm_state_size", "conv_kernel"),
    **dict.fromkeys(
        ("qwen3_next", "olmo_hybrid", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _delta
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _convolution),
}
