"""Which line of a batch script becomes the gang, in scripts as people write them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from muster.launcher.scripts.launch_choice import Choice, choose, forgets_nodes
from muster.launcher.scripts.shell_commands import scan
from muster.slurm.client.launch_settings import BY_LAUNCHER, BY_SRUN, KNOWN_WHEN_IT_RUNS, NAMED_BY_USER

SCRIPTS = Path(__file__).with_name("batch_scripts")


def chosen(text: str, nodes: int | None = 4, **more: object) -> Choice:
    """The choice in a script, whose first line is line 2 of the file."""
    return choose(f"#!/bin/bash\n{text}\n", nodes, **more)  # type: ignore[arg-type]


def why(found: Choice) -> str:
    """Why the line launches; empty: no line does."""
    return found.launch.why if found.launch else ""


@pytest.mark.parametrize(
    ("name", "line", "reason", "words"),
    [
        ("accelerate", 15, BY_LAUNCHER, "srun --wait=60 --kill-on-bad-exit=1 --jobid $SLURM_JOB_ID bash -c"),
        ("container", 13, BY_LAUNCHER, "srun -lu --cpus-per-task $SLURM_CPUS_PER_TASK --wait 60 bash -c"),
        ("fsdp", 21, BY_LAUNCHER, 'srun ${AUTO_RESUME} -l "${ARGS[@]}" torchrun'),
        ("native", 9, BY_SRUN, "srun --cpu-bind=none bash -c"),
        ("sweep", 20, BY_SRUN, "srun --label python -u train.py --seed $SLURM_ARRAY_TASK_ID"),
        ("titan", 12, BY_LAUNCHER, "srun torchrun --nnodes 4 --nproc_per_node 2"),
    ],
)
def test_scripts_as_people_run_them(name: str, line: int, reason: str, words: str) -> None:
    found = choose((SCRIPTS / f"{name}.sbatch").read_text(), 2)
    assert found.launch is not None
    assert (found.launch.line, found.launch.why) == (line, reason)
    assert " ".join(found.launch.words).startswith(words)


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("srun torchrun train.py", 2, BY_LAUNCHER),
        ("muster run --nproc-per-node=4 train.py", 2, BY_LAUNCHER),
        ("srun python stage.py\nsrun /opt/muster/bin/muster run train.py", 3, BY_LAUNCHER),
        ("srun python stage.py\nsrun torchrun train.py\nsrun python eval.py", 3, BY_LAUNCHER),
        ("srun python stage.py\nsrun python train.py", 3, BY_SRUN),
        ("if a; then\n  srun python x/train.py --new\nelse\n  srun python train.py\nfi", 3, BY_SRUN),
        ('LAUNCH=(srun -l torchrun)\nif ! "${LAUNCH[@]}" train.py; then exit 1; fi', 3, BY_LAUNCHER),
        ("srun python -m titan.train a\nsrun python -m titan.train b", 2, BY_SRUN),
        ("timeout -k 60 23.5h srun python train.py\ntimeout 5 srun -n1 python eval.py", 2, BY_SRUN),
        ("timeout -s INT 2h srun torchrun train.py\ntimeout -s KILL 5 ls srun.log", 2, BY_LAUNCHER),
        ("taskset -c 0-7 srun torchrun a.py", 2, BY_LAUNCHER),
        ("taskset 0xff nice -n 5 srun python train.py\ntimeout -s INT 9 python x.py srun torchrun", 2, BY_SRUN),
        ('timeout "$LIMIT" nice -n 5 srun torchrun train.py', 2, BY_LAUNCHER),
        ("run_srun torchrun x\ntimeout 9 python x.py\nsrun python pretrain.py\nsrun python eval.py", 4, BY_SRUN),
        ("srun --ntasks-per-node=1 python train.py --stage\nsrun python train.py", 3, BY_SRUN),
        ('run() { echo "$@"; "$@"; }\nrun srun -N4 torchrun train.py', 3, BY_LAUNCHER),
        ('function run {\n  "$@"\n}\nrun srun python train.py', 5, BY_SRUN),
        ('CMD=\'torchrun a.py\'\nCMD="$CMD --lr 1"\nsrun bash -c "$CMD"', 4, BY_LAUNCHER),
        ('if [ $IMAGE ]; then ARGS=(--container-image $IMAGE); fi\nsrun "${ARGS[@]}" torchrun a.py', 3, BY_LAUNCHER),
        ('[ $I ] && A=(--container-image $I)\nsrun "${A[@]}" torchrun a.py', 3, BY_LAUNCHER),
        ("srun python train.py --strategy deepspeed --image x --run docker run", 2, BY_SRUN),
        ("srun --nodelist=$SLURM_JOB_NODELIST -c 4 torchrun train.py", 2, BY_LAUNCHER),
        ('srun -w "$SLURM_JOB_NODELIST" torchrun train.py', 2, BY_LAUNCHER),
        ("srun -c 4 --cpu-bind none $CMD\nsrun -c 4 cp $FROM $TO", 2, KNOWN_WHEN_IT_RUNS),
        ("srun -N1 -n1 python stage.py\nsrun python train.py\nsrun -n 1 python eval.py", 3, BY_SRUN),
        ("srun python train.py\nsrun --ntasks=1 --nodes=1 python eval.py", 2, BY_SRUN),
        ("# srun torchrun old.py\nsrun torchrun train.py", 3, BY_LAUNCHER),
        ("cat <<END > x\nsrun torchrun old.py\nEND\nsrun torchrun train.py", 5, BY_LAUNCHER),
        ("cat <<-'E N'\n\tsrun torchrun old.py\n\tE N\nsrun torchrun train.py", 5, BY_LAUNCHER),
        ("echo 'srun torchrun\nold.py'\nsrun torchrun train.py", 4, BY_LAUNCHER),
        ("srun \\\n  --label \\\n  torchrun \\\n  train.py", 2, BY_LAUNCHER),
        ("train() {\n  srun torchrun train.py\n}\ntrain", 3, BY_LAUNCHER),
        ("if srun torchrun train.py; then echo ok; fi", 2, BY_LAUNCHER),
        ("[ -d x ] || exit 1; exec srun torchrun train.py", 2, BY_LAUNCHER),
        ("OMP_NUM_THREADS=8 time srun torchrun train.py 2>&1 | tee log", 2, BY_LAUNCHER),
        ("srun torchrun train.py &\nwait $!", 2, BY_LAUNCHER),
        ("CMD='torchrun train.py'\nsrun bash -c \"$CMD\"", 3, BY_LAUNCHER),
        ("CMD='torchrun'\nCMD+=' train.py'\nRUN=\"srun $CMD\"\n$RUN", 5, BY_LAUNCHER),
        ("RUN='srun torchrun train.py'\neval \"$RUN\"", 3, BY_LAUNCHER),
        ('LAUNCH=(accelerate launch --num_processes 8)\nsrun "${LAUNCH[@]}" train.py', 3, BY_LAUNCHER),
        ("srun python -m torch.distributed.run train.py", 2, BY_LAUNCHER),
        ("srun python3.11 -m torch.distributed.launch train.py", 2, BY_LAUNCHER),
        ("srun /opt/env/bin/torchrun train.py", 2, BY_LAUNCHER),
        ("srun numactl --membind=0 torchrun train.py", 2, BY_LAUNCHER),
        ("srun accelerate launch train.py", 2, BY_LAUNCHER),
        ("srun python -m accelerate.commands.launch train.py", 2, BY_LAUNCHER),
        ("for s in 1 2 3; do srun torchrun train.py --seed $s; done", 2, BY_LAUNCHER),
        ("x=$(srun torchrun --help)\nsrun hostname\nsrun torchrun train.py", 4, BY_LAUNCHER),
        ("(( x << 2 ))\nsrun torchrun train.py", 3, BY_LAUNCHER),
        ("case $1 in\n  a) srun torchrun a.py;;\nesac", 3, BY_LAUNCHER),
        ('srun python train.py\nsrun --export="ALL,A=a b" -n "1" python eval.py', 2, BY_SRUN),
        ("srun -N 2 python train.py\nsrun --mem 0 --chdir /a --ntasks 1 python eval.py", 2, BY_SRUN),
        ("srun --of-site -N1 python stage.py\nsrun python train.py\nsrun --of-site='a b' -n1 python c.py", 3, BY_SRUN),
        ("srun -c 4 python train.py -n 1 -w n0", 2, BY_SRUN),
        ("srun bash train.sh", 2, KNOWN_WHEN_IT_RUNS),
        ("srun ./train.sh", 2, KNOWN_WHEN_IT_RUNS),
        ('srun "$@"', 2, KNOWN_WHEN_IT_RUNS),
        ("srun hostname\nsrun $PROGRAM", 3, KNOWN_WHEN_IT_RUNS),
        ('function go { srun "$@"; }\ngo torchrun --nnodes=4 a.py', 2, KNOWN_WHEN_IT_RUNS),
    ],
)
def test_the_line_that_launches(text: str, line: int, reason: str) -> None:
    found = chosen(text)
    assert found.launch, found
    assert (found.launch.line, found.launch.why) == (line, reason)


def test_a_launcher_without_srun_in_another_branch_of_one_node_is_replaced_too() -> None:
    text = "if [ $N -gt 1 ]; then srun torchrun a.py; else torchrun a.py; fi"
    assert choose(f"#!/bin/bash\n{text}", 1).alone == "torchrun"
    assert choose(f"#!/bin/bash\n{text}", 2).alone == ""


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("mpirun -np 8 python train.py", 2, "mpirun"),
        ("srun hostname > hosts\ndeepspeed --hostfile hosts train.py", 3, "deepspeed"),
        ("for n in $NODES; do\n  srun -w $n torchrun train.py &\ndone\nwait", 3, "in the background of a loop"),
        ("for n in $NODES; do srun -N1 -n1 -w $n python train.py & done; wait", 2, "in the background of a loop"),
        ("srun --container-image=a.sqsh torchrun train.py", 2, "container"),
        ("srun apptainer exec a.sif torchrun train.py", 2, "apptainer exec starts a container"),
        ("srun singularity_wrapper exec torchrun train.py", 2, "container"),
        ("srun shifter python train.py", 2, "container"),
        ("srun -c $C --environment=pytorch bash -c 'torchrun train.py'", 2, "container"),
        ('declare -a ARGS=(--container-image $IMAGE)\nsrun -l "${ARGS[@]}" torchrun train.py', 3, "container"),
        ("RUN='singularity exec a.sif'\nsrun $RUN torchrun train.py", 3, "container"),
        ('srun -N3 -n3 --nodelist="$TRAIN_NODES" torchrun train.py', 2, "on a part of the nodes"),
        ("/usr/bin/srun torchrun train.py", 2, "called by its path"),
        ("torchrun --standalone train.py", 2, "without srun"),
        ("srun deepspeed train.py", 2, "deepspeed"),
        ("srun python server.py : -n4 python train.py", 2, "several programs"),
        ("srun hostname", 0, "no srun"),
        ("python train.py", 0, "no srun"),
        ("echo srun torchrun train.py", 0, "no srun"),
        ("", 0, "no srun"),
    ],
)
def test_what_can_not_be_supervised_is_said_with_its_line(text: str, line: int, problem: str) -> None:
    found = chosen(text)
    assert found.launch is None
    assert found.line == line
    assert problem in found.problem


def test_a_launcher_several_times_on_each_node_is_said() -> None:
    assert "4 times on each node" in chosen("srun -l torchrun a.py", each=4).problem
    for text in ("srun --ntasks-per-node=1 torchrun a.py", "A='-n 4'\nsrun $A torchrun a.py", "srun $A torchrun a.py"):
        assert chosen(text, each=4).launch, text
    assert chosen("torchrun a.py", nodes=1, each=4).launch
    assert chosen("srun python a.py", each=4).launch


@pytest.mark.parametrize(
    ("line", "forgets"),
    [
        ("srun torchrun --nproc-per-node=$N a.py --nnodes 2", True),
        ("srun python -m torch.distributed.run -m a.b", True),
        ("srun bash -c 'torchrun a.py'", True),
        ("srun torchrun --nnodes 4 a.py", False),
        ("srun torchrun --standalone a.py", False),
        ('srun torchrun "${ARGS[@]}" a.py', False),
        ("srun torchrun --nproc-per-node=2 $PROGRAM a.py", False),
        ("srun bash -c 'torchrun a.sh; cp b.py c'", False),
        ("srun accelerate launch a.py", False),
    ],
)
def test_torchrun_without_its_number_of_nodes_is_known(line: str, forgets: bool) -> None:
    launch = chosen(line).launch
    assert launch
    assert forgets_nodes(launch) is forgets


def test_on_one_node_an_srun_of_one_node_launches() -> None:
    text = "srun -N1 -n1 torchrun --standalone train.py"
    assert why(chosen(text, nodes=1)) == BY_LAUNCHER
    assert chosen(text).launch is None


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("torchrun --standalone train.py", "torchrun"),
        ("RUN='torchrun --standalone'\n$RUN train.py", "torchrun"),
        ("srun python stage.py\ntime torchrun train.py", "torchrun"),
        ('RUN=(torchrun --standalone)\n"${RUN[@]}" train.py', "torchrun"),
        ("accelerate launch train.py", "accelerate"),
        ("python3 -u -m torch.distributed.run train.py", "python3"),
        ("python -m accelerate.commands.launch train.py", "python"),
    ],
)
def test_on_one_node_a_launcher_needs_no_srun(text: str, program: str) -> None:
    found = chosen(text, nodes=1)
    assert (found.alone, why(found)) == (program, BY_LAUNCHER)
    assert chosen(text, nodes=2).alone == ""


@pytest.mark.parametrize("text", ["exec torchrun train.py", "/opt/bin/torchrun train.py", "nohup torchrun train.py"])
def test_a_launcher_that_no_function_can_replace_needs_srun(text: str) -> None:
    found = chosen(text, nodes=1)
    assert "without srun" in found.problem
    assert found.launch is None


def test_where_the_number_of_nodes_is_not_known_one_node_may_be_written() -> None:
    assert chosen("torchrun train.py", nodes=None).instead.endswith("#SBATCH --nodes=1 if it needs one node")
    assert chosen("torchrun train.py", nodes=2).instead == "write `srun` before it"


@pytest.mark.parametrize("line", ["A+=bbbbbbbb", "A=$A$A$A", "A=(${A[@]} ${A[*]:1} b)"])
def test_a_text_that_grows_is_cut(line: str) -> None:
    found = scan(f"A=x\n{line}\n" * 3000)
    assert all(len(text) <= 1 << 16 for text in found.values.values())


def test_a_wrapper_script_is_looked_into() -> None:
    files = {"train.sh": "#!/bin/bash\nexec torchrun train.py\n"}
    assert why(chosen("srun bash train.sh", wrapper=lambda word: files.get(word, ""))) == BY_LAUNCHER


def test_a_named_line_overrules() -> None:
    text = "srun torchrun a.py\nsrun \\\n  torchrun b.py\nrun_it"
    assert [chosen(text, named=line).launch.line for line in (2, 3, 4, 5)] == [2, 3, 3, 5]  # type: ignore[union-attr]
    assert why(chosen(text, named=4)) == NAMED_BY_USER
    assert "no command begins there" in chosen(text, named=9).problem


def test_another_training_of_python_that_stays_a_helper_is_known() -> None:
    trains = (
        "srun -N1 python stage.py\nsrun --ntasks-per-node=1 python cache.py\nsrun python train.py\nsrun python eval.py"
    )
    assert (chosen(trains).launch.line, chosen(trains).beside) == (4, 5)  # type: ignore[union-attr]
    assert chosen(trains.replace("train.py", "main.py")).launch.line == 5  # type: ignore[union-attr]
    assert chosen("if a; then srun python a.py; else srun python a.py b; fi").beside == 0
    assert chosen("srun torchrun a.py\nsrun torchrun b.py").beside == 0


def test_a_named_line_that_starts_ranks_past_srun_is_refused() -> None:
    assert "mpirun starts ranks by itself" in chosen("mpirun -np 8 python a.py", named=2).problem
    assert chosen("srun deepspeed --no_ssh a.py", named=2).launch


def test_a_named_launcher_without_srun_is_for_one_node() -> None:
    assert "starts on the first node alone" in chosen("torchrun a.py", nodes=2, named=2).problem
    assert chosen("torchrun a.py", nodes=1, named=2).alone == "torchrun"


@pytest.mark.parametrize("blank", ["\u00a0", "\u2028", "\u3000", "\x1f", "\x85"])
def test_blanks_of_unicode_are_letters_as_for_bash(blank: str) -> None:
    text = f"echo{blank}\ncat <<E{blank}\nsrun a\nE{blank}\nsrun torchrun{blank}x a.py"
    assert [command.words for command in scan(text).commands] == [
        [f"echo{blank}"],
        ["cat"],
        ["srun", f"torchrun{blank}x", "a.py"],
    ]


@pytest.mark.parametrize("opening", ["$(", "${", '"$(', "x=(", "$((("])
def test_brackets_without_end_are_one_word(opening: str) -> None:
    assert choose(opening * 5000 + "\nsrun torchrun a.py", 2).launch is None


def test_any_text_gets_an_answer() -> None:
    """Texts that are no bash, and scripts with holes: there is an answer, and the lines are those of the text."""
    chance = random.Random(4)
    scripts = [path.read_text() for path in SCRIPTS.iterdir()]
    letters = "ab \t\n\\'\"`$(){}<>&|;#=-srun\u00e9"
    for _ in range(600):
        text = "".join(chance.choices(letters, k=chance.randrange(60)))
        whole = chance.choice(scripts)
        cut = chance.randrange(len(whole))
        for one in (text, whole[:cut] + text + whole[cut + chance.randrange(40) :]):
            found = choose(one, chance.choice([None, 1, 4]))
            assert (found.launch is None) == bool(found.problem)
            assert all(1 <= command.line <= one.count("\n") + 1 for command in scan(one).commands)
