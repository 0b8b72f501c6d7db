"""The text of a game file: a PDDL problem over ALFRED's domain and the TextWorld grammar that words it.

Both halves are what `game.tw-pddl` holds besides the domain, so the official `alfworld` package, given its own
`alfred.pddl`, reads these games as it reads its own. Only what differs between games is passed in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

AGENT = "agent1"
# Named as constants inside ALFRED's actions, so that every problem has to declare them.
_DOMAIN_CONSTANTS = (
    ("SinkType", "rtype"),
    ("SinkBasinType", "rtype"),
    ("MicrowaveType", "rtype"),
    ("FridgeType", "rtype"),
    ("KnifeType", "otype"),
    ("ButterKnifeType", "otype"),
)

_SEEN_IN = "[{o.indefinite + ' ' + o.name | inreceptacle(o:object, r:receptacle)}]"
_FACED = "atlocation(a:agent, l:location) & receptacleatlocation(r:receptacle, l:location)"
_LOOSE = f"{_FACED} & objectatlocation(o:object, l:location) & not_inreceptacle(o:object, r:receptacle)"

# action -> command; then symbol -> cases (condition, text), tried in order; "" holds always.
_COMMANDS = {
    "GotoLocation": "go to [{r.name | receptacleatlocation(r:receptacle, lend:location)}]",
    "OpenObject": "open {r}",
    "CloseObject": "close {r}",
    "PickupObject": "take {o} from {r}",
    "PutObject": "move {o} to {r}",
    "CleanObject": "clean {o} with {r}",
    "HeatObject": "heat {o} with {r}",
    "CoolObject": "cool {o} with {r}",
    "ToggleObject": "use {o}",
    "SliceObject": "slice {co} with {ko}",
    "examineReceptacle": "examine {r}",
    "examineObject": "examine {o}",
    "inventory": "inventory",
    "look": "look",
    "help": "help",
}


_HELP = "Available commands:\n" + "\n".join(
    f"  {command}"
    for command in (
        "look",
        "inventory",
        "go to (receptacle)",
        "open (receptacle)",
        "close (receptacle)",
        "take (object) from (receptacle)",
        "move (object) to (receptacle)",
        "examine (something)",
        "use (object)",
        "heat (object) with (receptacle)",
        "clean (object) with (receptacle)",
        "cool (object) with (receptacle)",
        "slice (object) with (object)",
    )
)


def _states() -> list[tuple[str, str]]:
    """Cases of examining an object: temperature and cleanliness in every combination, most specific first."""
    cases = []
    for sliced in (True, False):
        for clean in (True, False):
            for fact, word in (("ishot", "hot"), ("iscool", "cool"), ("", "")):
                facts = [f for f, on in (("isclean", clean), (fact, fact), ("issliced", sliced)) if on]
                if not facts or facts == ["issliced"]:
                    continue
                # The official wording says "cold" for this one state and "cool" elsewhere.
                heat = "cold" if facts == ["iscool"] else word
                words = " and ".join(w for w in (heat, "clean" if clean else "") if w)
                condition = " & ".join(f"{f}(o:object)" for f in facts)
                cases.append((condition, f"This is a {words}{' sliced' if sliced else ''} {{o.name}}."))
    return cases


_SYMBOLS: dict[str, list[tuple[str, str]]] = {
    "intro": [("", "-= Welcome to TextWorld, ALFRED! =-\n\n#look.feedback#\n\n#task#")],
    "notImplemented": [("", "TODO")],
    "GotoLocation.feedback": [("", "You arrive at {r.name}. #examineReceptacle.feedback#")],
    "OpenObject.feedback": [("", "You open the {r.name}. #examineReceptacle.feedback#")],
    "CloseObject.feedback": [("", "You close the {r.name}.")],
    "PickupObject.feedback": [("", "You pick up the {o.name} from the {r.name}.")],
    "PutObject.feedback": [("", "You move the {o.name} to the {r.name}.")],
    "CleanObject.feedback": [("", "You clean the {o.name} using the {r.name}.")],
    "HeatObject.feedback": [("", "You heat the {o.name} using the {r.name}.")],
    "CoolObject.feedback": [("", "You cool the {o.name} using the {r.name}.")],
    "SliceObject.feedback": [("", "You sliced the {co.name} with the {ko.name}.")],
    "ToggleObject.feedback": [
        ("toggleable(o:object) & istoggled(o:object)", "You turn on the {o.name}."),
        ("toggleable(o:object)", "You turn off the {o.name}."),
        ("", "You don't see any switch on the {o.name}."),
    ],
    "help.feedback": [("", _HELP)],
    "inventory.feedback": [
        ("holdsany(a:agent)", "You are carrying: [{o.indefinite + ' ' + o.name | holds(a:agent, o:object)}]."),
        ("", "You are not carrying anything."),
    ],
    "examineReceptacle.feedback": [
        ("openable(r:receptacle) & opened(r:receptacle)", f"The {{r.name}} is open. In it, you see {_SEEN_IN}."),
        ("openable(r:receptacle)", "The {r.name} is closed."),
        ("", f"On the {{r.name}}, you see {_SEEN_IN}."),
    ],
    "examineObject.feedback": [
        (
            "isreceptacleobject(o:object)",
            "This is a normal {o.name}. In it, you see"
            " [{o2.indefinite + ' ' + o2.name | inreceptacleobject(o2:object, o:object)}].",
        ),
        *_states(),
        ("toggleable(o:object) & istoggled(o:object)", "This {o.name} is on."),
        ("toggleable(o:object) & not_istoggled(o:object)", "This {o.name} is off."),
        ("sliceable(o:object) & issliced(o:object)", "This is a sliced {o.name}."),
        ("", "There's nothing special about {o.name}."),
    ],
    "look.feedback": [
        (_FACED, f"You are facing the [{{r.name | {_FACED}}}]. Next to it, you see #loose#."),
        ("", "You are in the middle of a room. Looking quickly around you, you see #appliances#."),
    ],
    "loose": [(_LOOSE, f"[{{#overview(o)# | {_LOOSE}}}]"), ("", "nothing")],
    "appliances": [
        (
            "receptacleatlocation(r:receptacle, l:location)",
            "[{#overview(r)# | receptacleatlocation(r:receptacle, l:location)}]",
        ),
        ("", "nothing"),
    ],
    "overview(o)": [("", "{o.indefinite} {o.name}")],
    "overview(r)": [("", "{r.indefinite} {r.name or r.id}")],
    "list_empty": [("", "nothing")],
    "list_separator": [("", ", ")],
    "list_last_separator": [("", ", and ")],
}


def _case(condition: str, text: str) -> dict[str, str]:
    return {"condition": condition, "rhs": text} if condition else {"rhs": text}


def render_grammar(task: str) -> str:
    """The grammar of a game whose task sentence is `task`, such as "put a mug in desk."."""
    symbols = {**_SYMBOLS, "task": [("", f"Your task is to: {task}")]}
    table = {name: [_case(*case) for case in cases] for name, cases in symbols.items()}
    actions = "".join(
        f'action {name} {{\n    template :: "{command}";\n    feedback :: "#{name}.feedback#";\n}}\n\n'
        for name, command in _COMMANDS.items()
    )
    return f'grammar :: """\n{json.dumps(table, indent=1)}\n""";\n\n{actions}'


def render_problem(
    name: str, declarations: Iterable[tuple[str, str]], facts: Sequence[tuple[str, ...]], goal: str
) -> str:
    """The PDDL problem `name`: typed constants (name, type), facts of the initial state, and the goal formula."""
    constants = sorted({*declarations, *_DOMAIN_CONSTANTS, (AGENT, "agent")})
    objects = "\n".join(f"    {constant} - {kind}" for constant, kind in constants)
    init = "\n".join(f"    ({' '.join(fact)})" for fact in facts)
    return (
        f"(define (problem {name})\n(:domain alfred)\n(:objects\n{objects}\n)\n(:init\n{init}\n)\n(:goal {goal})\n)\n"
    )
