"""Which line of a script launches the training, and whether Muster can supervise it: found before the queue. Pure.

The rule, in this order:

1. `#MUSTER --launch-line=N` names the line.
2. The first srun that names a launcher in its words, in the texts of its variables, in its `bash -c` or in its wrapper
   script: torchrun, torch.distributed.run or .launch, accelerate launch, muster run. In a script of one node, also such
   a launcher without srun; `muster run` without srun in any.
3. The last srun that starts Python, itself or through a shell: each task is a rank. If others start as many tasks, the
   last one with `train` in the name of its program. If others start the same program, the first of these that runs.
4. The last srun that starts a shell or a script of which no more is known.

An srun that asks for one node or one task of several, or for nodes by their names, is a helper. Where the script runs,
`muster-agent srun` decides again, with the words as they are then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from muster.launcher.scripts.shell_commands import MOST_CHARS, Script, ShellCommand, scan
from muster.slurm.client.known_programs import (
    BEGIN,
    CONTAINER_OPTIONS,
    END,
    LAUNCHERS,
    MOST_PREFIX_WORDS,
    PREFIXES,
    PYTHON,
    SHELLS,
    before_program,
    container,
    python_program,
)
from muster.slurm.client.launch_settings import BY_LAUNCHER, BY_SRUN, KNOWN_WHEN_IT_RUNS, NAMED_BY_USER, LaunchLine
from muster.slurm.client.srun_options import SrunWords, UnknownOption, read_srun

_SHELL = re.compile(rf"{BEGIN}({'|'.join(sorted(SHELLS))}|eval){END}|(?<!\S)\S+\.sh{END}")
_OTHER_LAUNCHERS = re.compile(rf"{BEGIN}(deepspeed|mpirun|mpiexec|horovodrun|pdsh){END}")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)[^}]*\})")
_SRUN = re.compile(r"(?<![^\s\"'(/])srun(?![^\s\"')])")
_WORD = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*'|["'])+""")
_OWN_NODES = re.compile(r"\$\{?SLURM_")
_SIZE = ("nodes", "ntasks", "ntasks-per-node")
_OPTIONS_OF_TORCHRUN = re.compile(
    rf"{BEGIN}(?:torchrun|torch\.distributed\.(?:run|launch)){END}([^;&|]*?)\s(?:-m|[^\s$]*\.py){END}"
)
"""What stands before its program, which is no variable."""
_MAY_SAY_NODES = re.compile(r"nnodes|standalone|(?:^|\s)[\"'\\]*\$")
_TIME = re.compile(r"(?:[\d.]+[smhd]?|\"?\$.*)?")
"""What may stand between a function of the script and its program."""
_ANYTHING = re.compile(".*")
"""Likewise of a prefix: `timeout -s INT 2h`, `taskset -c 0-7`."""
_MOST_DEPTH = 4
"""Of variables that name variables."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Either `launch`, or why there is none: `problem` is about `line` (0: about none), `instead` is what to write."""

    launch: LaunchLine | None = None
    line: int = 0
    problem: str = ""
    instead: str = ""
    alone: str = ""
    """The launcher that the script of one node starts without srun: the shell has to call srun in its place."""
    beside: int = 0
    """The line of another srun that starts as many tasks of Python, and stays a helper; 0: there is none."""


NO_WRAPPER: Callable[[str], str] = lambda _: ""  # noqa: E731


def choose(
    text: str, nodes: int | None, named: int = 0, wrapper: Callable[[str], str] = NO_WRAPPER, each: int = 1
) -> Choice:
    """Chooses the line of a bash script.

    Args:
        text: the script.
        nodes: of the job; None: not known before it starts.
        named: the line that #MUSTER --launch-line names; 0: it names none.
        wrapper: the text of a file that a command names; empty: there is none.
        each: tasks on each node of an srun that does not say how many.
    """
    script = scan(text)
    if named:
        return _named(script, named, nodes)
    found = [(why, command) for command in script.commands if (why := _why(command, script, nodes, wrapper))]
    for why in (BY_LAUNCHER, BY_SRUN, KNOWN_WHEN_IT_RUNS):
        if alike := [command for given, command in found if given == why]:
            chosen, beside = alike[0 if why == BY_LAUNCHER else -1], 0
            if why == BY_SRUN:
                chosen, beside = _of_alike(alike)
            # In a script of one node: it may stand in another branch than the srun of several nodes.
            alone = next((program for _, command in found if (program := _alone(command, script))), "")
            choice = _of_command(chosen, why, script, each)
            return replace(choice, beside=beside, alone=choice.alone or alone)
    return next(_without(script, nodes), Choice(problem="no srun of the script starts a training", instead=_WRITE_SRUN))


