"""The tokenizer of a Hugging Face folder, read with the `tokenizers` library alone.

Importing transformers takes seconds, so it is only the last resort, for folders without a tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmkit.errors import ModelError, described
from llmkit.frontend.model_files import read_json_if_any
from llmkit.frontend.tokenizers_fast import FastTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

SPECIAL_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SLOW_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "tekken.json", "tokenizer_config.json")


def load_hf_tokenizer(path: Path) -> FastTokenizer | None:
    """The tokenizer in `path`, a folder or a tokenizer.json; None if the folder has none of its files.

    Raises ModelError if there is one that cannot be read."""
    folder = path.parent if path.is_file() else path
    tokenizer_file = path if path.is_file() else path / "tokenizer.json"
    if not tokenizer_file.is_file():
        if any((folder / name).is_file() for name in _SLOW_FILES):
            return _convert_with_transformers(folder)
        return None
    try:
        return _load_fast(folder, tokenizer_file)
    except ModelError:
        raise
    except Exception as error:  # any value may stand anywhere in these files
        raise ModelError(f"The tokenizer files of {folder} are damaged: {described(error)}.") from error


def _load_fast(folder: Path, tokenizer_file: Path) -> FastTokenizer:
    settings = read_json_if_any(folder / "special_tokens_map.json")
    settings |= read_json_if_any(folder / "tokenizer_config.json")
    backend = _read_backend(tokenizer_file)
    special_tokens = _special_tokens(settings)
    _apply_bos_eos_settings(backend, settings, special_tokens)
    return FastTokenizer(
        backend,
        special_tokens=special_tokens,
        additional_special_tokens=_additional_special_tokens(settings),
        chat_template=_chat_template(folder, settings),
    )


def _read_backend(tokenizer_file: Path) -> Backend:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
        raise ModelError(f"{tokenizer_file} is not a tokenizer that can be read: {error}.") from error


def _text(value: Any) -> str | None:
    """A special token is written as its text or as an object that has it under "content"."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    return {role: text for role in SPECIAL_TOKEN_ROLES if (text := _text(settings.get(role))) is not None}


def _additional_special_tokens(settings: dict[str, Any]) -> list[str]:
    values: list[Any] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        entry = settings.get(key) or []
        values += entry.values() if isinstance(entry, dict) else entry
    return [text for value in values if (text := _text(value)) is not None]


def _apply_bos_eos_settings(backend: Backend, settings: dict[str, Any], special_tokens: dict[str, str]) -> None:
    """`add_bos_token` and `add_eos_token`, where written, win over tokenizer.json, as they do in transformers 5."""
    if "add_bos_token" not in settings and "add_eos_token" not in settings:
        return
    bos = special_tokens.get("bos_token") if settings.get("add_bos_token") else None
    eos = special_tokens.get("eos_token") if settings.get("add_eos_token") else None
    set_bos_eos(backend, bos, eos)


def set_bos_eos(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Make `encode` put the tokens `bos` before and `eos` after the text; None, or one that the vocabulary does not
    have, for nothing there."""
    from tokenizers.processors import TemplateProcessing

    ids = {text: backend.token_to_id(text) for text in (bos, eos) if text is not None}
    known = [(text, token_id) for text, token_id in ids.items() if token_id is not None]
    front = [bos] if bos is not None and ids[bos] is not None else []
    back = [eos] if eos is not None and ids[eos] is not None else []
    backend.post_processor = TemplateProcessing(
        single=[*front, "$A", *back],
        pair=[*front, "$A", *back, *[f"{text}:1" for text in front], "$B:1", *[f"{text}:1" for text in back]],
        special_tokens=known,
    )


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json; of several named templates "default" is taken."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = _default_template(template)
    return template if isinstance(template, str) else None


def _default_template(entries: Iterable[Any]) -> Any:
    named = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    return named.get("default")


def _convert_with_transformers(folder: Path) -> FastTokenizer:
    from transformers import AutoTokenizer

    hint = "Pass --tokenizer with a folder that has a tokenizer.json, or --skip-tokenizer."
    try:
        slow = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever transformers and the converters below it raise, the file is to blame
        raise ModelError(
            f"{folder} has no tokenizer.json, and its tokenizer cannot be converted: {error}.", hint=hint
        ) from error
    backend = getattr(slow, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"The tokenizer of {folder} ({type(slow).__name__}) has no fast form.", hint=hint)
    texts = {role: str(text) for role in SPECIAL_TOKEN_ROLES if (text := getattr(slow, role, None)) is not None}
    template = slow.chat_template
    return FastTokenizer(
        backend,
        special_tokens=texts,
        chat_template=template if isinstance(template, str) else None,
    )
