"""The checkpoint library inside the user's training process: plan, snapshot, restore. `loop` holds the user's API.

Imports torch, `checkpoint.format` and the message types, and nothing else of Muster: no code of the daemons runs in a
user's process.

An agent's `muster` is importable in each rank that it forks, also where the rank's own environment has no Muster. The
packages that Muster needs are not: they belong to the agent's environment. So this package says where to install them.

May import: `checkpoint.durable`, `checkpoint.format`, `checkpoint.training.agreements`, `checkpoint.training.copies`,
`checkpoint.training.durable_loading`, `checkpoint.training.planning`, `checkpoint.training.rank_signals`,
`checkpoint.training.states`.
"""

import importlib
import sys

for _package in ("google.protobuf", "xxhash"):
    try:
        importlib.import_module(_package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"muster.checkpoint needs the Python package {_package}, which {sys.prefix} lacks. Install Muster there: "
            f"{sys.executable} -m pip install PATH, with the checkout or the wheel that the site's nodes have",
            name=error.name,
        ) from None
