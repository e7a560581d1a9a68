"""Two versions side by side on a real Slurm: the earlier one of `side_by_side.EARLIER`, and this one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from muster.slurm.testcluster.cluster import CONTROLLER, COORDINATOR, LOGIN, Cluster
from muster.slurm.testcluster.side_by_side import (
    BROKEN,
    OLD,
    OWN,
    USERS,
    bring_versions,
    earlier_script,
    package_folder,
    replace,
    replace_in_users_environment,
    upgrade_all,
    upgrade_coordinator,
    upgrade_daemons,
)
from muster.slurm.testcluster.spec import EARLY_POLICY, STANDBY, ClusterSpec
from muster.slurm.testcluster.training import SLOW_STEPS, Training, TrainingSpec
from muster.slurm.testcluster.waiting import wait_until

pytestmark = pytest.mark.cluster
BUCKETS = (*SLOW_STEPS, "--bucket-cap-mb", "0.05")


@pytest.fixture(scope="module")
def versions(suite: str) -> Iterator[Cluster]:
    """A small cluster of its own, with the earlier version at hand: no other test meets that."""
    with Cluster.up(ClusterSpec(nodes=3, requeue_delay=1, suite=suite, policy=EARLY_POLICY)) as cluster:
        bring_versions(cluster)
        yield cluster


def wait_all_attached(cluster: Cluster) -> None:
    """Every node's daemon has attached to the coordinator, whichever versions they are."""

    def attached() -> bool:
        shown = cluster.exec(LOGIN, "muster", "nodes", "--json", user="alice", check=False).stdout
        nodes = [json.loads(line) for line in shown.splitlines()]
        return sum(bool(node.get("musterd_attached")) for node in nodes) == len(cluster.nodes)

    wait_until(attached, 30, "all node daemons are attached")


def starts_anew_after_a_killed_rank(training: Training, rank: int = 1) -> None:
    """The ranks go on from memory: no more than the step under way is repeated."""
    before = training.generation
    training.wait_step(int(training.view.get("step", 0)) + 5)
    training.kill_rank(rank)
    recovery = training.wait_recovered(before + 1)
    assert training.repeated_steps(int(recovery["generation"])) <= 2


def starts_of_agents(training: Training) -> dict[str, str]:
    nodes = {str(rank["node"]) for rank in training.view["ranks"]}
    return {node: training.cluster.sh(node, "pgrep -of 'muster-agent run'") for node in nodes}


@contextmanager
def trains(cluster: Cluster, name: str, *settings: str) -> Iterator[Training]:
    """A job of two nodes that has finished some steps. The launcher that is there at the end cancels it."""
    spec = TrainingSpec(name, nodes=2, spares=0, arguments=BUCKETS, script=earlier_script(), settings=settings)
    with Training(cluster, spec) as training:
        training.submit()
        training.wait_step(5)
        yield training
        training.cancel()


def test_everything_is_upgraded_under_a_running_job(versions: Cluster) -> None:
    """An old launcher, old agents and old node daemons with a new coordinator; then new daemons, and the files of
    running agents are new."""
    upgrade_all(versions, OLD)
    wait_all_attached(versions)
    with trains(versions, "upgraded") as training:
        agents, generation = starts_of_agents(training), training.generation
        upgrade_coordinator(versions, OWN)
        wait_all_attached(versions)
        assert training.generation == generation
        starts_anew_after_a_killed_rank(training)
        upgrade_daemons(versions, OWN, *versions.nodes)
        wait_all_attached(versions)
        starts_anew_after_a_killed_rank(training)
        assert starts_of_agents(training) == agents


@pytest.mark.long
@pytest.mark.parametrize("settings", [(), (f'env.PYTHONPATH = "{package_folder(USERS)}"', 'preload = ["torch"]')])
def test_agents_and_ranks_go_on_from_what_they_have_loaded(versions: Cluster, settings: tuple[str, ...]) -> None:
    """A rank is killed while no module of Muster can be imported, of the agents' files or of the user's."""
    upgrade_all(versions, OWN)
    replace_in_users_environment(versions, OWN)
    wait_all_attached(versions)
    with trains(versions, "replaced", *settings) as training:
        replace(versions, BROKEN, *versions.nodes)
        replace_in_users_environment(versions, BROKEN)
        starts_anew_after_a_killed_rank(training)
        replace(versions, OWN, *versions.nodes)


