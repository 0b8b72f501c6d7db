"""The rows of a Parquet file, a few at a time. What pyarrow raises becomes one line that names the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turntree.core.errors import InputError
from turntree.observe.opening import most_unpacked, opened, unpacks_too_far

_BATCH = 256  # rows: a value that is stored once may stand in every row


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Raises `InputError` for a file that is not Parquet, is damaged, or would become far larger than it is."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError("needs pyarrow to be read", path=path, hint="pip install 'turntree[parquet]'") from error
    with opened(path) as raw:
        most = most_unpacked(path)
        try:
            with pyarrow.parquet.ParquetFile(raw, pre_buffer=False) as file:
                groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
                if max(file.metadata.num_rows, sum(group.total_byte_size for group in groups)) > most:
                    raise unpacks_too_far(path)
                for batch in file.iter_batches(_BATCH):
                    yield from batch.to_pylist()
        except InputError:
            raise
        except Exception as error:  # the boundary to foreign code, which has errors of its own
            problem = f"is not a Parquet file that can be read ({type(error).__name__}: {str(error)[:200]})"
            raise InputError(problem, path=path, hint="copy it again") from error
