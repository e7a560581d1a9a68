"""muster-coordinator: verdicts, recovery, the journal, the public API."""
