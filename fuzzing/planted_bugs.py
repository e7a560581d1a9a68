"""One bug for each target, which the target finds near the kept corpus. Each is a change of the parser's source."""

from __future__ import annotations

from muster.simulator.planted_bugs.planting import PlantedBug

PLANTED_BUGS: dict[str, PlantedBug] = {
    "kernel_lines": PlantedBug(
        "The escape of a control character may have one digit, and the message can't be read.",
        module="muster.daemon.node.kernel.kernel_record",
        code=r'_ESCAPE = re.compile(rb"\\x([0-9a-f]{2})")',
        bug=r'_ESCAPE = re.compile(rb"\\x([0-9a-f]{1,2})")',
    ),
    "job_spec": PlantedBug(
        "A text with a line end becomes a line of the batch script.",
        module="muster.launcher.spec.spec",
        code="    if not names.is_one_line(value):\n",
        bug='    if "\\0" in value:\n',
    ),
    "job_yaml": PlantedBug(
        "A line of aliases stands for values of any size.",
        module="muster.launcher.spec.yaml_text",
        code="        if self.check_event(yaml.AliasEvent):\n",
        bug="        if self.check_event(yaml.StreamStartEvent):\n",
    ),
    "site_policy": PlantedBug(
        "A number of more than 64 bits is taken for a setting.",
        module="muster.daemon.transport.toml_text",
        code="        if any(isinstance(value, int) and value not in _INTEGERS for value in values):\n",
        bug="        if any(isinstance(value, int) and value in () for value in values):\n",
    ),
    "slurm_json": PlantedBug(
        "An answer that ends too early is read behind its end.",
        module="muster.slurm.client.parsing.json_stream",
        code='    if at == len(text):\n        raise ValueError("the JSON text ends too early")\n',
        bug="",
    ),
    "slurm_text": PlantedBug(
        "A list of a few bytes expands to millions of nodes.",
        module="muster.slurm.client.parsing.hostlist",
        code="    if numbers.stop - numbers.start > MAX_NAMES:\n",
        bug="    if numbers.stop - numbers.start > 1 << 40:\n",
    ),
    "protocol_messages": PlantedBug(
        "A text of an agent goes into the journal at any length.",
        module="muster.daemon.coordinator.services.conversion",
        code="    return cut(text, job_limits.MAX_TEXT_CHARS)\n",
        bug="    return cut(text, job_limits.MAX_SPEC_CHARS)\n",
    ),
    "memory_requests": PlantedBug(
        "A packet that is not UTF-8 is called a bug of Muster.",
        module="muster.daemon.node.kept_memory.memory_service",
        code="    except (json_format.ParseError, UnicodeDecodeError) as error:\n",
        bug="    except json_format.ParseError as error:\n",
    ),
    "snapshot_headers": PlantedBug(
        "The index of a shard may end behind the shard.",
        module="muster.checkpoint.format.layout",
        code="footer.header_offset <= footer.header_offset + body <= size - FOOTER_BYTES\n",
        bug="footer.header_offset <= footer.header_offset + body <= 2 * size\n",
    ),
    "shard_transfers": PlantedBug(
        "Pieces of another length than they say are written into a replica.",
        module="muster.checkpoint.store.replication.shard_offers",
        code="    inline_data_is_whole = all(len(p.data) in (0, p.length) for p in offer.pieces)\n",
        bug="    inline_data_is_whole = True\n",
    ),
    "journal_rows": PlantedBug(
        "A transition that no table has ends the coordinator without a word about the journal.",
        module="muster.daemon.coordinator.journal.journal",
        code="    except (ValidationError, KeyError, IllegalTransition) as error:\n",
        bug="    except (ValidationError, KeyError) as error:\n",
    ),
    "host_files": PlantedBug(
        "A counter that jumps back and returns to where it was has grown.",
        module="muster.daemon.node.sysfs.counter_growth",
        code="        if not jumped_before:\n            self._pending = grown\n",
        bug="        self._pending = grown\n",
    ),
    "coordinator_server": PlantedBug(
        "The rights of a caller who asks for the job of somebody else are not checked.",
        module="muster.daemon.transport.authority_table",
        code="    return Answer.ALLOWED in answers(method, kinds)\n",
        bug="    return not {Answer.ALLOWED, Answer.DENIED}.isdisjoint(answers(method, kinds))\n",
    ),
    "node_servers": PlantedBug(
        "A shard without bytes is taken for a whole one.",
        module="muster.checkpoint.store.memory.pieces",
        code="    return edge == size > 0\n",
        bug="    return edge == size\n",
    ),
    "memory_server": PlantedBug(
        "The descriptors that come with an empty packet stay open.",
        module="muster.daemon.host.packets",
        code="        for fd in fds:\n            os.close(fd)\n",
        bug="",
    ),
}
"""By target."""
