"""job.toml: the model, its checks, and its errors in words.

Pure. `commands` and `submission` import it.
"""