@pytest.mark.long
def test_new_agents_and_daemons_work_with_an_old_coordinator(versions: Cluster) -> None:
    """A new launcher submits the job, and an old one cancels it."""
    upgrade_all(versions, OLD)
    upgrade_daemons(versions, OWN, *versions.nodes)
    replace(versions, OWN, LOGIN)
    wait_all_attached(versions)
    with trains(versions, "under-old") as training:
        starts_anew_after_a_killed_rank(training)
        replace(versions, OLD, LOGIN)


@pytest.mark.long
def test_the_way_back_is_refused_in_words_and_training_goes_on(versions: Cluster) -> None:
    """The older coordinator does not know the format of the newer one's journal, and leaves it as it is."""
    upgrade_all(versions, OWN)
    wait_all_attached(versions)
    with trains(versions, "back") as training:
        generation = training.generation
        upgrade_coordinator(versions, OLD)
        refused = "journal.db was written by a newer muster"
        wait_until(
            lambda: refused in versions.logs(CONTROLLER, COORDINATOR), 30, "the older version refuses the journal"
        )
        upgrade_coordinator(versions, OWN)
        wait_all_attached(versions)
        assert training.generation == generation
        starts_anew_after_a_killed_rank(training)


@pytest.mark.long
def test_a_node_that_joins_later_starts_the_new_version_in_a_gang_of_the_old_one(versions: Cluster) -> None:
    """A state goes from an old agent to the new one of a pool job, and back to an old one on the repaired node."""
    upgrade_all(versions, OLD)
    upgrade_coordinator(versions, OWN)
    wait_all_attached(versions)
    with trains(versions, "mixed") as training:
        lost = training.node_of(1)
        (free,) = set(versions.nodes) - {training.node_of(0), lost}
        upgrade_daemons(versions, OWN, free)
        versions.crash(lost)
        joined = training.wait_recovered(2)
        assert (joined["nodes_out"], joined["nodes_in"]) == ([lost], [free])
        assert training.repeated_steps(int(joined["generation"])) <= 2
        starts_anew_after_a_killed_rank(training)
        before = training.generation
        versions.repair(lost)
        back = training.wait_recovered(before + 1)
        assert (back["action"], back["nodes_in"]) == ("pool node gives way", [lost])
        assert training.repeated_steps(int(back["generation"])) == 0
        starts_anew_after_a_killed_rank(training)
    versions.restore_all()


@pytest.mark.long
def test_a_standby_pair_is_upgraded_one_host_after_the_other(suite: str) -> None:
    """The standby first: it takes over from the old leader. The old one can't take back, and says so."""
    spec = ClusterSpec(nodes=2, requeue_delay=1, standby=True, suite=suite, policy=EARLY_POLICY)
    with Cluster.up(spec) as pair:
        bring_versions(pair)
        upgrade_all(pair, OLD)
        wait_all_attached(pair)
        with trains(pair, "pair") as training:
            generation = training.generation
            stood_by = pair.logs(STANDBY, COORDINATOR).count("standing by")
            replace(pair, OWN, STANDBY)
            pair.start_service(STANDBY, COORDINATOR)
            wait_until(
                lambda: pair.logs(STANDBY, COORDINATOR).count("standing by") > stood_by, 30, "the new version stands by"
            )
            pair.stop_service(CONTROLLER, COORDINATOR)
            wait_all_attached(pair)
            assert training.generation == generation
            starts_anew_after_a_killed_rank(training)
            # A host that was forgotten: it can't take over, and the new version comes back.
            pair.start_service(CONTROLLER, COORDINATOR)
            pair.stop_service(STANDBY, COORDINATOR)
            refused = "was written by a newer muster"
            wait_until(lambda: refused in pair.logs(CONTROLLER, COORDINATOR), 30, "the older version refuses")
            pair.start_service(STANDBY, COORDINATOR)
            wait_all_attached(pair)
            upgrade_coordinator(pair, OWN, CONTROLLER)
            pair.stop_service(STANDBY, COORDINATOR)
            wait_all_attached(pair)
            starts_anew_after_a_killed_rank(training)


@pytest.mark.long
def test_the_library_in_the_users_environment_is_of_the_earlier_version(versions: Cluster) -> None:
    upgrade_all(versions, OWN)
    with trains(versions, "library", f'env.PYTHONPATH = "{package_folder(OLD)}"') as training:
        starts_anew_after_a_killed_rank(training)
