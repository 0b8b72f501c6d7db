"""An OpenEnv server for the tests: guess a number; with `mcp` its tools are those of an MCP environment."""

import random
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Guess(Action):
    message: str


class Said(Observation):
    text: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        self.number = random.Random(seed).randint(0, 9)
        self.total = 0
        return Said(text="guess a number from 0 to 9")

    def step(self, action, timeout_s=None, **options):
        right = action.message.strip() == str(self.number)
        return Said(text="right" if right else f"no, it is not {action.message}", done=right, reward=float(right))

    @property
    def state(self):
        return State()


class Adding(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("adding")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **options):
        return Observation()

    def _step_impl(self, action, timeout_s=None, **options):
        return Observation()

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    kind, port = sys.argv[1], int(sys.argv[2])
    if kind == "mcp":
        app = create_fastapi_app(Adding, CallToolAction, CallToolObservation, max_concurrent_envs=16)
    else:
        app = create_fastapi_app(Guessing, Guess, Said, max_concurrent_envs=16)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
