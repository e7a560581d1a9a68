"""What each kind of group of a job sends in a step: of its model if job.toml has one, else of a usual one. Pure."""

from __future__ import annotations

from muster.fabric.estimate.placement_weights import placement_weights
from muster.fabric.estimate.traffic import step_traffic
from muster.fabric.placement.weights import Weights, usual_weights
from muster.launcher.errors import WrongInput
from muster.launcher.plan.defaults import Defaults
from muster.launcher.plan.model_of_job import model_of, schedule_of
from muster.launcher.spec.spec import Job


def weights_of(job: Job) -> Weights:
    """The weights that placement takes. A model that can't be estimated counts as one that is not described."""
    defaults = Defaults()
    try:
        model = model_of(job, defaults)
        return placement_weights(step_traffic(model, job.axes, schedule_of(job, model, defaults)))
    except WrongInput:
        return usual_weights(job.axes)
