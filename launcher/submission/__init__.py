"""What becomes of a checked job spec: the sbatch script, and the job that the coordinator knows.

The script is rendered purely: `--dry-run` prints exactly what is submitted. `commands` imports this folder.
"""
