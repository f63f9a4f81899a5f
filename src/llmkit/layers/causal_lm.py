"""The contract between a model and the engine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmkit.layers.module import Module

if TYPE_CHECKING:
    import torch

    from llmkit.layers.context import ForwardContext


class CausalLM(Module):
    """A decoder that turns a flat batch of tokens into hidden states, and hidden states into logits.

    `llmkit.layers.decoder.DecoderForCausalLM` implements it for ordinary decoders.
    """

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """input_ids, positions int64 [t] → hidden states [t, hidden_size], after the final norm; those of
        `context.output_rows` alone, [s, hidden_size], will do as well."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] → logits [n, vocab_size] in float32."""

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """`logits` in the type that they were computed in: made float32 they are the same. For those who read each of
        them once."""
        return self.logits(hidden)

    @abstractmethod
    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill the parameters from (checkpoint name, tensor) pairs, packing each weight as it is complete.

        Raises ModelError naming missing, unexpected and mis-shaped tensors.
        """

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that `load_weights` needs, for formats that make tensors up. Asked before
        loading; by default the weight slots of all modules.
        """
        from llmkit.layers.weight_loader import weight_slots

        return {name: slot.shape for name, slot in weight_slots(self).items()}
