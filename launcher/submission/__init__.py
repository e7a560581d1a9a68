"""Renders the sbatch script from a checked job spec.

Pure: `--dry-run` prints exactly the script that is submitted. `commands` imports this folder.
"""
