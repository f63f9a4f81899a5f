"""The model itself: transformers' code between llmkit's embeddings, attention and sampling."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from llmkit.errors import ModelError, described
from llmkit.layers.attention import Attention
from llmkit.layers.causal_lm import CausalLM
from llmkit.layers.module import Module, WeightSlot
from llmkit.layers.weight_loader import load_into
from llmkit_models.hosted.attention import INTERFACE, ForwardPass, attach, paged_attention, register
from llmkit_models.hosted.config import ORIGINAL, hf_config, model_class
from llmkit_models.hosted.linear import host_linears
from llmkit_models.hosted.probe import probe, refusal
from llmkit_models.hosted.rope import freeze_rope
from llmkit_models.hosted.weights import Conversion, parameters_on_meta, tensor_slots, tie

if TYPE_CHECKING:
    from llmkit.layers.context import ForwardContext, ModelContext


class HostedCausalLM(CausalLM):
    """A causal language model of transformers.

    Its body runs on the flat batch as one sequence whose positions jump; only attention could tell the difference,
    and that is llmkit's. The head runs with the body replaced by what it had returned, so that whatever a model does
    to its logits is done.
    """

    def __init__(self, context: ModelContext) -> None:
        """Raises ModelError for a model whose attention cannot be replaced, and for several workers."""
        super().__init__()
        if context.parallel.world_size > 1 or context.layer_range is not None:
            raise ModelError("Models of transformers run on one worker only.")
        model = _built(context)
        layers = probe(model)
        self.conversion = Conversion(model)
        self.tied: dict[str, str] = dict(model.all_tied_weights_keys)
        freeze_rope(model, context.max_model_len or context.config.max_position_embeddings)
        self.forward_pass = ForwardPass()
        register(INTERFACE, paged_attention)
        for seen in layers:
            attention = Attention(
                context,
                seen.num_heads,
                seen.num_kv_heads,
                seen.head_size,
                scale=seen.scale,
                sliding_window=seen.window,
                soft_cap=seen.soft_cap,
            )
            attach(model.get_submodule(seen.name), attention.layer, self.forward_pass)
        host_linears(model, context, tied=bool(self.tied))
        _move_buffers(model, context.device)
        body = model.base_model
        if body is model:
            raise ModelError(f"{type(model).__name__} has no body apart from its head.")
        self.device = context.device
        # Not as children: they are no modules of llmkit's, and the model as a whole names its tensors.
        self._whole = (model,)
        self._body = (body,)
        self._returned = _Returned()
        self._head = (_with_body(model, body, self._returned),)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        self.forward_pass.context = context
        output = self._body[0](input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        hidden: torch.Tensor = output[0][0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._returned.hidden = hidden[None]
        ids = torch.zeros((1, hidden.shape[0]), dtype=torch.int64, device=hidden.device)
        logits: torch.Tensor = self._head[0](input_ids=ids, use_cache=False).logits[0]
        self._returned.hidden = None
        return logits.float()

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        load_into(self, self.conversion(tensors), ignore=self.tied.keys())
        tie(self._whole[0], self.tied)

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:  # noqa: ARG002
        return tensor_slots(self._whole[0], self.tied, self.device)

    def parameter_bytes(self) -> int:
        held = sum(m.parameter_bytes() for m in self._whole[0].modules() if isinstance(m, Module))
        plain = {id(p): p.nbytes for p in self._whole[0].parameters()}
        return held + sum(plain.values())


class _Returned(nn.Module):
    """Stands for the body, and for a body inside it, and returns what the body has returned."""

    hidden: torch.Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return _body_output()(last_hidden_state=self.hidden)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name.startswith("_") else self


@cache
def _body_output() -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class BodyOutput(BaseModelOutputWithPast):  # type: ignore[misc]
        """Heads pass on whatever bodies may return, router logits for example: there is none of it."""

        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    return BodyOutput


def _built(context: ModelContext) -> Any:
    raw = context.config.raw[ORIGINAL]
    cls, config = model_class(raw), hf_config(raw)
    register(INTERFACE, paged_attention)
    try:
        with parameters_on_meta():
            model = cls._from_config(config, attn_implementation=INTERFACE, dtype=context.dtype)
    except Exception as error:
        if not cls._supports_attention_backend:
            raise refusal("its class has attention of its own that cannot be exchanged") from error
        raise ModelError(f"transformers cannot build a {cls.__name__}: {described(error)}") from error
    _keep_in_float32(model, context.dtype)
    return model.eval()


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Some parameters must not be in a half-precision type, by the names that the model's class has for them."""
    names = set(model._keep_in_fp32_modules_strict or ())
    if dtype is torch.float16:
        names |= set(model._keep_in_fp32_modules or ())
    for name, parameter in model.named_parameters():
        if any(part in name for part in names):
            parameter.data = parameter.data.float()


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer.is_meta and name in module._non_persistent_buffers_set:
                raise refusal(
                    f"the values of {path}.{name} come neither from the configuration nor from the checkpoint"
                )
            module._buffers[name] = buffer.to(device)


def _with_body(model: nn.Module, body: nn.Module, other: nn.Module) -> nn.Module:
    """`model`, all its modules shared, but `other` in the place of `body`."""
    twin = copy.copy(model)
    twin._modules = {name: other if module is body else module for name, module in model._modules.items()}
    return twin
