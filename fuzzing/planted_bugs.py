"""One bug for each target, which the target finds near the kept corpus. Each is a change of one function."""

from __future__ import annotations

from muster.simulator.planted_bugs.planting import PlantedBug

PLANTED_BUGS: dict[str, PlantedBug] = {
    "kernel_lines": PlantedBug(
        "The escape of a control character may have one digit, and the message can't be read.",
        function="parse_record",
        code="_ESCAPE",
        bug=r're.compile(rb"\\x([0-9a-f]{1,2})")',
    ),
    "job_spec": PlantedBug(
        "A text with a line end becomes a line of the batch script.",
        function="spec._one_line",
        code="not is_one_line(value)",
        bug=r'"\0" in value',
    ),
    "job_yaml": PlantedBug(
        "A line of aliases stands for values of any size.",
        function="compose_node",
        code="check_event(AliasEvent)",
        bug="False",
    ),
    "batch_script": PlantedBug(
        "Spares take nodes of the script.",
        function="size.grown",
        code="size.fewest + spares",
        bug="size.fewest",
    ),
    "site_policy": PlantedBug(
        "A number of more than 64 bits is taken for a setting.",
        function="toml_text.check",
        code="value not in _INTEGERS",
        bug="False",
    ),
    "slurm_json": PlantedBug(
        "An answer that ends too early is read behind its end.",
        function="json_stream._skip",
        code="at == len(text)",
        bug="False",
    ),
    "slurm_text": PlantedBug(
        "A list of a few bytes expands to millions of nodes.",
        function="hostlist._numbers",
        code="A > MAX_NAMES",
        bug="A > 1 << 40",
    ),
    "protocol_messages": PlantedBug(
        "A text of an agent goes into the journal at any length.",
        function="_free_text",
        code="MAX_TEXT_CHARS",
        bug="job_limits.MAX_SPEC_CHARS",
    ),
    "memory_requests": PlantedBug(
        "A packet that is not UTF-8 is called a bug of Muster.",
        function="parse_request",
        code="(A, UnicodeDecodeError)",
        bug="A",
    ),
    "snapshot_headers": PlantedBug(
        "The index of a shard may end behind the shard.",
        function="read_footer",
        code="size - FOOTER_BYTES",
        bug="2 * size",
    ),
    "shard_transfers": PlantedBug(
        "Pieces of another length than they say are written into a replica.",
        function="pieces_of_offer",
        code="all(A in (0, B) for C in D)",
        bug="True",
    ),
    "journal_rows": PlantedBug(
        "A transition that no table has ends the coordinator without a word about the journal.",
        function="replay_record",
        code="(A, B, IllegalTransition)",
        bug="(A, B)",
    ),
    "host_files": PlantedBug(
        "A counter that jumps back and returns to where it was has grown.",
        function="CounterGrowth.next",
        code="not jumped_before",
        bug="True",
    ),
    "coordinator_server": PlantedBug(
        "The rights of a caller who asks for the job of somebody else are not checked.",
        function="is_allowed",
        code="ALLOWED in A",
        bug="not {Answer.ALLOWED, Answer.DENIED}.isdisjoint(A)",
    ),
    "node_servers": PlantedBug(
        "A shard without bytes is taken for a whole one.",
        function="pieces_cover",
        code="edge == size > 0",
        bug="edge == size",
    ),
    "memory_server": PlantedBug(
        "The descriptors that come with an empty packet stay open.",
        function="receive_bytes",
        code="close(fd)",
        bug="None",
    ),
}
"""By target."""
