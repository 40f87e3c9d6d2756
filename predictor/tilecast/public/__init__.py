"""The Python API, and where it and the command line ask.

`api` has the functions that `import tilecast` offers, `results` their values; `asking`, `sweeping`, `queueing` and
`catalog` answer questions for both doors. Read `api` first.
"""
