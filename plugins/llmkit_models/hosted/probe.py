"""What the attention layers of a model are, found out by running it on the meta device, where tensors have shapes only.

The masks that the model asks for and the calls that reach the attention interface tell everything: number and size of
heads, windows, scales, caps. Whatever a paged attention of llmkit would not do is a reason to refuse the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmkit.errors import ModelError, described
from llmkit_models.hosted.attention import register
from llmkit_models.hosted.config import text_config

PROBE = "llmkit-probe"
TOKENS = 5

_RECORD = "llmkit_record"
_MASK = "llmkit_mask"
_LONGEST = 2**18
# Arguments of attention calls that change nothing here: rows and positions are the backend's business.
_HARMLESS = frozenset(
    {"dropout", "position_ids", "position_embeddings", "output_attentions", "use_cache", "cache_position", "layer_idx"}
)


@dataclass(frozen=True)
class ProbedLayer:
    """One attention layer. name: of its module. window in tokens, None: full attention."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int | None
    soft_cap: float | None


@dataclass
class _Record:
    """What was seen in one run; `names` of all modules of the model."""

    names: Mapping[torch.nn.Module, str]
    layers: list[ProbedLayer] = field(default_factory=list)


def probe(model: torch.nn.Module) -> list[ProbedLayer]:
    """The attention layers of a model of transformers in the order of their calls. `model`, whose parameters may be on
    the meta device, is not changed.

    Raises ModelError saying what cannot be had with llmkit's attention.
    """
    from transformers.masking_utils import AttentionMaskInterface

    register(PROBE, _recorded_attention)
    AttentionMaskInterface.register(PROBE, _recorded_mask)
    twin: Any = copy.deepcopy(model).to("meta")
    record = _Record({module: name for name, module in twin.named_modules()})
    for module in record.names:
        setattr(module, _RECORD, record)
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = PROBE
            config._experts_implementation = "eager"
    ids = torch.zeros((1, TOKENS), dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), _NoValues():
            # With a mask given, the model does not look for the borders of sequences in the positions.
            twin(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    except ModelError:
        raise
    except Exception as error:
        raise refusal(f"it cannot be followed on the meta device ({described(error)})") from error
    _check(record, text_config(twin.config))
    return record.layers


def _check(record: _Record, config: Any) -> None:
    layers = {layer.name for layer in record.layers}
    if not layers:
        raise refusal("its attention does not go through transformers' attention interface")
    if len(layers) < len(record.layers):
        raise refusal("it calls an attention layer more than once in a pass")
    if len(layers) < config.num_hidden_layers:
        missing = config.num_hidden_layers - len(layers)
        raise refusal(f"{missing} of its {config.num_hidden_layers} layers are none with attention of the usual kind")


def refusal(reason: str) -> ModelError:
    """The error for a model that transformers has but llmkit cannot host."""
    return ModelError(
        f"transformers' own code of this model cannot run with paged attention: {reason}.",
        hint="A model plugin for the architecture would be needed.",
    )


class _NoValues(TorchDispatchMode):
    """On the meta device nothing has a value: what asks for one gets zero, what asks where values are gets nowhere.

    Experts picked by values are left out by this, and attention does not depend on them."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if func is torch.ops.aten._local_scalar_dense.default:
                return 0.0 if args[0].is_floating_point() else 0
            if func is torch.ops.aten.nonzero.default:
                return torch.empty((0, args[0].dim()), dtype=torch.int64, device="meta")
        return func(*args, **(kwargs or {}))


def _recorded_mask(
    mask_function: Callable[..., Any] | None = None, q_length: int = TOKENS, kv_length: int = TOKENS, **_: Any
) -> torch.Tensor:
    """Stands for a mask, and knows what it is made of: that is looked at when a layer uses it."""
    mask = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
    setattr(mask, _MASK, cache(lambda: window_of(mask_function)))
    return mask


def window_of(mask_function: Callable[..., Any] | None) -> int | None:
    """The sliding window of a mask function of transformers, (batch, head, query, key) → seen or not; None for plain
    causal attention. Raises ModelError for any other pattern.

    Rows far apart are looked at: a window has the same width in all, full attention grows with the row, and anything
    else, chunks for example, neither.
    """
    if mask_function is None:
        return None
    widths: dict[int, int] = {}
    keys = torch.arange(_LONGEST + 2)
    zero = torch.tensor(0)
    for row in (_LONGEST, _LONGEST - 1, _LONGEST // 3):
        try:
            seen = torch.as_tensor(mask_function(zero, zero, torch.tensor(row), keys)).expand(len(keys))
        except Exception as error:
            raise refusal(f"it has a mask that is not known beforehand ({described(error)})") from error
        if bool(seen[row + 1 :].any()):
            raise refusal("its attention is not causal")
        width = int(seen.sum())
        if not width or not bool(seen[row - width + 1 : row + 1].all()):
            raise refusal("its attention has gaps")
        widths[row] = width
    window = widths[_LONGEST]
    if any(width != min(row + 1, window) for row, width in widths.items()):
        raise refusal("its attention looks back neither to the start nor through a window of one width")
    return None if window > _LONGEST else window


def _recorded_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    record: _Record = getattr(module, _RECORD)
    name = record.names[module]
    if not query.shape[2] == key.shape[2] == value.shape[2] == TOKENS:
        raise refusal(f"{name} attends to other tokens than those of the sequence")
    if not query.shape[3] == key.shape[3] == value.shape[3]:
        raise refusal(f"{name} has queries, keys and values of different sizes (latent attention, for example)")
    scale = arguments.pop("scaling", None)
    layer = ProbedLayer(
        name,
        query.shape[1],
        key.shape[1],
        query.shape[3],
        query.shape[3] ** -0.5 if scale is None else float(scale),
        _window(name, module, attention_mask, arguments),
        _positive(arguments.pop("softcap", None)),
    )
    unknown = [k for k, v in arguments.items() if k not in _HARMLESS and v is not None and v is not False]
    if unknown:
        raise refusal(f"{name} asks for attention with {', '.join(sorted(unknown))}")
    record.layers.append(layer)
    return query.transpose(1, 2).contiguous(), None


def _window(name: str, module: torch.nn.Module, mask: torch.Tensor | None, arguments: dict[str, Any]) -> int | None:
    """By the mask, which is what decides in the model's own attention; by the call where no mask is passed."""
    stated = _positive(arguments.pop("sliding_window", None))
    is_causal = arguments.pop("is_causal", None)
    if mask is None:
        if not (getattr(module, "is_causal", False) if is_causal is None else is_causal):
            raise refusal(f"{name} is not causal")
        return None if stated is None else int(stated)
    if not hasattr(mask, _MASK):
        raise refusal(f"{name} has a mask of its own making (position biases, for example)")
    window: Callable[[], int | None] = getattr(mask, _MASK)
    return window()


def _positive(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and value > 0 else None
