"""How many nodes a job has, if job.toml gives the number of GPUs instead. Pure."""

from __future__ import annotations

from typing import Any


def fill_in_nodes(given: Any) -> Any:
    """The keys of job.toml with `nodes` filled in from `gpus` and `gpus_per_node`.

    Values of a wrong kind are left to the checks of each key.

    Raises:
        ValueError: the keys contradict each other.
    """
    if not isinstance(given, dict) or "gpus" not in given:
        return given
    gpus, each = given["gpus"], given.get("gpus_per_node")
    if "nodes" in given:
        raise ValueError("nodes and gpus both give the size of the job: keep one of them")
    if each is None:
        raise ValueError(f"gpus = {str(gpus)[:60]} needs gpus_per_node, for example gpus_per_node = 8")
    if type(gpus) is not int or type(each) is not int or gpus < 1 or each < 1:
        return {**given, "nodes": 1}  # one of the two is refused, and that is the only mistake
    if gpus % each:
        near = f"{gpus - gpus % each} or " if gpus > each else ""
        raise ValueError(
            f"gpus = {gpus} must be a multiple of gpus_per_node = {each}: choose {near}{gpus + each - gpus % each}"
        )
    return {**given, "nodes": gpus // each}


def require_nodes_or_gpus(schema: dict[str, Any]) -> None:
    """Makes the published schema accept what `fill_in_nodes` accepts."""
    schema["required"] = [key for key in schema["required"] if key != "nodes"]
    schema["oneOf"] = [{"required": ["nodes"]}, {"required": ["gpus", "gpus_per_node"]}]