def forgets_nodes(launch: LaunchLine) -> bool:
    """Whether the line starts torchrun without its number of nodes, as far as its own words show."""
    options = _OPTIONS_OF_TORCHRUN.search(" ".join(launch.words))
    return options is not None and not _MAY_SAY_NODES.search(options[1])


def _of_alike(lines: list[ShellCommand]) -> tuple[ShellCommand, int]:
    """Which of the lines that start Python launches, and the number of another one that starts as many tasks; 0: there
    is none."""
    last = next((one for one in reversed(lines) if _size(one) == _size(lines[-1]) and _is_training(one)), lines[-1])
    program, size = python_program(last.text), _size(last)
    as_many = [one for one in lines if _size(one) == size]
    alike = [one for one in as_many if program and python_program(one.text) == program]
    return next(iter(alike), last), next((one.line for one in as_many if one not in (*alike, last)), 0)


_ONE_SRUN = "write one srun for all nodes: `srun torchrun --nnodes=$SLURM_NNODES ...`"
_LOOP = "several sruns in the background of a loop are no gang"
_ONE_TASK = "write `srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 ...`"
_WRITE_SRUN = "write `srun torchrun ...`, or name the line with #MUSTER --launch-line=N"
_RANKS_OF_SRUN = "write `srun torchrun ...`, or `srun python ...` with a task for each rank"
_BY_ITSELF = "starts ranks by itself, where Muster does not see them"
_NEEDS_SRUN = "a launcher without srun starts on the first node alone"


def _named(script: Script, line: int, nodes: int | None) -> Choice:
    for command in script.commands:
        if command.line <= line <= command.last_line and (_is_srun(command, script) or command.line == line):
            alone = _alone(command, script)
            if alone and (nodes or 1) > 1:
                return _refuse(command, f"--launch-line={line}: {_NEEDS_SRUN}", "write `srun` before it")
            found = _OTHER_LAUNCHERS.search(before_program(_resolved(command.text, script.values)))
            if found and not _is_srun(command, script):
                return _refuse(command, f"--launch-line={line}: {found[1]} {_BY_ITSELF}", _RANKS_OF_SRUN)
            return Choice(_line(command, NAMED_BY_USER), alone=alone)
    return Choice(
        line=line, problem=f"--launch-line={line}: no command begins there", instead="name the line of an srun"
    )


def _of_command(command: ShellCommand, why: str, script: Script, each: int) -> Choice:
    """The choice, unless what would become of it is no gang."""
    whole = _resolved(command.text, script.values)
    if starts := _container(command, script):
        return _refuse(command, f"{starts} starts a container, which is not supervised yet", "")
    if command.in_loop and command.in_background:
        return _refuse(command, _LOOP, _ONE_SRUN)
    if ":" in command.words:
        return _refuse(command, "several programs of one srun (:) are no gang", _ONE_SRUN)
    if "/" in command.words[0] and not _starts_srun(command):
        return _refuse(
            command, f"{command.words[0]} is called by its path, where Muster does not see it", "write `srun`"
        )
    if why != BY_LAUNCHER and (found := _OTHER_LAUNCHERS.search(before_program(whole))):
        return _refuse(command, f"{found[1]} starts ranks that Muster does not see", _RANKS_OF_SRUN)
    if why == BY_LAUNCHER and each > 1 and _takes_size_of_job(command, script):
        return _refuse(command, f"srun starts a launcher {each} times on each node", _ONE_TASK)
    return Choice(_line(command, why), alone=_alone(command, script))


def _takes_size_of_job(command: ShellCommand, script: Script) -> bool:
    """Whether the command is an srun without options of size, as far as is known before the script runs."""
    srun = srun_words(_resolved(command.text, script.values))
    return _is_srun(command, script) and not srun.has(*_SIZE) and "$" not in "".join(srun.command[:1])


def _line(command: ShellCommand, why: str) -> LaunchLine:
    return LaunchLine(command.line, tuple(command.words), why, command.last_line)


def _refuse(command: ShellCommand, problem: str, instead: str) -> Choice:
    return Choice(line=command.line, problem=problem, instead=instead)


def _container(command: ShellCommand, script: Script) -> str:
    """What starts a container; empty: nothing does, as far as is known before the script runs."""
    whole = _resolved(command.text, script.sure)
    option = next((option.name for option in srun_words(whole).options if option.name in CONTAINER_OPTIONS), "")
    return container(whole) or (option and f"--{option}")


