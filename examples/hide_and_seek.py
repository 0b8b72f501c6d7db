"""Hide and seek: a game that turntree does not ship, as you would write one of your own.

Something is hidden in one of five places of a room, always in the same place for the same thing, which nobody tells.
The policy names a place to go to, and has two tries. The rooms of "dev" and "test" are never those of "train".

    turntree check environment examples.hide_and_seek:tasks
    turntree train online --environment examples.hide_and_seek:tasks --count 200 --max-turns 2 --max-tokens 24 \
        --learning-rate 1e-3 --out runs/hide
    turntree evaluate --environment examples.hide_and_seek:tasks --model runs/hide/model --max-turns 2

docs/tutorial.md goes through these step by step.
"""

import random
import zlib

import turntree as tt

PLACES = ("fridge", "shelf", "desk", "cabinet", "drawer", "sidetable", "armchair", "garbagecan")
HIDDEN = {"apple": "desk", "book": "fridge", "mug": "armchair", "pencil": "cabinet"}


class HideAndSeek:
    """One room (protocol `tt.Environment`). A fork is made by replay, because there is no `fork` of its own."""

    def __init__(self, task_id: str, thing: str, places: list[str], tries: int) -> None:
        self.task_id, self.thing, self.places, self.tries = task_id, thing, places, tries

    def reset(self) -> tuple[tt.Message, ...]:
        seen = ", ".join(f"a {place} 1" for place in self.places)
        room = f"You are in the middle of a room. Looking quickly around you, you see {seen}."
        return (tt.Message("user", f"{room}\n\nYour task is to: look for the {self.thing}."),)

    def step(self, action: tt.Message) -> tt.Observation:
        self.tries -= 1
        found = action.content.strip() == f"go to {HIDDEN[self.thing]} 1"
        told = f"You see a {self.thing} 1." if found else "Nothing happens."
        done = found or self.tries == 0
        return tt.Observation((tt.Message("user", told),), done=done, success=found if done else None)


def tasks(split: str, count: int, *, seed: int, tries: int = 2) -> list[HideAndSeek]:
    """`count` rooms of a split. What follows the star, except for `seed`, is an option of the command: `--tries 3`."""
    rng, rooms = random.Random(f"{seed} {split}"), dict[str, HideAndSeek]()
    while len(rooms) < count:
        thing = rng.choice(sorted(HIDDEN))
        others = rng.sample([place for place in PLACES if place != HIDDEN[thing]], 4)
        places = rng.sample([*others, HIDDEN[thing]], 5)
        room = f"{thing}: {', '.join(places)}"
        belongs = ("dev", "test", "train")[min(zlib.crc32(room.encode()) % 10, 2)]  # every room is in one split
        if belongs == split:
            rooms[room] = HideAndSeek(room, thing, places, tries)
    return list(rooms.values())
