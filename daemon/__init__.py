"""The long-running processes: node daemon, agent and coordinator."""
