"""The Python API of `import tilecast`, and the functions that it shares with the command line.

`api` has the public functions and `results` their return values. `advising`, `sweeping`, `queueing` and `catalog` serve
both the API and the command line. Read `api` first.
"""
