"""Benchmarks: measure any op from its `spec.py`, keep typed rows, and say in plain words what they mean.

`sweep` runs sizes × providers and gives rows; `measure` times, `check` judges results against the reference
first, `record` keeps rows on disk, `reading`, `table`, `plot` and `roofline` show them. `study` ties them together.
"""
