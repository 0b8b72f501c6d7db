"""Verifiers of one assistant action at a state inside a demonstration (PivotRL, Eq. 2 and 6). The functional one is
`recommended`, which reads by `kinds`, `texts` and `shell`.

Light on purpose: import the module that you need (`recommended`, `paper`, `judge`, `rubric`, `tool_call`, `strict`,
`user`; `audit`).
"""
