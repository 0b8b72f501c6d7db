"""A generated household game as ALFWorld's files hold one: `pddl_problem` and `grammar`."""

GRAMMAR = """action PutObject {{ template :: "move {{o}} to {{r}}"; }}
action help {{ feedback :: "{help}"; }}
"task": "Your task is to: {task}"
"""


def written(game) -> dict[str, str]:
    """The fields of a file, for a game of the type `pick_and_place_simple`."""
    init = "\n".join(f"({' '.join(fact)})" for fact in game.facts)
    goal = f"(objectType ?o {game.goal.object_kind}Type) (receptacleType ?r {game.goal.receptacle_kind}Type)"
    problem = (
        f"(define (:init {init})\n(:goal (exists (?r - receptacle ?o - object) (and {goal} (inReceptacle ?o ?r)))))"
    )
    return {"pddl_problem": problem, "grammar": GRAMMAR.format(task=game.task, help=game.parse().help_text)}
