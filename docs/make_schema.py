"""Writes docs/job.schema.json, the JSON Schema of job.toml: python docs/make_schema.py > docs/job.schema.json"""

from __future__ import annotations

import json

from muster.launcher.spec.spec import Job


def schema() -> str:
    """The whole file."""
    made = Job.model_json_schema()
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "job.toml"}
    return json.dumps({**head, **{key: value for key, value in made.items() if key != "title"}}, indent=2) + "\n"


if __name__ == "__main__":
    print(schema(), end="")
