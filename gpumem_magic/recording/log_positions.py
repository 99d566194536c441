"""Translates positions reported during a run into positions in the device's log, where that could not keep every event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpumem_magic.devices.base import DeviceLog
from gpumem_magic.recording.model import Checkpoint, Moment, Sighting, Span


class PositionTranslator:
    """Translates the moments of a recording; those that many rows share are translated once."""

    def __init__(self, logs: Mapping[int, DeviceLog]) -> None:
        self._places = {index: log.places for index, log in logs.items() if log.places is not None}
        self._moments: dict[int, tuple[Moment, Moment]] = {}

    def checkpoint(self, point: Checkpoint) -> Checkpoint:
        if not self._places:
            return point
        begin = None if point.begin is None else self.moment(point.begin)
        return replace(point, moment=self.moment(point.moment), begin=begin)

    def span(self, span: Span) -> Span:
        return replace(span, start=self.moment(span.start), end=self.moment(span.end)) if self._places else span

    def sighting(self, look: Sighting) -> Sighting:
        places = self._places.get(look.device)
        return look if places is None else look._replace(position=places[look.position])

    def moment(self, moment: Moment) -> Moment:
        if not self._places:
            return moment
        known = self._moments.get(id(moment))
        if known is None:
            positions = {
                index: self._places[index][position] if index in self._places else position
                for index, position in moment.positions.items()
            }
            # The old moment is kept beside the new one, so that its id stays its own.
            known = self._moments[id(moment)] = moment, moment._replace(positions=positions)
        return known[1]
