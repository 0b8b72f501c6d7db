"""What pages and code credit a paper with is in the paper: every "the paper's" has an entry here with its place, and
words of the paper that carry it; where we say that a paper is silent, it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from paper_rows import REPOSITORY, plain, text

PIVOTRL, GATE, ARPO = "pivotrl.md", "selective-rollout.md", "arpo-summary.md"
CREDIT = re.compile(
    r"(?i)\bpapers?'s?\s|\bpapers?'s\b|\bin the paper\b|\(paper[ ,)]"
    r"|\bthe paper (?:gives|keeps|uses|has|trains|does|counts|cuts)\b"
)
D_ADV = "use  $\\mathcal{D}_{\\text{pivot}} = \\mathcal{D}_{\\text{adv}}$"
OURS = ("", "", "")  # words about a paper, without a figure or a rule of it
LONGEST = 60  # characters behind the credit in which its object stands

# what stands at or right behind the credit: (paper, place, its words; "not ": they must not be there)
CLAIMS: dict[str, tuple[str, str, str]] = {
    # PivotRL
    "paper's filter": (PIVOTRL, "Eq. 5", "\\hat{\\sigma}^2(s) > 0, \\hat{\\mu}(s) < \\lambda_{\\text{diff}}"),
    "paper's rule (mean below 0.6, no cap; it gives no lambda)": (PIVOTRL, "Eq. 5", "not \\lambda_{\\text{diff}} ="),
    "paper's rule alone": (PIVOTRL, "Eq. 5", "nonzero empirical reward variance and low reward mean"),
    "paper's mix of turns": (PIVOTRL, "section 3.1", "we sample  $K$  local rollouts"),
    "paper's form": (PIVOTRL, "section 3.1", D_ADV),
    "in the paper: `max_per_kind=1`": (
        PIVOTRL,
        "section 3.1",
        "use  $\\mathcal{D}_{\\text{pivot}} = \\mathcal{D}_{\\text{adv}}$",
    ),
    "in the paper). Too few": (
        PIVOTRL,
        "section 3.1",
        "use  $\\mathcal{D}_{\\text{pivot}} = \\mathcal{D}_{\\text{adv}}$",
    ),
    'in the paper).""" weight': (PIVOTRL, "section 3.1", "removes turns that are already uniformly solved"),
    "the paper gives no value": (PIVOTRL, "Eq. 5", "not \\lambda_{\\text{diff}} ="),
    "The paper gives no lambda": (PIVOTRL, "Eq. 5", "not \\lambda_{\\text{diff}} ="),
    "The paper gives no rule": (PIVOTRL, "A.2, BrowseComp", "not BrowseComp. The local verifier"),
    "The paper gives no threshold": (
        PIVOTRL,
        "A.2",
        "normalized string similarity, and equivalence-based LLM-as-judge",
    ),
    "paper's gap between SFT and RL": (PIVOTRL, "Table 2", "0.21"),
    "paper's Figure 1": (PIVOTRL, "Figure 1", "cumulative rollout turns and (b) cumulative rollout time"),
    "paper's (Tables 1 and 2)": (PIVOTRL, "Tables 1 and 2", "SFT and PivotRL use identical training data"),
    "paper's appendix A.2": (PIVOTRL, "A.2", "A.2. Domain-Specific Training Details"),
    "paper's rule for the domain (appendix A.2)": (PIVOTRL, "A.2", "Every non-error tool-call action"),
    "paper's K_train": (PIVOTRL, "Algorithm 1", "k = 1, \\dots, K_{\\text{train}}"),
    "paper's B.": (PIVOTRL, "Algorithm 1", "\\{s_b\\}_{b=1}^B"),
    "paper's G.": (PIVOTRL, "Algorithm 1", "rollout group size  $G$"),
    "paper's domain": (PIVOTRL, "A.2", "domain-specific verifier"),
    "PivotRL paper's. ## Own states": OURS,
    "(the paper gives no lambda). 30": (PIVOTRL, "Eq. 5", "not \\lambda_{\\text{diff}} ="),
    "in the paper (tau2)": (PIVOTRL, "Tables 1 and 4", "44.35\t58.44\t63.81"),
    "the paper has them above SFT": (PIVOTRL, "Table 6", "random pivots already improve over SFT (59.68 vs. 58.44)"),
    "paper's random pivots": (PIVOTRL, "A.1", "which uses all pivot candidates"),
    "paper's D_cand": (PIVOTRL, "A.3.1", "no filtering"),
    "(paper, Figure 3)": (PIVOTRL, "Figure 3", "reward standard deviation during RL training"),
    # Selective Rollout
    "paper's text: `NAME_printed`": (GATE, "appendix B", "divided by the longer length"),
    "paper's text says something else": (GATE, "appendix B", "divided by the longer length"),
    "paper's text defines it otherwise": (GATE, "appendix B", "already finished (either succeeded or failed) by step"),
    "paper's tiers": (GATE, "section 4", "three progressively more realistic integration points"),
    "paper's mean, whose factor": (GATE, "section 2.1", "averaged over all N trajectories in the gradient batch"),
    "paper's amplification": (GATE, "section 4.3", "rises by 1.16"),
    "(paper, E.12)": (GATE, "E.12", "per-iteration recall against this ground truth"),
    "(paper, E.9": (GATE, "E.9", "backup clause for the low-"),
    "paper's appendix B": (GATE, "appendix B", "Full mid-rollout signal definitions"),
    "The paper counts": (GATE, "Table 1", "total groups the gate fires on (= TP+FP)"),
    "paper's columns": (GATE, "Table 1", "the total step-token recovery from all cuts"),
    "paper's offline tables": (GATE, "Table 1", "total groups the gate fires on (= TP+FP)"),
    "paper's 100 groups": (GATE, "section 3.1", "N = 100"),
    "paper's point": (GATE, "section 3.5", "We pick d_L = 0.12"),
    "paper's setting": (GATE, "Table 2", "Gate $(K, d_L) = (10, 0.12)$"),
    "paper's 0.12": (GATE, "section 3.5", "We pick d_L = 0.12"),
    "paper's repository": (GATE, "abstract", "github.com/zhiyuanZhai20/selective-rollout"),
    "The paper cuts 21": (GATE, "section 3.5", "it cuts 21 groups (17 TPs, 4 FPs)"),
    "paper's 99.0%": (GATE, "section 3.5", "preservation rises to 99.0%"),
    "paper's Tables 7 and 8": (GATE, "E.3 and E.5", "Table 8: Per-task-type AUROC"),
    "(paper .235)": (GATE, "Table 7", "0.235"),
    "paper's Table 1": (GATE, "Table 1", "for varying threshold"),
    "paper's 5, 10, 15 and 20": (GATE, "section 3.3", "K \\in \\{5, 10, 15, 20\\}"),
    "paper's o_K": (GATE, "appendix B", "on the environment observation $o_{i,K}$"),
    "(the paper does not mention": (GATE, "appendix B", "Shannon entropy of the empirical distribution"),
    "paper, C.5": (GATE, "C.5", "The 0.80 precision floor"),
    "paper's arms share a nominal seed": (GATE, "section 4.1", "Both runs use the same random seed for sampling"),
    "paper's 1.16": (GATE, "section 4.3", "rises by 1.16"),
    "paper's +2.5 +- 3.4": (GATE, "Table 5", "+2.5 \\pm 3.4"),
    "paper's reading": (GATE, "section 1", "raises the effective per-step gradient signal-to-noise"),
    "as in the paper and saves as much": (GATE, "Table 5", "groups cut by gate (of 600)"),
    "paper's 7 B model": (GATE, "Table 5", "39.5 \\pm 3.0"),
    "as in the paper (28%": (GATE, "Figure 3", "14 all-succeed groups and 10 are from the 25 all-fail groups"),
    "paper's threshold is 0.12": (GATE, "section 3.5", "We pick d_L = 0.12"),
    "here | in the paper |": (GATE, "Tables 3 to 5", "Rollout-phase A/B"),
    # ARPO
    "paper's trajectory-level rollouts": (ARPO, "ablations", "Drops ~4% avg."),
    "The paper gives r_M": (ARPO, "design 3", "If the model produces a correct answer in the correct format"),
    "paper's r_M": (ARPO, "design 3", "it receives an additional reward \\(r_M\\)"),
    "in the paper; that Python leaves": (ARPO, "pilot", "token entropy spikes sharply"),
    "paper's models": (ARPO, "pilot", "greater uncertainty than Python numerical feedback"),
    "(paper, Branch(Z)": (ARPO, "design 1", "\\mathrm{Branch}(Z)"),
    "(the paper's rule) and `arpo_released`": (ARPO, "design 1", "is triggered to derive"),
    # others
    "papers' forms that differ": OURS,
    "papers' ablation": OURS,
    "papers' own tables": OURS,
    "paper's, 0.82 (22": OURS,
    "in the paper z-scores": OURS,  # Tree-GRPO
    "papers' statements about groups": OURS,
}
FILES = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", REPOSITORY / "benchmarks" / "README.md"]
FILES += sorted(set((REPOSITORY / "docs").rglob("*.md")) - {REPOSITORY / "docs" / "papers.md"})
FILES += [
    path for name in ("src", "recipes", "studies", "benchmarks") for path in sorted((REPOSITORY / name).rglob("*.py"))
]


def credits(path: Path) -> Iterator[str]:
    """What stands at each credit and behind it, on one line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    whole = re.sub(
        r"\s+", " ", " ".join(re.sub(r"^\s*#\s", "", line) if path.suffix == ".py" else line for line in lines)
    )
    for found in CREDIT.finditer(whole):
        yield whole[max(0, found.start() - 8) : found.end() + LONGEST]


def test_every_credit_to_a_paper_is_in_the_table_and_every_entry_is_used() -> None:
    found = [(path, said) for path in FILES if "papers" not in path.parts for said in credits(path)]
    unknown = [
        f"{path.relative_to(REPOSITORY)}: {said}" for path, said in found if not any(claim in said for claim in CLAIMS)
    ]
    assert not unknown, "say where the paper has it, or that it is not the paper's"
    assert not [claim for claim in CLAIMS if not any(claim in said for _, said in found)]


@pytest.mark.parametrize("claim", [claim for claim, entry in CLAIMS.items() if entry != OURS])
def test_what_is_credited_to_a_paper_is_in_it(claim: str) -> None:
    paper, place, words = CLAIMS[claim]
    absent = words.startswith("not ")
    assert place and (plain(words.removeprefix("not ")) in text(paper)) != absent
