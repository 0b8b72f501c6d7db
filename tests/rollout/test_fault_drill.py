"""The fault drill, rollout part: workers killed, hanging and answering garbage, engine calls failing, at random."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from fault_drill import FAULTS, Corridor, FailingEngine, FaultPlan, Faulty
from scripted_engine import ScriptedEngine
from tiny_models import tiny_tokenizer
from turntree.core.completion import Sampling
from turntree.core.messages import Message
from turntree.core.tree import StopReason
from turntree.env.processes import ProcessPool, ProcessPoolConfig
from turntree.render.template import ChatRenderer
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.scheduler import Scheduler, SchedulerConfig

TOKENIZER = tiny_tokenizer()
RENDERER = ChatRenderer(TOKENIZER)
WORDS = [RENDERER.completion(Message("assistant", word)) for word in ("left", "right", "on")]


def test_ten_iterations_of_every_kind_of_fault_come_to_an_end_and_account_for_every_group(tmp_path: Path) -> None:
    scripted = ScriptedEngine(lambda prompt, seed: WORDS[seed % 3], RENDERER.stop_ids, vocab_size=len(TOKENIZER))
    engine = FailingEngine(scripted, rate=0.1, seed=4)
    plan = FaultPlan(seed=4, killed=0.012, hanging=0.006, garbage=0.02, raising=0.02, tally=str(tmp_path))
    tasks = [Faulty(Corridor(f"task {number}", 1 + number % 3), plan) for number in range(4)]
    config = SchedulerConfig(
        episodes=EpisodeConfig(sampling=Sampling(max_tokens=16)), group_size=4, max_live_rollouts=10, max_retries=1
    )
    stops: Counter[StopReason | None] = Counter()
    with ProcessPool(ProcessPoolConfig(workers=3, step_seconds=1.0)) as pool:
        scheduler = Scheduler(engine, RENDERER, config, pool=pool)
        for iteration in range(10):
            groups = list(scheduler.run(tasks, seed=0, iteration=iteration))
            assert [group.task for group in groups] == tasks
            for group in groups:
                leaves = group.tree.leaves()
                assert len(leaves) == 4
                stops.update(map(group.tree.stop_reason, leaves))
                for leaf in leaves:
                    stop = group.tree.stop_reason(leaf)
                    assert (group.rewards.of(leaf) is None) == (stop is not StopReason.COMPLETED)
                    said = [node.message.content for node in group.tree.path(leaf) if node.sampled and node.message]
                    honest = float(said.count("left") % 2 == 0)
                    assert group.rewards.of(leaf) in (None, honest), "no fault became a reward"
            assert pool.in_flight == engine.in_flight == 0
        assert pool.lost >= plan.happened()["killed"] + plan.happened()["hanging"]
    assert stops.total() == 10 * 4 * 4
    assert set(stops) == {StopReason.COMPLETED, StopReason.ENVIRONMENT_ERROR, StopReason.ENGINE_ERROR}
    assert all(plan.happened()[fault] for fault in FAULTS)
    assert engine.failed
