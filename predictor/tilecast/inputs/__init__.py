"""Read inputs of users: jobs (`job`), pools (`pools`), measured steps (`measurements`) and queues (`queue`).

Read `job` first: it converts every kind of input to one TrainingJob document.
"""
