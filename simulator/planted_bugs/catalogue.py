"""All planted bugs by name. Each module of bugs names the component in which its bugs are planted."""

from muster.simulator.planted_bugs.agents_bugs import AGENTS_BUGS
from muster.simulator.planted_bugs.coordinator_bugs import COORDINATOR_BUGS
from muster.simulator.planted_bugs.detection_bugs import DETECTION_BUGS
from muster.simulator.planted_bugs.planting import PlantedBug
from muster.simulator.planted_bugs.recovery_bugs import RECOVERY_BUGS
from muster.simulator.planted_bugs.state_bugs import STATE_BUGS

PLANTED_BUGS: dict[str, PlantedBug] = {
    **DETECTION_BUGS,
    **RECOVERY_BUGS,
    **STATE_BUGS,
    **COORDINATOR_BUGS,
    **AGENTS_BUGS,
}
