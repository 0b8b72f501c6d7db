"""Floor 2: verifiers of one assistant action at a state inside a demonstration (PivotRL, Eq. 2 and 6).

Light on purpose: import the module that you need (`strict`, `tool_call`, `user`, `audit`).
"""
