"""Everything that speaks another project's language, one module a partner: its traces, its rollout logs, its
environments, and the export to it.

The parts come through entry points, like those of any other package: the library `turntree` imports none of them.
`judging.py` and `rows.py` are what the exports share.
"""
