"""Find and build every exchangeable part by name: environments, verifiers, gates, branchers, engines, ...

A part is named in one of two ways, the same for every kind:

- a **registered name**: an entry point of the group `turntree.<kind>`. turntree registers its own parts like any
  installed package does. `name:argument` passes the text after the colon to a registered part that declares a
  parameter `argument` (`gymnasium:CartPole-v1`).
- **`module:object`**, where the module may lie in the current folder.

The name leads to a *factory* (a class or a function). The factory's parameters are the part's options, typed by their
annotations; of a parameter `config` that takes a dataclass, the fields are options. Parameters and fields that a stage
provides (`Kind.context`, for example `seed`) are not options; a factory declares the ones that it needs. Where a plain
function is the part itself (a verifier, a reward), its keyword-only parameters are the options.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar, cast

from turntree.core.config import Part, converted, is_fixed, overlaid, to_value, unknown_key
from turntree.core.errors import ConfigError, InputError
from turntree.core.foreign import NEEDS, call_part, package, reason_of
from turntree.core.protocols import Brancher, Filter, Gate, Renderer, StreamingEngine

T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """One kind of part. `context` names what a stage provides to its factories; with `plain` a function is the part
    itself and not a factory. What is built is held against `protocol`, a class to subclass."""

    noun: str
    context: tuple[str, ...] = ()
    plain: bool = False
    protocol: type | None = None

    @property
    def field(self) -> str:
        """The name of the configuration key that holds a part of this kind."""
        return self.noun.replace(" ", "_")


KINDS: dict[str, Kind] = {
    "environments": Kind("environment", ("split", "count", "seed", "model")),
    "providers": Kind("provider", ("limits",)),
    "policies": Kind("policy"),
    "demonstrators": Kind("demonstrator"),
    "teachers": Kind("teacher", plain=True),
    "verifiers": Kind("verifier", ("environment", "engine", "renderer", "episodes"), plain=True),
    "rewards": Kind("reward", plain=True),
    "gates": Kind("gate", ("seed",), protocol=Gate),
    "filters": Kind("filter", ("seed",), protocol=Filter),
    "branchers": Kind("brancher", ("vocabulary", "seed"), protocol=Brancher),
    "estimators": Kind("estimator", ("normalizer", "per_rollout"), plain=True),
    "engines": Kind("engine", ("policy",), protocol=StreamingEngine),
    "carriers": Kind("carrier", ("model", "device")),
    "renderers": Kind("renderer", ("tokenizer", "folder"), protocol=Renderer),
    "trace_formats": Kind("trace format", plain=True),
    "pivot_formats": Kind("pivot format", plain=True),
    "log_formats": Kind("log format", plain=True),
    "loggers": Kind("logger", ("run",)),
    "quizzes": Kind("quiz", plain=True),
}
DEFAULT = Part("default")  # what is registered under this name is taken where none is named: the embedded world
AS_GIVEN = {"options": "as given"}  # of a field whose options replace others, so that a default must not
_OURS = Path(__file__).parents[2]  # the packages of this distribution lie side by side
_brought: set[str] = set()  # the files of all modules that parts were loaded from
KIND_OF = {kind.field: name for name, kind in KINDS.items()}  # by the name of a field
_NAMES_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
ARGUMENT = "argument"  # the parameter that takes what follows a registered name: gymnasium:ARGUMENT
CONFIG = "config"  # the parameter whose fields are options, where its type is a dataclass


@dataclass(frozen=True)
class Option:
    """One option of a part: its type as annotated, its default (`required` where it has none)."""

    name: str
    hint: Any
    default: Any
    required: bool

    def value(self, given: Any, *, field: str) -> Any:
        """The given value merged into the default and converted to the option's type. Raises `ConfigError` where that
        fails."""
        whole = dataclasses.is_dataclass(self.default) or type(self.default) in (tuple, list)
        return converted(self.hint, overlaid(to_value(self.default), given) if whole else given, field=field)


@dataclass(frozen=True)
class Loaded:
    """A part that was found by name. `identity` names the code: for `module:object` a digest of the module's file
    (without what it imports), for a registered name the distribution and its version."""

    kind: str
    name: str
    target: Any
    argument: str | None
    identity: str

    @property
    def is_plain(self) -> bool:
        """Whether the target is the part itself instead of a factory."""
        return not callable(self.target) or (KINDS[self.kind].plain and not inspect.isclass(self.target))

    @property
    def config(self) -> Any:
        """The dataclass that a factory takes as `config`; None where it takes none."""
        hint = None if self.is_plain else _hints(self.target).get(CONFIG)
        return next((each for each in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(each)), None)

    def options(self) -> dict[str, Option]:
        """The options by name, in the order of the signature."""
        if not callable(self.target):
            return {}
        provided = {*KINDS[self.kind].context, ARGUMENT}
        found = _parameters(self.target, keyword_only=self.is_plain)
        if self.config is not None:
            del found[CONFIG]
            found |= _parameters(self.config)
        shapes = [
            each for each in (self.target, self.config) if inspect.isclass(each) and dataclasses.is_dataclass(each)
        ]
        provided |= {field.name for each in shapes for field in dataclasses.fields(each) if is_fixed(field)}
        return {name: option for name, option in found.items() if name not in provided}

    def resolved(self, options: Mapping[str, Any], field: str | None = None) -> dict[str, Any]:
        """Every option with its value: those given, converted to their types, and the defaults of the rest. Raises
        `ConfigError` for an unknown option (naming the known ones), a missing one and a wrong type, `InputError` for a
        package that is missing; `field` is where the configuration has the part (default: what its kind is called)."""
        known, where = self.options(), field or KINDS[self.kind].field
        if needed := getattr(self.target, NEEDS, None):
            package(*needed, field=where)
        for key in options:
            if key not in known:
                raise unknown_key(key, known, field=f"{where}.{key}")
        values: dict[str, Any] = {}
        for name, option in known.items():
            if name in options:
                values[name] = option.value(options[name], field=f"{where}.{name}")
            elif option.required:
                key = f"{where}.{name}"
                raise ConfigError("is missing", field=key, hint=f"give it with --set {key}=VALUE")
            else:
                values[name] = option.default
        return values

    def build(self, options: Mapping[str, Any], context: Mapping[str, Any], field: str | None = None) -> Any:
        """The part. `context` is what the stage provides (`Kind.context`); the factory gets what it declares. `field`
        as in `resolved`: an option that the factory refuses is named by its whole key."""
        values, where = self.resolved(options, field), field or KINDS[self.kind].field
        if self.is_plain:
            built = functools.partial(self.target, **values) if values else self.target
            return _checked(KINDS[self.kind], built, self.name, where)
        declared = inspect.signature(self.target).parameters
        given = {name: value for name, value in {**context, ARGUMENT: self.argument}.items() if name in declared}
        try:
            built = call_part(where, functools.partial(self.target, **given, **self._arguments(values, context)))
        except ConfigError as error:
            if error.field is None or re.split(r"[.\[]", error.field)[0] not in values:
                raise
            whole = f"{where}.{error.field}"
            raise ConfigError(error.problem, path=error.path, field=whole, hint=error.hint) from error
        return _checked(KINDS[self.kind], built, self.name, where)

    def _arguments(self, values: Mapping[str, Any], context: Mapping[str, Any]) -> Mapping[str, Any]:
        """The options as the factory takes them: those of its `config` as that dataclass."""
        if self.config is None:
            return values
        fields = {field.name for field in dataclasses.fields(self.config)}
        inside = {name: value for name, value in {**context, **values}.items() if name in fields}
        return {CONFIG: self.config(**inside), **{n: v for n, v in values.items() if n not in fields}}


def resolved(config: T, inside: str = "") -> T:
    """The configuration with every option of every part filled in, also in nested configurations (`inside`: the dotted
    key of this one). The name of a field (`Kind.field`) says of which kind its part is; fields of `AS_GIVEN` stay as
    they are. Raises `ConfigError` for a part that does not exist and for options that it does not have."""
    given = {field.name for field in dataclasses.fields(cast(Any, config)) if dict(field.metadata) == AS_GIVEN}
    spelled: dict[str, Any] = {}
    for name, value in _fields(config):
        if name in given:
            continue
        if isinstance(value, Part):
            spelled[name] = resolve(KIND_OF[name], value, field=inside + name)
        else:
            spelled[name] = resolved(value, f"{inside}{name}.")
    return dataclasses.replace(cast(Any, config), **spelled) if spelled else config


def identities(config: Any, inside: str = "") -> dict[str, str]:
    """The code identity of every part of a configuration, by its dotted key, for the identity of a run."""
    found: dict[str, str] = {}
    for name, value in _fields(config):
        if isinstance(value, Part):
            found[inside + name] = identity(KIND_OF[name], value)
        else:
            found |= identities(value, f"{inside}{name}.")
    return found


def _fields(config: Any) -> list[tuple[str, Any]]:
    """The fields of a configuration that are parts or nested configurations, which may hold parts."""
    values = [(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)]
    return [
        (name, value)
        for name, value in values
        if (name in KIND_OF if isinstance(value, Part) else dataclasses.is_dataclass(value))
    ]


def names(kind: str) -> list[str]:
    """The registered names of a kind, sorted."""
    return sorted(_registered(kind))


def load(kind: str, name: str) -> Loaded:
    """Find a part by name. Raises `InputError` where there is none, or where its module fails to import."""
    noun = KINDS[kind].noun
    if not name:
        raise InputError("is empty", field=noun, hint=_hint(kind))
    registered = _registered(kind)
    head, colon, rest = name.partition(":")
    if name in registered or (colon and head in registered):
        point = registered[name if name in registered else head]
        target = _guarded(point.load, point.value, kind)
        _brought.add(sys.modules[point.module].__file__ or "")
        takes = callable(target) and ARGUMENT in inspect.signature(target).parameters
        argument = rest if name not in registered else None
        if argument is not None and not takes:
            raise InputError(f"{head!r} takes no argument, but {rest!r} follows it", field=noun, hint=f"write {head!r}")
        return Loaded(kind, name, target, argument, f"{point.value}@{_release(point.dist)}")
    if not (colon and head and rest):
        raise InputError(f"there is no {noun} {name!r}", field=noun, hint=_hint(kind))
    module = _import(head, kind)
    file = getattr(module, "__file__", None)  # a module that is built in has none
    _brought.add(file or "")
    target = module
    for attribute in rest.split("."):
        if not hasattr(target, attribute):
            problem = f"module {head!r} ({file}) has no {rest!r}"
            raise InputError(problem, field=noun, hint="check the name after the colon")
        target = getattr(target, attribute)
    return Loaded(kind, name, target, None, f"{name}@{_digest(file)}")


def resolve(kind: str, part: Part, *, field: str | None = None) -> Part:
    """The same part with every option filled in, as written to `config.json`."""
    found = load(kind, part.name)
    return Part(part.name, {name: to_value(value) for name, value in found.resolved(part.options, field).items()})


def build(kind: str, part: Part, *, field: str | None = None, **context: Any) -> Any:
    """Load the part and build it; `field` as in `Loaded.build`."""
    return load(kind, part.name).build(part.options, context, field)


def identity(kind: str, part: Part) -> str:
    """The code identity of the part, for the identity of a run. It includes every module:object that its argument or
    an option names (`trl:my_game:Game`, `reward=my_game:judge`)."""
    found = load(kind, part.name)
    named = (found.argument, *part.options.values())
    return "+".join([found.identity, *(code for each in named if isinstance(each, str) and (code := _code(each)))])


def is_brought(file: str) -> bool:
    """Whether a source file belongs to a part of the user, so that an error raised there is not a turntree defect."""
    return file in _brought and not is_ours(file)


def is_ours(file: str) -> bool:
    """Whether a source file belongs to a package of this distribution."""
    path = Path(file)
    return path.is_relative_to(_OURS) and path.relative_to(_OURS).parts[0].startswith("turntree")


# finding


def entry_points(group: str) -> importlib.metadata.EntryPoints:
    """Those of all packages on the path."""
    return _points(group, tuple(sys.path))


def _registered(kind: str) -> dict[str, importlib.metadata.EntryPoint]:
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for point in entry_points(f"turntree.{kind}"):
        if point.name in found and found[point.name].value != point.value:
            both = f"{found[point.name].value} and {point.value}"
            raise InputError(f"{point.name!r} is registered twice ({both})", field=KINDS[kind].noun, hint="remove one")
        found[point.name] = point
    return found


@functools.cache
def _points(group: str, path: tuple[str, ...]) -> importlib.metadata.EntryPoints:
    """Read once: reading those of hundreds of packages takes a tenth of a second."""
    return importlib.metadata.entry_points(group=group)


@functools.cache
def _release(distribution: importlib.metadata.Distribution | None) -> str:
    return f"{distribution.name} {distribution.version}" if distribution else "unknown"


def _hint(kind: str) -> str:
    return f"registered: {', '.join(names(kind)) or 'none'}; your own: module:object"


def _parameters(target: Callable[..., Any], *, keyword_only: bool = False) -> dict[str, Option]:
    wanted = {inspect.Parameter.KEYWORD_ONLY, *(() if keyword_only else (inspect.Parameter.POSITIONAL_OR_KEYWORD,))}
    hints, defaults = _hints(target), _defaults(target)
    return {
        name: Option(name, hints.get(name, Any), defaults.get(name), name not in defaults)
        for name, parameter in inspect.signature(target).parameters.items()
        if parameter.kind in wanted
    }


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """Annotations as types, for a class those of its `__init__`; of a dataclass each is read where its field is."""
    plain = inspect.isclass(target) and not dataclasses.is_dataclass(target)
    function = cast("Any", target).__init__ if plain else target
    try:
        return typing.get_type_hints(function)
    except NameError:  # a name that exists for type checkers only: that of a `tokenizer` must not hide the options'
        found: dict[str, Any] = {}
        for name, annotation in function.__annotations__.items():
            with contextlib.suppress(NameError):
                one = SimpleNamespace(__annotations__={name: annotation})
                found |= typing.get_type_hints(one, globalns=getattr(function, "__globals__", {}))
        return found


def _defaults(target: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of the parameters that have one, including a dataclass's default factories."""
    empty = inspect.Parameter.empty
    found = {n: p.default for n, p in inspect.signature(target).parameters.items() if p.default is not empty}
    for each in dataclasses.fields(target) if inspect.isclass(target) and dataclasses.is_dataclass(target) else ():
        if each.default_factory is not dataclasses.MISSING:
            found[each.name] = each.default_factory()
    return found


