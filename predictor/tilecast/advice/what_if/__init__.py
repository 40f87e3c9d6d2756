"""Ask the pipeline again about other pools, plans, batches and limits than the job's own.

`changes` lists the inputs that may change. `fits` finds the smallest change that gives a rejected pool an offer. `wins`
finds the smallest change that would make another pool or plan the recommended one. `alternatives` prices the baseline,
the job without its constraints, another batch, other buckets and fewer GPUs.
"""
