"""Many sessions at once, with agents of every kind: none is lost, none mixed up, everything is in the ledger.

`benchmarks/gateway.py` plays the same with a thousand, and kills the gateway in between.
"""

import asyncio
import importlib.util
import sys
from pathlib import Path

from turntree.gateway.store import SessionStore

SESSIONS = 98


def benchmark():
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "gateway.py"
    spec = importlib.util.spec_from_file_location("gateway_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.TURNS = 2
    return module


def test_ninety_eight_sessions_of_every_kind_of_agent_at_once(tmp_path):
    bench = benchmark()
    each = SESSIONS // len(bench.KINDS)
    with bench.gateway(tmp_path) as (served, sessions):
        report = asyncio.run(bench.drill(served.url, SESSIONS))
        ledger = sessions.ledger
        assert report.answered == SESSIONS * bench.TURNS
        assert not report.mixed_up and not bench.lost(report, SessionStore(tmp_path))
        assert len(sessions) == 0 and sessions.driver.engine.in_flight == 0
        assert (ledger["sessions"], ledger["rewarded"], ledger["unrewarded"]) == (SESSIONS, SESSIONS - each, each)
        assert report.refused == {400: each * bench.TURNS, 401: 2 * each * bench.TURNS}
        asked = ledger["calls_kept"] + ledger["calls_disconnected"] + ledger["hung_up"]
        assert ledger["calls_kept"] >= report.answered and asked >= report.answered + 1
        assert "calls_failed" not in ledger
        folder = [path.name for path in (tmp_path / "open").iterdir()]
        assert not folder and len(list((tmp_path / "closed").iterdir())) == SESSIONS
