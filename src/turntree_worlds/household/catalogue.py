"""What stands in a generated room: receptacle kinds, object kinds and who may hold whom.

The kind names and the pairs (object kind, receptacle kind) are facts of ALFRED's world, so that a policy
meets the same words in generated and in official games; weights and counts are our own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

OPENABLE_KINDS = frozenset({"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"})
LAMP_KIND = "DeskLamp"
LAMP_HOLDERS = ("Desk", "SideTable", "Dresser", "Shelf")


@dataclass(frozen=True)
class ObjectKind:
    """A portable kind: what can be done to it, and where it may lie (likeliest place first)."""

    name: str
    properties: frozenset[str]
    places: tuple[str, ...]


@dataclass(frozen=True)
class Room:
    """A room kind: each receptacle kind with (weight in the draw, greatest count), and the objects found there."""

    name: str
    receptacles: dict[str, tuple[int, int]]
    objects: tuple[ObjectKind, ...]


def _kinds(table: str) -> dict[str, ObjectKind]:
    """Read entries `Name: property ... | Place ...`; a line without a colon continues the one above."""
    kinds: dict[str, ObjectKind] = {}
    for entry in re.split(r"\n(?=[^\n]*:)", table.strip()):
        name, rest = entry.strip().split(":")
        properties, places = rest.split("|")
        kinds[name] = ObjectKind(name, frozenset(properties.split()), tuple(places.split()))
    return kinds


# `bowl` marks what ALFRED calls a receptacle object: it can be examined as a (here always empty) container.
OBJECT_KINDS = _kinds(
    """
    AlarmClock: | Desk Shelf SideTable Dresser DiningTable CounterTop
    Apple: clean heat cool slice | Fridge CounterTop GarbageCan Microwave SinkBasin DiningTable SideTable
    BaseballBat: | Bed SideTable DiningTable
    Book: | Bed Desk Drawer Dresser SideTable CoffeeTable Sofa DiningTable Shelf Cabinet ArmChair
        Ottoman CounterTop
    Bowl: clean cool bowl | Cabinet Fridge CounterTop DiningTable Desk Shelf SinkBasin Microwave
        SideTable CoffeeTable Dresser
    Box: bowl | Sofa DiningTable Dresser CoffeeTable Cabinet SideTable Shelf ArmChair Desk Ottoman
    Bread: heat cool slice | CounterTop DiningTable Fridge GarbageCan Microwave SideTable
    ButterKnife: clean | CounterTop DiningTable Drawer SinkBasin SideTable
    CD: | Drawer Desk GarbageCan Dresser SideTable Shelf DiningTable Safe Cabinet CounterTop
    Candle: | CounterTop Toilet Cabinet Shelf Drawer SideTable DiningTable CoffeeTable Dresser Cart
    CellPhone: | Bed Drawer Desk Dresser Safe Sofa ArmChair SideTable Shelf CounterTop DiningTable
        CoffeeTable Ottoman
    Cloth: clean | Cabinet BathtubBasin CounterTop Drawer SinkBasin Shelf Toilet Cart GarbageCan
        LaundryHamper SideTable Dresser Desk ArmChair
    CreditCard: | Drawer Desk Shelf SideTable CoffeeTable CounterTop Dresser Sofa ArmChair
        DiningTable Safe Ottoman
    Cup: clean heat cool bowl | Cabinet Fridge CounterTop SinkBasin DiningTable Microwave Shelf SideTable
    DishSponge: clean | CounterTop Cabinet Drawer DiningTable SinkBasin Shelf GarbageCan
        BathtubBasin Toilet Cart SideTable
    Egg: clean heat cool slice | Fridge CounterTop GarbageCan SinkBasin Microwave DiningTable SideTable
    Fork: clean | CounterTop Drawer DiningTable SinkBasin SideTable
    Glassbottle: | CounterTop Cabinet SinkBasin Shelf DiningTable Fridge Microwave
    HandTowel: | HandTowelHolder CounterTop Cabinet Drawer Shelf Toilet BathtubBasin SinkBasin
        GarbageCan Cart SideTable
    Kettle: clean | StoveBurner CounterTop Cabinet DiningTable SinkBasin Shelf SideTable
    KeyChain: | Drawer Desk Safe Shelf SideTable Dresser Sofa CoffeeTable DiningTable ArmChair
        CounterTop Ottoman
    Knife: clean | CounterTop DiningTable Drawer SinkBasin SideTable
    Ladle: clean | CounterTop Drawer Cabinet DiningTable SinkBasin
    Laptop: | Bed Desk DiningTable Sofa CoffeeTable Dresser ArmChair SideTable Ottoman CounterTop
    Lettuce: clean cool slice | CounterTop Fridge DiningTable SinkBasin GarbageCan SideTable
    Mug: clean heat cool bowl | CounterTop CoffeeMachine Cabinet Fridge Desk Microwave DiningTable
        SinkBasin Shelf SideTable Dresser
    Newspaper: | Sofa Shelf DiningTable Dresser SideTable CoffeeTable ArmChair Cabinet Drawer
        Ottoman GarbageCan
    Pan: clean cool bowl | StoveBurner CounterTop Fridge Cabinet DiningTable SinkBasin SideTable
    Pen: | Desk Drawer Shelf Dresser SideTable DiningTable CounterTop CoffeeTable GarbageCan
    Pencil: | Desk Shelf Drawer SideTable Dresser DiningTable CoffeeTable CounterTop GarbageCan
    PepperShaker: | Cabinet CounterTop Drawer DiningTable Shelf SideTable
   Pillow: | Bed Sofa ArmChair Ottoman
    Plate: clean heat cool bowl | Cabinet CounterTop Fridge DiningTable Shelf SinkBasin Microwave
        SideTable CoffeeTable
    Plunger: | Cabinet Cart
    Pot: clean cool bowl | StoveBurner CounterTop Fridge DiningTable Cabinet Shelf SinkBasin SideTable
    Potato: clean heat cool slice | CounterTop Fridge SinkBasin Microwave DiningTable GarbageCan SideTable
    RemoteControl: | Sofa CoffeeTable Dresser ArmChair Drawer SideTable DiningTable Desk Shelf
        Ottoman CounterTop
    SaltShaker: | Cabinet Drawer CounterTop DiningTable Shelf SideTable
    SoapBar: clean | CounterTop Toilet SinkBasin Cabinet Shelf Drawer BathtubBasin GarbageCan Cart SideTable
    SoapBottle: | CounterTop Cabinet Toilet DiningTable GarbageCan Shelf SideTable Drawer Cart
    Spatula: clean | CounterTop Drawer DiningTable SinkBasin SideTable
    Spoon: clean | CounterTop Drawer SinkBasin DiningTable SideTable
    SprayBottle: | CounterTop Cabinet Toilet GarbageCan Shelf Cart SideTable Dresser Drawer DiningTable
    Statue: | CounterTop Shelf SideTable DiningTable CoffeeTable Dresser Safe Desk
    TissueBox: | SideTable CoffeeTable Shelf DiningTable Cabinet Desk CounterTop Dresser Drawer
        Toilet Cart TVStand GarbageCan
    ToiletPaper: | Toilet Cabinet CounterTop ToiletPaperHanger GarbageCan Shelf Drawer Cart SideTable
    Tomato: clean heat cool slice | CounterTop Fridge DiningTable SinkBasin GarbageCan Microwave SideTable
    Towel: | TowelHolder
    Vase: | Shelf Cabinet CounterTop DiningTable Dresser SideTable CoffeeTable Safe Desk
    Watch: | SideTable CoffeeTable Drawer Dresser DiningTable Shelf Safe Desk
    WineBottle: cool | CounterTop DiningTable Cabinet GarbageCan Shelf Fridge SideTable
    """
)


def _room(name: str, receptacles: str, objects: str) -> Room:
    """Read receptacles as `Kind:weight:greatest_count ...`."""
    table = {}
    for item in receptacles.split():
        kind, weight, greatest = item.split(":")
        table[kind] = (int(weight), int(greatest))
    return Room(name, table, tuple(OBJECT_KINDS[kind] for kind in objects.split()))


ROOMS = {
    room.name: room
    for room in (
        _room(
            "kitchen",
            "Cabinet:6:12 CounterTop:5:3 Drawer:4:8 Fridge:6:1 Microwave:6:1 SinkBasin:6:1"
            " StoveBurner:3:4"
            " DiningTable:3:2 GarbageCan:3:1 CoffeeMachine:2:1 Toaster:1:1 Shelf:2:3 SideTable:1:1",
            "Apple Bowl Bread ButterKnife Cup DishSponge Egg Fork Glassbottle Kettle Knife Ladle"
            " Lettuce Mug Pan"
            " PepperShaker Plate Pot Potato SaltShaker SoapBottle Spatula Spoon Statue Tomato Vase"
            " WineBottle"
            " CellPhone CreditCard Book",
        ),
        _room(
            "bedroom",
            "Bed:5:2 Desk:5:2 Drawer:6:12 Shelf:4:6 SideTable:4:2 Dresser:3:1 GarbageCan:3:1"
            " Safe:2:1 ArmChair:2:2"
            " LaundryHamper:1:1 Cabinet:2:4",
            "AlarmClock BaseballBat Book Bowl CD CellPhone CreditCard KeyChain Laptop Mug Pen"
            " Pencil Pillow"
            " TissueBox Vase RemoteControl Statue",
        ),
        _room(
            "bathroom",
            "CounterTop:4:2 SinkBasin:5:2 Toilet:5:1 Cabinet:6:8 Drawer:4:8 BathtubBasin:2:1"
            " GarbageCan:3:1 Shelf:3:4"
            " HandTowelHolder:2:2 TowelHolder:2:2 ToiletPaperHanger:2:1 Cart:1:1 SideTable:1:1",
            "Candle Cloth DishSponge HandTowel Plunger SoapBar SoapBottle SprayBottle TissueBox ToiletPaper Towel",
        ),
        _room(
            "livingroom",
            "Sofa:4:2 ArmChair:4:3 CoffeeTable:4:2 SideTable:4:4 DiningTable:3:2 Dresser:3:1"
            " Shelf:4:8 Drawer:6:12"
            " Cabinet:4:8 TVStand:2:1 GarbageCan:2:1 Ottoman:1:1 Safe:2:1",
            "Book Bowl Box Candle CellPhone CreditCard KeyChain Laptop Newspaper Pen Pencil Pillow Plate"
            " RemoteControl Statue TissueBox Vase Watch",
        ),
    )
}
