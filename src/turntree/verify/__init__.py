"""Verifiers of one assistant action at a state inside a demonstration (PivotRL, Eq. 2 and 6), and of answers. The
functional one is `recommended`.

Light on purpose: import the module that you need (`recommended`, `paper`, `judge`, `rubric`, `tool_call`, `strict`,
`user`; `audit`; `answers`). `recommended` reads by `kinds`, `texts`, `shell`; `answers` by `quantities`,
`latex`, `symbolic`.
"""