def _search_here() -> Path:
    """Make modules of the current folder importable, after installed ones. The folder stays on the path, because
    modules may import lazily."""
    folder = Path.cwd()
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()
    return folder


def _code(text: str) -> str | None:
    """`module:object` with the digest of the module's file, without importing it; None where there is no such file."""
    if not _NAMES_CODE.fullmatch(text):
        return None
    _search_here()
    try:
        spec = importlib.util.find_spec(text.partition(":")[0])
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.has_location or spec.origin is None:
        return None
    return f"{text}@{_digest(spec.origin)}"


def _import(name: str, kind: str) -> ModuleType:
    """Import a module of the current folder or an installed one."""
    folder = _search_here()
    module = _guarded(functools.partial(importlib.import_module, name), name, kind)
    expected = (folder / f"{name.replace('.', '/')}.py").resolve()
    file = getattr(module, "__file__", None)
    if expected.is_file() and Path(file or "").resolve() != expected:
        problem = f"{expected} is hidden by {file or 'a built-in module'} of the same name"
        raise InputError(problem, field=KINDS[kind].noun, hint="give your module another name")
    return module


def _guarded(load: Callable[[], Any], name: str, kind: str) -> Any:
    try:
        return load()
    except BaseException as error:
        lacking = error.name or name if isinstance(error, ModuleNotFoundError) else ""
        if not lacking:
            problem, hint = f"importing {name!r} raised {reason_of(error)}", "the module must import without errors"
        elif f"{name}.".startswith(f"{lacking}."):
            problem, hint = f"no module {name!r} (not in {Path.cwd()} and not installed)", _hint(kind)
        else:
            problem, hint = f"{name!r} needs {lacking!r}, which is not installed", f"install {lacking}"
        raise InputError(problem, field=KINDS[kind].noun, hint=hint) from error


