"""Records of numbers that add up field by field."""

from __future__ import annotations

import dataclasses
from typing import Any, Self


class Additive:
    """Gives a dataclass of numbers `+`. Where every field is nothing by default, `sum(records, Record())` works."""

    def __add__(self, other: Self) -> Self:
        fields: Any = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        return type(self)(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields})
