"""Tiny tokenizers and engines for tests that need no model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from llmkit.frontend.input_processor import InputProcessor, ModelLimits
from llmkit.frontend.tokenizer import Tokenizer
from llmkit.requests.message import EngineOutput, EngineRequest

BOS, EOS = 256, 257
MISSING_BYTES = b"\x04\x13\x14"


class ByteTokenizer:
    """One token per byte, of which some are missing as in SmolLM2; two special tokens; pieces of more than one byte
    may be added."""

    byte_level = True
    bos_token_id = BOS
    eos_token_id = EOS
    chat_template: str | None = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    special_tokens = {"bos_token": "<bos>", "eos_token": "<eos>"}  # noqa: RUF012 - a fake's constant
    special_token_ids = frozenset({BOS, EOS})

    def __init__(self, pieces: Sequence[str | bytes] = ()) -> None:
        self._bytes = [bytes([i]) for i in range(256)] + [b"<bos>", b"<eos>"]
        self._bytes += [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        data, ids = text.encode(), [BOS] if add_special_tokens and text.startswith("^") else []
        longest_first = sorted(range(256, self.vocab_size), key=lambda i: -len(self._bytes[i]))
        while data:
            i = next((i for i in longest_first if data.startswith(self._bytes[i])), data[0])
            data = data[len(self._bytes[i]) :]
            if not (i < 256 and i in MISSING_BYTES):
                ids.append(i)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = [i for i in token_ids if not (skip_special_tokens and i in self.special_token_ids)]
        return b"".join(self._bytes[i] for i in shown).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        return repr(self._bytes[token_id])


class ScriptedClient:
    """An engine client that plays back steps; a request's id in a step is its position among those added."""

    def __init__(self, steps: Iterable[Sequence[tuple[int, EngineOutput]]] = ()) -> None:
        self.steps = list(steps)
        self.added: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.aborted_sequences: list[tuple[str, int]] = []
        self.closed = 0

    def add(self, requests: Sequence[EngineRequest]) -> None:
        self.added.extend(requests)

    def abort(self, request_ids: Iterable[str]) -> None:
        self.aborted.extend(request_ids)

    def abort_sequences(self, sequences: Iterable[tuple[str, int]]) -> None:
        self.aborted_sequences.extend(sequences)

    def outputs(self) -> list[EngineOutput]:
        outputs = []
        for number, output in self.steps.pop(0):
            output.request_id = self.added[number].request_id
            outputs.append(output)
        return outputs

    def has_work(self) -> bool:
        return bool(self.steps)

    def reset_prefix_cache(self) -> bool:
        return True

    def stats(self) -> object:
        return None

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def byte_tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture
def make_byte_tokenizer() -> type[ByteTokenizer]:
    return ByteTokenizer


@pytest.fixture
def scripted_client() -> type[ScriptedClient]:
    return ScriptedClient


@pytest.fixture
def make_processor() -> Callable[..., InputProcessor]:
    def make(tokenizer: Tokenizer | None, template: object = None, **limits: object) -> InputProcessor:
        size = 258 if tokenizer is None else tokenizer.vocab_size
        known = {"vocab_size": size, "max_model_len": 64, "max_logprobs": 20, "eos_token_ids": frozenset({EOS})}
        return InputProcessor(ModelLimits(**(known | limits)), tokenizer, template)  # type: ignore[arg-type]

    return make


@pytest.fixture
def metaspace_tokenizer() -> Tokenizer:
    """`<unk> ▁a ▁b b`, and bytes as the fallback: what a token reads as depends on where it stands."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    from llmkit.frontend.tokenizers_fast import FastTokenizer

    vocab = ["<unk>", "▁a", "▁b", "b", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    ids = {piece: i for i, piece in enumerate(vocab)}
    backend = Backend(models.BPE(ids, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return FastTokenizer(backend, special_tokens={"eos_token": "</s>"})