def _digest(file: str | None) -> str:
    return "built-in" if file is None else hashlib.blake2b(Path(file).read_bytes(), digest_size=4).hexdigest()


def _checked(kind: Kind, built: Any, name: str, where: str) -> Any:
    """A part that is ready to use. Raises `InputError` where it lacks something of its protocol, or has a method that
    does not take the arguments: before a run begins, and not where it is needed first."""
    if kind.protocol is None:
        return built
    declared = {key: told for cls in kind.protocol.__mro__ for key, told in vars(cls).items() if key[0] != "_"}
    missing = [key for key in declared if not hasattr(built, key)]
    others = [key for key in declared if not missing and not _takes(getattr(built, key), declared[key])]
    if missing or others:
        what = f"has no {', '.join(missing)}" if missing else f"does not take the arguments of {', '.join(others)}"
        hint = f"subclass turntree.core.protocols.{kind.protocol.__name__}"
        raise InputError(f"{name!r} gave {type(built).__name__}, which {what}", field=where, hint=hint)
    return built


def _takes(own: Any, declared: Any) -> bool:
    """Whether a method takes all that the protocol's does (a property takes nothing)."""
    if not callable(declared) or not callable(own):
        return not callable(declared)
    asked = [each for each in inspect.signature(declared).parameters.values() if each.name != "self"]
    keywords = {each.name: None for each in asked if each.kind is each.KEYWORD_ONLY}
    try:
        inspect.signature(own).bind(*[None] * (len(asked) - len(keywords)), **keywords)
    except TypeError:
        return False
    except ValueError:  # a function that is not written in Python tells nothing
        return True
    return True
