"""What a command prints: tables for a person, JSON for a script, and the logs of ranks.

Pure, except that `rank_logs` reads files. `commands` and `local` import it.
"""
