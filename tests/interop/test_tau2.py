"""The domains of tau2-bench, on a stand-in of its package with the same interface (the real one: test_packages.py)."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest

from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall
from turntree.env.check import check_environment
from turntree.stages.config import EpisodesCheckConfig, TrainOnlineConfig
from turntree.stages.train_online import run_train_online
from turntree.train.config import OnlineConfig
from turntree_interop import tau2

SCHEMA = {"type": "object", "properties": {"who": {"type": "string"}}, "required": ["who"]}


class Kit:
    kinds: ClassVar = {"look": "read", "pay": "write"}

    def __init__(self) -> None:
        self.owed, self.copies = {"ann": 5, "bob": 7}, 0

    def has_tool(self, name):
        return name in self.kinds

    def tool_type(self, name):
        return SimpleNamespace(value=self.kinds[name])

    def look(self, who):
        return self.owed[who]

    def pay(self, who):
        if who not in self.owed:
            raise ValueError("User not found")
        self.owed[who] = 0
        return {"paid": who}

    def __deepcopy__(self, memo):
        twin = Kit()
        twin.owed, twin.copies = dict(self.owed), self.copies + 1
        return twin


class Bank:
    def __init__(self, solo: bool) -> None:
        self.tools, self.user_tools = Kit(), None

    def get_policy(self):
        return "Be fair."

    def get_tools(self):
        function = lambda name: {"type": "function", "function": {"name": name, "parameters": SCHEMA}}  # noqa: E731
        return [SimpleNamespace(openai_schema=function(name)) for name in Kit.kinds]

    def make_tool_call(self, name, requestor="assistant", **arguments):
        return getattr(self.tools, name)(**arguments)

    def sync_tools(self):
        pass

    def set_state(self, data, actions, history):
        self.tools.owed.update(data)

    def to_json_str(self, value):
        return value if isinstance(value, str) else json.dumps(value)

    def run_env_assertion(self, due, raise_assertion_error):
        return self.tools.owed[due[0]] == due[1]

    def get_db_hash(self):
        return json.dumps(self.tools.owed)

    def get_user_db_hash(self):
        return None


def gold(name, who, requestor, compare_args):
    return SimpleNamespace(name=name, arguments={"who": who}, requestor=requestor, compare_args=compare_args)


def task(
    id,
    *actions,
    say=(),
    asserts=(),
    basis=("DB", "COMMUNICATE"),
    start=None,
    requestor="assistant",
    ticket=None,
    compare=None,
):
    due = SimpleNamespace(
        actions=[gold(*action, requestor, compare) for action in actions],
        communicate_info=list(say),
        env_assertions=list(asserts),
        reward_basis=basis,
    )
    told = SimpleNamespace(reason_for_call="You owe.", known_info=f"You are {id}.", task_instructions="Pay.")
    state = start and SimpleNamespace(initialization_data=start, initialization_actions=None, message_history=None)
    scenario = SimpleNamespace(instructions=told)
    return SimpleNamespace(id=id, evaluation_criteria=due, user_scenario=scenario, initial_state=state, ticket=ticket)


TASKS = [
    task("pays", ("look", "ann"), ("pay", "ann"), say=["1,000".replace(",", "")]),
    task("asserts", ("pay", "bob"), asserts=[("bob", 0)], basis=("ENV_ASSERTION",)),
    task("starts", ("pay", "ann"), start={"ann": 99}),
    task("looks", ("look", "bob"), ("look", "nobody")),
]


@pytest.fixture
def bank(monkeypatch):
    """`tau2.domains.bank`; the list of its tasks, which a test may change."""
    source = ModuleType("tau2.domains.bank.environment")
    held = list(TASKS)
    source.get_environment = lambda solo_mode=False: Bank(solo_mode)
    source.get_tasks = lambda: held
    for name in ("tau2", "tau2.domains", "tau2.domains.bank"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, source.__name__, source)
    return held


def opened(**options):
    """Every task of the stand-in, by its id."""
    found = {}
    for split in ("train", "dev", "test"):
        try:
            tasks = tau2.tasks(split, 99, seed=0, argument="bank", **options)
        except InputError as error:
            if "no row for split" not in str(error):
                raise
        else:
            found |= {each.task_id.partition("/")[2]: each for each in tasks}
    return found


@pytest.mark.parametrize("seed", range(8))
def test_a_domain_of_few_tasks_has_tasks_to_hold_out(bank, seed):
    splits = [tau2.tasks(split, 99, seed=seed, argument="bank") for split in ("train", "dev", "test")]
    assert all(splits) and sorted(each.task_id for some in splits for each in some) == sorted(
        f"bank/{each.id}" for each in bank
    )


def called(name, who):
    return Message("assistant", "", (ToolCall(name, {"who": who}, "c1"),))


def played(environment, *messages):
    environment.reset()
    for message in messages:
        last = environment.step(message)
    return last


def said(text):
    return Message("assistant", text)


def test_the_gold_solves_every_task_and_silence_none_that_changes_something(bank):
    environments = opened()
    assert set(environments) == {"pays", "asserts", "starts", "looks"}
    for name, environment in environments.items():
        ended = played(environment, *environment.gold)
        assert (ended.done, ended.success, ended.reward) == (True, True, 1.0), name
        ended = played(environment, *[said("Hello?")] * 5)
        assert (ended.done, ended.reward) == (True, float(name == "looks"))


def test_what_the_agent_only_thought_was_not_communicated(bank):
    bank[:] = [task("tells", say=["1000"], basis=("COMMUNICATE",))]
    environment = opened(replies=0)["tells"]
    assert played(environment, said("<think>It is 1,000.</think>\n\nBye.")).reward == 0.0
    assert played(environment, said("<think>How much?</think>\n\nIt is 1,000.")).reward == 1.0


@pytest.mark.parametrize("basis", [("ACTION",), ("ENV_ASSERTION", "ACTION")])
def test_with_the_basis_action_every_gold_action_must_be_called(bank, basis):
    """As in telecom: the assertion is that nothing has changed, and the agent must look all the same."""
    bank[:] = [task("looks", ("look", "ann"), ("look", "bob"), basis=basis, asserts=[("ann", 5)])]
    environment = opened(replies=0)["looks"]
    ann, bob, bye = called("look", "ann"), called("look", "bob"), said("Bye.")
    assert played(environment, bye).reward == 0.0
    assert played(environment, ann, bye).reward == 0.0
    assert played(environment, ann, ann, bye).reward == 0.0
    assert played(environment, bob, called("look", "eve"), ann, bye).reward == 1.0
    assert played(environment, *environment.gold).reward == 1.0


def test_a_fork_knows_the_calls_that_were_made_before_it_and_no_other(bank):
    bank[:] = [task("looks", ("look", "ann"), ("look", "bob"), basis=("ACTION",))]
    environment = opened(replies=0)["looks"]
    played(environment, called("look", "ann"))
    twin = environment.fork()
    twin.step(called("look", "bob"))
    assert (twin.step(said("Bye.")).reward, environment.step(said("Bye.")).reward) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("compare", "arguments", "reward"),
    [
        (None, {"who": "ann"}, 1.0),
        (None, {"who": "bob"}, 0.0),
        (None, {"who": "ann", "why": "asked"}, 0.0),
        (["who"], {"who": "ann", "why": "asked"}, 1.0),
        (["who"], {"why": "asked"}, 0.0),
        ([], {"why": "asked"}, 1.0),
    ],
)
def test_a_call_is_compared_by_the_arguments_that_tau2_compares(bank, compare, arguments, reward):
    bank[:] = [task("looks", ("look", "ann"), basis=("ACTION",), compare=compare)]
    call = Message("assistant", "", (ToolCall("look", arguments, "c1"),))
    assert played(opened(replies=0)["looks"], call, said("Bye.")).reward == reward


@pytest.mark.parametrize("basis", [(), ("NL_ASSERTION",), ("DB", "STYLE")])
def test_a_task_that_nothing_here_judges_is_refused_with_its_name_and_basis(bank, basis):
    bank[:] = [task("poem", basis=basis)]
    named = basis[-1] if basis else "nothing"
    with pytest.raises(InputError, match=f"'reward_basis': task 'poem' has the reward basis {named}, which is not"):
        opened()


def test_beside_a_basis_that_is_judged_an_assertion_in_words_is_left_out(bank):
    bank[:] = [task("pays", ("pay", "ann"), basis=("DB", "NL_ASSERTION"))]
    environment = opened(replies=0)["pays"]
    assert played(environment, said("Bye.")).reward == 0.0
    assert played(environment, called("pay", "ann"), said("Bye.")).reward == 1.0


def test_the_laws_of_environments_hold(bank):
    for environment in opened().values():
        assert [found for found in check_environment(environment) if found.grave] == []


def test_what_was_to_be_said_counts_without_commas_and_what_should_not_change_may_not(bank):
    environment = opened()["pays"]
    goodbye = [said("Bye.")] * 4
    assert played(environment, called("pay", "ann"), said("It is 1,000."), *goodbye).reward == 1.0
    assert played(environment, called("pay", "ann"), said("It is 100."), *goodbye).reward == 0.0
    assert played(environment, called("pay", "ann"), called("pay", "bob"), said("1000"), *goodbye).reward == 0.0


def test_a_fork_shares_the_databases_until_one_of_the_two_writes(bank):
    environment = opened()["pays"]
    environment.reset()
    environment.step(called("look", "ann"))
    twin = environment.fork()
    assert twin._held.environment is environment._held.environment
    environment.step(called("pay", "ann"))
    assert twin.step(called("look", "ann")).messages[0].content == "5"
    assert environment.step(called("look", "ann")).messages[0].content == "0"
    before = environment._held.environment
    environment.step(called("pay", "bob"))
    assert environment._held.environment is before, "its own already"
    late = environment.fork()
    late.step(called("pay", "ann"))
    assert environment._held.environment is before and late._held.environment is not before


def test_one_episode_does_not_change_what_the_next_one_begins_with(bank):
    environment = opened()["pays"]
    played(environment, called("pay", "ann"))
    assert played(environment, called("look", "ann")).messages[0].content == "5"


def test_mistakes_are_answered(bank):
    environment = opened()["pays"]
    assert played(environment, called("fly", "ann")).messages[0].content == "Error: Tool 'fly' not found."
    assert played(environment, called("pay", "eve")).messages[0].content == "Error: User not found"
    wrong = Message("assistant", "", (ToolCall("pay", {"whom": 1}, "c1"),))
    assert played(environment, wrong).messages[0].content.startswith("Error: ")


def test_the_scripted_user_tells_its_scenario_agrees_and_leaves(bank):
    environment = opened(replies=2)["pays"]
    system, user = environment.reset()
    assert "Be fair." in system.content and user.content.endswith("You owe.\nYou are pays.\nPay.")
    heard = [environment.step(said("?")) for _ in range(3)]
    assert [each.messages[0].content for each in heard] == ["Yes, please go ahead."] * 2 + ["The customer has left."]
    assert [each.done for each in heard] == [False, False, True]


def test_a_ticket_is_solved_without_a_user(bank):
    bank[:] = [task("solo", ("pay", "ann"), ticket="Ann wants to pay.")]
    environment = opened(user="solo")["solo"]
    assert environment.reset()[1].content == "Ann wants to pay."
    ended = played(environment, called("pay", "ann"), said("Done."))
    assert (ended.done, ended.success) == (True, True)
    with pytest.raises(InputError, match="has no ticket"):
        bank[:] = [task("none", ("pay", "ann"))]
        opened(user="solo")


def test_a_user_with_tools_of_its_own_cannot_be_scripted(bank):
    bank[:] = [task("phone", ("pay", "ann"), requestor="user")]
    with pytest.raises(InputError, match="user=solo"):
        opened()


def test_without_tau2_bench_the_error_says_where_it_comes_from(monkeypatch):
    monkeypatch.setitem(sys.modules, "tau2.domains", None)
    with pytest.raises(InputError, match="the `tau2` of PyPI is another project"):
        tau2.tasks("train", 1, seed=0, argument="retail")
    with pytest.raises(InputError, match="write tau2:DOMAIN"):
        tau2.tasks("train", 1, seed=0, argument=None)


def test_a_copy_of_a_conversation_has_its_own_words(bank):
    environment = opened()["pays"]
    environment.reset()
    first = environment._held
    second = copy.deepcopy(first)
    second.said.append("1000")
    assert first.said == []


def test_it_is_trained_on_from_its_tasks_to_the_new_weights(bank, tmp_path):
    """A tiny policy says nothing sensible here: what is shown is that reward, tools and forks go through training."""
    config = TrainOnlineConfig(
        model="qa",
        environment=Part("tau2:bank"),
        count=3,
        check=EpisodesCheckConfig(tasks=1),
        train=OnlineConfig(
            iterations=1,
            groups=2,
            group_size=2,
            max_turns=2,
            sampling=Sampling(max_tokens=8),
        ),
    )
    result = run_train_online(config, tmp_path / "run")
    assert (result["iterations"], result["rollouts"], result["censored"]) == (1, 4, {})
    assert 0 <= result["reward_mean"] <= 1
    assert Path(result["model"]).is_dir()


# a model plays the user


@pytest.fixture
def talks(bank, monkeypatch):
    """tau2's simulator, scripted: it says its scenario, looks something up with a tool of its own, and stops once it
    hears "paid". Counts what it was asked."""
    asked = []

    class Said(SimpleNamespace):
        def is_tool_call(self):
            return bool(self.tool_calls)

    class Simulator:
        def __init__(self, *, tools, instructions, llm, llm_args):
            assert (tools, llm) == (None, "openai/any")
            assert llm_args == {"temperature": 0.0, "api_base": "http://host/v1"}
            self.instructions = instructions

        def get_init_state(self):
            return SimpleNamespace(messages=[])

        def generate_next_message(self, message, state):
            asked.append(message.content)
            stop = "paid" in message.content
            text = "###STOP###" if stop else f"I am heard {len(state.messages)}. {self.instructions}"
            said = Said(role="user", content=text, tool_calls=None)
            return said, SimpleNamespace(messages=[*state.messages, message, said])

        @staticmethod
        def is_stop(message):
            return "###STOP###" in message.content

    simulator, message = ModuleType("tau2.user.user_simulator"), ModuleType("tau2.data_model.message")
    simulator.UserSimulator = Simulator
    message.AssistantMessage = lambda role, content: SimpleNamespace(role=role, content=content, tool_calls=None)
    for name in ("tau2.user", "tau2.data_model"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (simulator, message):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return asked


MODEL = {"user": "model", "user_model": "openai/any", "user_url": "http://host/v1"}


def test_a_model_plays_the_user_and_ends_the_conversation(talks):
    episode = opened(**MODEL)["asserts"]
    system, greeting, first = episode.reset()
    assert "<policy>\nBe fair.\n</policy>" in system.content
    assert (greeting.role, first.role) == ("assistant", "user")
    assert talks == [greeting.content] and first.content.startswith("I am heard 0.")
    assert not episode.step(Message("assistant", "", (ToolCall("pay", {"who": "bob"}, "1"),))).done
    again = episode.fork()
    for played in (episode, again):
        assert played.step(Message("assistant", "Which account?")).messages[0].content.startswith("I am heard 2.")
        end = played.step(Message("assistant", "It is paid."))
        assert (end.done, end.success, end.reward) == (True, True, 1.0)
    assert len(talks) == 3, "a history is answered once"
    silent = opened(**MODEL)["asserts"]
    silent.reset()
    assert silent.step(Message("assistant", "paid")).reward == 0.0, "nothing was done"


def test_the_users_model_is_named_where_it_plays_and_nowhere_else(bank):
    for wrong in ({"user": "model"}, {"user_model": "x"}):
        with pytest.raises(InputError) as refused:
            opened(**wrong)
        assert refused.value.field == "environment.user_model"


def test_official_splits_are_the_domains_own(bank):
    source = sys.modules["tau2.domains.bank.environment"]
    source.get_tasks_split = lambda: {"train": ["pays", "looks"], "test": ["starts"], "base": []}
    for split, ids in (("train", {"bank/pays", "bank/looks"}), ("test", {"bank/starts"})):
        found = tau2.tasks(split, 9, seed=0, argument="bank", splits="official")
        assert {each.task_id for each in found} == ids
    with pytest.raises(InputError) as refused:
        tau2.tasks("dev", 9, seed=0, argument="bank", splits="official")
    assert refused.value.field == "environment.splits"