def _why(command: ShellCommand, script: Script, nodes: int | None, wrapper: Callable[[str], str]) -> str:
    """Why the command may be the launch; empty: it is no srun, or a helper."""
    if not _is_srun(command, script):
        is_launch = _starts_srun(command) or (nodes == 1 and _alone(command, script))
        return BY_LAUNCHER if is_launch else ""
    whole = _resolved(command.text, script.values)
    srun = srun_words(whole)
    named = srun.value("nodelist")
    by_name = named is not None and not _OWN_NODES.match(named) and not (command.in_loop and command.in_background)
    if nodes != 1 and (by_name or "1" in (srun.value("nodes"), srun.value("ntasks"))):
        return ""
    beyond = "\n".join(filter(None, map(wrapper, whole.replace('"', " ").replace("'", " ").split()[1:])))
    for why, pattern in ((BY_LAUNCHER, LAUNCHERS), (BY_SRUN, PYTHON)):
        if pattern.search(whole) or pattern.search(beyond):
            return why
    return KNOWN_WHEN_IT_RUNS if _SHELL.search(whole) or "$" in "".join(srun.command[:1]) else ""


def _starts_ranks(whole: str) -> bool:
    return bool(LAUNCHERS.search(whole) or PYTHON.search(whole))


def _is_training(command: ShellCommand) -> bool:
    return "train" in python_program(command.text)


def _size(command: ShellCommand) -> list[str | None]:
    return [srun_words(command.text).value(name) for name in _SIZE]


def _alone(command: ShellCommand, script: Script) -> str:
    """The program that starts a launcher without srun, where a function of the shell can take its place."""
    words = _resolved(command.text.removeprefix("time "), script.values).strip("\"'(").split()
    program = words[0] if words else ""
    starts = program in ("torchrun", "accelerate-launch") or (program == "accelerate" and words[1:2] == ["launch"])
    is_module = PYTHON.fullmatch(program) and re.search(r"\s-m\s+(torch\.distributed|accelerate\.)", " ".join(words))
    return program if starts or is_module else ""


def _starts_srun(command: ShellCommand) -> bool:
    """`muster run` calls srun by itself."""
    return [word.rpartition("/")[2] for word in command.words[:2]] == ["muster", "run"]


def _is_srun(command: ShellCommand, script: Script) -> bool:
    return _first_program(command.words, script).rpartition("/")[2] == "srun"


def _first_program(words: list[str], script: Script) -> str:
    """The program that a command starts, behind `exec`, `time` and their kin, functions of the script
    (`run srun ...`), and in a variable's text."""
    passes, passed = None, 0
    for word in words:
        text = word
        if word.startswith(("$", '"$')):
            text = next(iter(_resolved(word, script.values).strip("\"'(").split()), "")
        if text.rpartition("/")[2] in PREFIXES:
            passes = _ANYTHING
        elif text in script.functions:
            passes = passes or _TIME
        elif text.startswith("-") or "=" in text:
            continue
        elif passes and passes.fullmatch(text) and passed < MOST_PREFIX_WORDS and not _starts_gang(text):
            passed += 1
        else:
            return text
    return ""


def _starts_gang(program: str) -> bool:
    return program.rpartition("/")[2] == "srun" or _starts_ranks(program)


def srun_words(whole: str) -> SrunWords:
    """The words of a call of srun. An option of a plug-in is taken for one that has no value in the next word."""
    found, of_plugins = _SRUN.search(whole), dict[str, bool]()
    words = [re.sub("[\"']", "", word) for word in _WORD.findall(whole[found.end() :] if found else whole)]
    while True:
        try:
            return read_srun(words, of_plugins)
        except UnknownOption as unknown:
            name = str(unknown).removeprefix("--").partition("=")[0]
            if not str(unknown).startswith("--") or not name or name in of_plugins:
                return SrunWords((), tuple(words))
            of_plugins[name] = False


def _resolved(text: str, values: Mapping[str, str]) -> str:
    """The text with the texts of variables."""
    for _ in range(_MOST_DEPTH):
        with_values = _VARIABLE.sub(lambda found: values.get(found[1] or found[2], found[0]), text)
        if with_values == text or len(with_values) > MOST_CHARS:
            break
        text = with_values
    return text


def _without(script: Script, nodes: int | None) -> Iterator[Choice]:
    """Why no srun of the script launches: the first command that starts ranks in another way."""
    for command in script.commands:
        whole = _resolved(command.text, script.values)
        if found := _OTHER_LAUNCHERS.search(whole):
            yield _refuse(command, f"{found[1]} {_BY_ITSELF}", _RANKS_OF_SRUN)
        elif starts := _container(command, script):
            yield _refuse(command, f"{starts} starts a container, which is not supervised yet", "")
        elif _is_srun(command, script) and command.in_loop and command.in_background and _starts_ranks(whole):
            yield _refuse(command, _LOOP, _ONE_SRUN)
        elif LAUNCHERS.search(whole) and _is_srun(command, script):
            yield _refuse(command, "a launcher on a part of the nodes is not supervised", _ONE_SRUN)
        elif LAUNCHERS.search(whole) and command.words[0] not in ("echo", "printf", "export", "declare", "local"):
            one = "" if nodes else ", or #SBATCH --nodes=1 if it needs one node"
            yield _refuse(command, _NEEDS_SRUN, f"write `srun` before it{one}")
