"""From a checked job spec to the sbatch script.

Pure: what `--dry-run` prints is what is submitted. `commands` imports it.
"""
