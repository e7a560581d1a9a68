"""What commands print: tables for users, JSON for scripts, and the logs of ranks.

Pure, except that `rank_logs` and `last_words` read files. `commands` and `local` import this folder.

May import: `daemon.host`, `daemon.preflight`, `fabric.model`, `slurm.client.parsing`.
"""
