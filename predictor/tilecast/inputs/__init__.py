"""Read what people bring: jobs (`job`), pools (`pools`), measured steps (`measurements`) and queues (`queue`).

`job` is the one to read first: whatever the input is, it becomes one TrainingJob document.
"""
