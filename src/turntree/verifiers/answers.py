"""Answers compared by what they are."""

from __future__ import annotations

from typing import Literal

AnswerType = Literal["number", "span", "list", "expression"]
