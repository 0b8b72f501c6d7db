"""Environments of verifiers for the tests: one turn, a game, tools, a reward function that fails."""

import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"What is {n} plus 1?", "answer": str(n + 1)} for n in range(40)]


def exact(completion, answer):
    return float(completion[-1].content == answer)


def single():
    return vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[exact]))


def broken():
    def fails(completion):
        raise KeyError("x")

    return vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[fails]))


CLEANED = []


class Guessing(vf.MultiTurnEnv):
    @vf.cleanup
    async def cleaned(self, state):
        CLEANED.append(state["trajectory_id"])

    async def setup_state(self, state):
        state["tries"] = 0
        return state

    async def env_response(self, messages, state, **kwargs):
        state["tries"] += 1
        if messages[-1].content == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"wrong, try {state['tries']}"}]


def won(state):
    return float(state.get("final_env_response") is not None)


def multi():
    rows, held_out = Dataset.from_list(ROWS), Dataset.from_list(ROWS[:10])
    return Guessing(max_turns=5, dataset=rows, eval_dataset=held_out, rubric=vf.Rubric(funcs=[won]))


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def tool():
    return vf.ToolEnv(tools=[add], dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[exact]))


def load_environment(kind: str = "single"):
    return {"single": single, "multi": multi, "tool": tool}[kind]()
