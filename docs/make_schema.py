"""Writes the JSON Schema of job.toml: python docs/make_schema.py > launcher/spec/job.schema.json"""

from __future__ import annotations

import json

from muster.launcher.spec.table import Table

# The docstrings of fields are their descriptions in the schema. pydantic parses the source for them when a table is
# defined, which would cost each command 30 ms. So only this program asks for them, before it imports the tables.
Table.model_config["use_attribute_docstrings"] = True

from muster.launcher.spec.spec import Job  # noqa: E402


def schema() -> str:
    """The whole file."""
    made = Job.model_json_schema()
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "job.toml"}
    return json.dumps({**head, **{key: value for key, value in made.items() if key != "title"}}, indent=2) + "\n"


if __name__ == "__main__":
    print(schema(), end="")
