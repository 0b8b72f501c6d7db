import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = REPOSITORY / "tests"
sys.path[:0] = [str(REPOSITORY / "studies"), str(TESTS), str(TESTS / "run"), str(TESTS / "decide")]
