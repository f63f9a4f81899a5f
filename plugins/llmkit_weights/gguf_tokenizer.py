"""The tokenizer in GGUF metadata, built with the `tokenizers` library.

A file names its pre-tokenizer (`tokenizer.ggml.pre`) but does not hold it: the regular expressions here are those of
the models' own tokenizers. One that is not known is an error, for a wrong split gives wrong ids without a sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmkit.errors import ModelError
from llmkit_weights.gguf_file import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from llmkit.frontend.tokenizers_fast import FastTokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_HINT = "Pass --tokenizer with the model's Hugging Face folder or tokenizer.json."

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}| ?", r"|\p{N}{1,3}| ?")


@dataclass(frozen=True)
class _PreTokenizer:
    """How text is cut before byte-level BPE. split: own expression, None: that of GPT-2. digits: every digit alone.
    ignore_merges: a piece that is in the vocabulary is taken whole. add_bos: what holds if the file does not say."""

    split: str | None = None
    digits: bool = False
    normalise: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = _PreTokenizer()
_SMOLLM = _PreTokenizer(digits=True)
_QWEN2 = _PreTokenizer(split=_QWEN2_SPLIT, normalise=True)
_LLAMA3 = _PreTokenizer(split=_LLAMA3_SPLIT, ignore_merges=True, add_bos=True)
PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}
# Files from before the key existed: what their architecture used then.
_PRE_BY_ARCHITECTURE = {"qwen2": "qwen2", "qwen3": "qwen2", "qwen3moe": "qwen2"}


def build_tokenizer(file: GgufFile) -> FastTokenizer | None:
    """The tokenizer of `file`; None if it has none. Raises ModelError for one that cannot be rebuilt exactly."""
    from llmkit.frontend.tokenizers_fast import FastTokenizer
    from llmkit.frontend.tokenizers_hf import set_bos_eos

    tokens: list[str] | None = file.get("tokenizer.ggml.tokens")
    model = file.get("tokenizer.ggml.model", "none")
    if tokens is None or model == "none":
        return None
    types: list[int] = file.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{file.path} has {len(tokens)} tokens but {len(types)} token types.")
    if model == "gpt2":
        backend, add_bos = _byte_level_bpe(file, tokens)
    elif model == "llama":
        backend, add_bos = _sentencepiece_bpe(file, tokens, types)
    else:
        raise ModelError(f"{file.path} has a tokenizer of type {model!r}, which cannot be rebuilt.", hint=_HINT)
    _mark_added_tokens(backend, tokens, types)
    special = _special_tokens(file, tokens)
    set_bos_eos(
        backend,
        special.get("bos_token") if file.get("tokenizer.ggml.add_bos_token", add_bos) else None,
        special.get("eos_token") if file.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    return FastTokenizer(backend, special_tokens=special, chat_template=file.get("tokenizer.chat_template"))


def _byte_level_bpe(file: GgufFile, tokens: list[str]) -> tuple[Backend, bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = _pre_tokenizer(file)
    vocabulary = _vocabulary(file, tokens)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(file, vocabulary), ignore_merges=pre.ignore_merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits else []
    if pre.split is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre.normalise:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _pre_tokenizer(file: GgufFile) -> _PreTokenizer:
    architecture = file.get("general.architecture")
    name = file.get("tokenizer.ggml.pre") or _PRE_BY_ARCHITECTURE.get(architecture)
    if name not in PRE_TOKENIZERS:
        says = f"the pre-tokenizer {name!r}" if name else "no tokenizer.ggml.pre"
        raise ModelError(
            f"{file.path} has {says}, so its text cannot be split exactly; known: {', '.join(PRE_TOKENIZERS)}.",
            hint=_HINT,
        )
    return PRE_TOKENIZERS[name]


def _vocabulary(file: GgufFile, tokens: list[str]) -> dict[str, int]:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelError(f"{file.path} has tokens with equal texts; its tokenizer cannot be rebuilt.", hint=_HINT)
    return vocabulary


def _merges(file: GgufFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for line in file.get("tokenizer.ggml.merges") or []:
        # The pieces hold no space themselves: byte-level vocabularies write it as another character.
        left, separator, right = line.partition(" ")
        # The library panics, with a page of stack, on some merges that do not fit.
        if not separator or not {left, right, left + right} <= vocabulary.keys():
            raise ModelError(
                f"{file.path} has the merge {line!r}, which is not of two tokens into a third.", hint=_HINT
            )
        merges.append((left, right))
    return merges


def _sentencepiece_bpe(file: GgufFile, tokens: list[str], types: list[int]) -> tuple[Backend, bool]:
    """SentencePiece's BPE joins the neighbours whose union has the highest score; the same as BPE whose merges are
    ranked by the score of what they make."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores: list[float] | None = file.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(f"{file.path} has no score for each token; its tokenizer cannot be rebuilt.", hint=_HINT)
    vocabulary = _vocabulary(file, tokens)
    merges = _merges_by_score(vocabulary, types, scores)
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=_BYTE in types)
    )
    prefix = file.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend, True


def _merges_by_score(vocabulary: dict[str, int], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, best-scored token first; among the splits of one token the
    order is that of the parts' ids."""
    apart = (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)
    pieces = {token: token_id for token, token_id in vocabulary.items() if types[token_id] not in apart}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, token_id in pieces.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                ranked.append((-scores[token_id], pieces[left], pieces[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _mark_added_tokens(backend: Backend, tokens: list[str], types: list[int]) -> None:
    """Tokens that are found in the text before anything else: control tokens, hidden when decoding, and those that
    the model's makers added."""
    from tokenizers import AddedToken

    def of_type(kind: int) -> list[str]:
        return [token for token, token_type in zip(tokens, types, strict=True) if token_type == kind]

    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in of_type(_CONTROL)])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in of_type(_USER_DEFINED)])


def _special_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    roles = {
        "bos_token": "bos",
        "eos_token": "eos",
        "unk_token": "unknown",
        "pad_token": "padding",
        "sep_token": "seperator",
    }
    result = {}
    for role, name in roles.items():
        token_id = file.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is None:
            continue
        if token_id >= len(tokens):
            raise ModelError(f"{file.path} says that {role} is token {token_id}, but has {len(tokens)} tokens.")
        result[role] = tokens[token_id]
    return result
