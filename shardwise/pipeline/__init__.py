"""Pipelines: stages on the ranks along an axis, microbatches, and schedules that are tables."""

from .pipe import Pipeline, Recording, pipeline
from .schedule import Entry, Schedule, check, gpipe, one_f_one_b
from .timeline import Span, Timeline

__all__ = ["Entry", "Pipeline", "Recording", "Schedule", "Span", "Timeline", "check", "gpipe", "one_f_one_b", "pipeline"]
