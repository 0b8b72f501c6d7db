"""A user's own verifier: `--verifier module:function`.

The function is called as `function(state, action)` with a `TurnState` and an assistant `Message` and returns a reward
in [0, 1], True or False, None when it cannot tell, or a whole `Verdict`. When it raises, the action was not judged: the
verdict has no reward and names the error, so that a crash is counted and never punished. A reward that is none (NaN,
outside [0, 1], another type) is a mistake in the function and stops the run.
"""

from __future__ import annotations

import hashlib
import importlib
import numbers
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.core.protocols import TurnState
from turntree.core.verdict import Verdict
from turntree.verifiers.strict import action_kind


@dataclass(frozen=True)
class UserVerifier:
    """Wraps a user's function. `name` holds a digest of the module's file, so that an edited rule has a new name
    (what the module imports is not part of it)."""

    name: str
    function: Callable[[TurnState, Message], Any]

    def judge(self, state: TurnState, action: Message) -> Verdict:
        kind = action_kind(action)
        try:
            answer = self.function(state, action)
        except Exception as error:
            return Verdict(None, _one_line(f"the verifier raised {type(error).__name__}: {error}"), kind)
        if isinstance(answer, Verdict):
            reward = None if answer.reward is None else self._reward(answer.reward)
            return Verdict(reward, str(answer.reason), answer.kind or kind)
        if answer is None:
            return Verdict(None, "the verifier could not tell", kind)
        return Verdict(self._reward(answer), self.name.partition("@")[0], kind)

    def _reward(self, answer: Any) -> float:
        if not isinstance(answer, numbers.Real):
            raise InputError(
                f"returned {type(answer).__name__}, which is no reward",
                field=self.name,
                hint="return a number from 0 to 1, True, False, None or a Verdict",
            )
        reward = float(answer)
        if not 0 <= reward <= 1:  # NaN fails this too
            raise InputError(f"returned {reward}", field=self.name, hint="a reward is a number from 0 to 1")
        return reward


def load_verifier(specification: str, folder: str | Path | None = None) -> UserVerifier:
    """Import "module:function". `folder` (the command line gives the current one) is searched after all installed
    packages, and stays on the import path because modules may import lazily. Raises `InputError` in one line."""
    module_name, colon, function_name = specification.partition(":")
    if not (module_name and colon and function_name):
        raise InputError(f"is {specification!r}", field="verifier", hint="write module:function, as in my_rules:judge")
    if folder is not None:
        _search_last(Path(folder).resolve())
    module = _import(module_name, folder)
    try:
        function = getattr(module, function_name)
    except AttributeError as error:
        problem = f"module {module_name!r} ({module.__file__}) has no {function_name!r}"
        raise InputError(problem, field="verifier", hint="check the name after the colon") from error
    if not callable(function):
        raise InputError(f"{specification!r} is {type(function).__name__}, not a function", field="verifier")
    return UserVerifier(f"{specification}@{_digest(module)}", function)


def _search_last(folder: Path) -> None:
    if not folder.is_dir():
        raise InputError("is not a folder", path=folder, hint="name the folder that holds the verifier's module")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _import(name: str, folder: str | Path | None) -> ModuleType:
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0] and error.name != name:
            raise InputError(
                f"module {name!r} needs {error.name!r}, which is not installed", field="verifier"
            ) from error
        where = f"not in {Path(folder).resolve()} and not installed" if folder is not None else "not installed"
        raise InputError(f"no module {name!r} ({where})", field="verifier", hint="check its name and folder") from error
    except Exception as error:
        problem = _one_line(f"importing {name!r} raised {type(error).__name__}: {error}")
        raise InputError(problem, field="verifier", hint="the module must import without errors") from error
    expected = None if folder is None else (Path(folder) / f"{name.replace('.', '/')}.py").resolve()
    if expected is not None and expected.is_file() and Path(module.__file__ or "").resolve() != expected:
        problem = f"{expected} is hidden by {module.__file__ or 'a built-in module'} of the same name"
        raise InputError(problem, field="verifier", hint="give your module another name")
    return module


def _digest(module: ModuleType) -> str:
    if module.__file__ is None:
        return "built-in"
    return hashlib.blake2b(Path(module.__file__).read_bytes(), digest_size=4).hexdigest()


def _one_line(text: str) -> str:
    return " ".join(text.split())
