"""`--to hf`: a folder that `datasets.load_dataset` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turntree.run.files import write_text
from turntree.stages.export import Bundle
from turntree_interop.rows import row_of, write_parquet

CARD = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
---
{count} pivots: states of traces at which a policy sometimes takes the right action.

`prompt`: chat messages. `demonstration`: the demonstrated action. `pass_rate`: the mean reward of the profiled policy
under the verifier `{verifier}`. `weight`: how often to draw it. `state`: all that a verifier of turntree looks at, as
JSON text.

    from datasets import load_dataset
    pivots = load_dataset("{name}")["train"]
"""


def export_hf(bundle: Bundle, out: Path) -> dict[str, Any]:
    """The folder holds `data/train-00000-of-00001.parquet` and a card."""
    rows = [row_of(pivot) for pivot in bundle.pivots]
    write_parquet(out / "data" / "train-00000-of-00001.parquet", rows, ("prompt", "demonstration"))
    write_text(out / "README.md", CARD.format(count=len(rows), verifier=bundle.profiled, name="FOLDER"))
    return {"files": ["data/train-00000-of-00001.parquet", "README.md"]}
