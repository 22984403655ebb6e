"""Opt-in search for faster kernel configs, on the GPU that will run them.

It stands above `bench`, whose timers and checks it uses. What calls need of it, reading the files, is
`onepass/ops/tuned.py`, below the ops.
"""
