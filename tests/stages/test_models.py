"""`turntree models`: what it writes is a folder like any other, and says what it is asked to say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tiny_models import save_tiny_checkpoint
from turntree.core.errors import InputError
from turntree.stages.tinker import _require_new, get_adapter

IDS = torch.arange(1, 12)[None]


def test_what_lies_there_is_not_replaced_and_what_is_no_model_never(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path / "base")
    with pytest.raises(InputError, match=r"base: exists already; pass --overwrite"):
        _require_new(tmp_path / "base", overwrite=False)
    _require_new(tmp_path / "base", overwrite=True)
    (tmp_path / "runs" / "sft").mkdir(parents=True)
    for name in ("runs", "."):
        with pytest.raises(InputError, match="holds more than a model"):
            _require_new(tmp_path / name, overwrite=True)


def test_what_names_no_adapter_on_a_server_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_checkpoint(tmp_path / "adapter")
    with pytest.raises(InputError, match=r"adapter: names no adapter on a server; name RUN/model"):
        get_adapter(folder, tmp_path / "model")
    assert not (tmp_path / "model").exists()
