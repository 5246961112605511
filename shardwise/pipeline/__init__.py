"""Pipelines: stages on the ranks along an axis, microbatches, and schedules that are tables.

In the order of imports, which go down only:

    timeline  `Timeline`: which entry ran when, drawn
    schedule  `Schedule`: what each stage runs when, as a table; GPipe and 1F1B
    link      communication between neighbouring stages
    stage     modules on their ranks, microbatches, gradients that are reduced once
    run       runs one batch through the stages in the order of a schedule
    pipe      `pipeline`: modules as stages along an axis
"""

from .pipe import Pipeline, Recording, pipeline
from .schedule import Entry, Schedule, check, gpipe, one_f_one_b
from .timeline import Span, Timeline

__all__ = ["Entry", "Pipeline", "Recording", "Schedule", "Span", "Timeline", "check", "gpipe", "one_f_one_b", "pipeline"]
