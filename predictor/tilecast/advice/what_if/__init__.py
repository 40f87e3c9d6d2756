"""Run the advice again with other pools, plans, batches and limits.

`changes` lists the inputs that may change. `fits` finds the smallest change that gives a rejected pool an offer. `wins`
finds the smallest change that would make another pool or plan the recommended one. `alternatives` prices the baseline,
the job without its constraints, another batch, other buckets and fewer GPUs.
"""
