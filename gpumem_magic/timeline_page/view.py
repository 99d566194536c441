"""The timeline that a user holds: shown in a notebook, or saved as a page."""

from __future__ import annotations

import base64
import os
import warnings
from collections.abc import Container, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.failures import swallowed
from gpumem_magic.report.model import ReportData
from gpumem_magic.snapshot.whole_file import replace_file
from gpumem_magic.timeline_page.page import document
from gpumem_magic.timeline_page.source import TimelineSource, source_of
from gpumem_magic.units import human
from gpumem_magic.views.display import HTML, PLAIN, PNG, asked_for, in_terminal
from gpumem_magic.views.elements import DARK_PAGES, LIGHT_PAGES
from gpumem_magic.views.explain import answer
from gpumem_magic.views.quiet import quiet

HEIGHT = 980
# A frame of its own does not see the theme of the page around it: this, on the frame, tells it, now and when it changes.
_TELL_THEME = """const tell = () => {
  const is = (pages) => document.querySelector(pages) !== null;
  const theme = is('%s') ? 'dark' : is('%s') ? 'light' : null;
  if (theme) this.contentWindow?.postMessage({ theme }, '*');
};
tell();
new MutationObserver((_, all) => (this.isConnected ? tell() : all.disconnect())).observe(document.body, { attributes: true });"""


class TimelineView:
    """Every allocation of one or more devices, stacked over time by category.

    In a notebook it is the interactive page, with a still picture beneath for where pages are not shown. It keeps the
    recording's numbers and strings, and nothing of the program.
    """

    def __init__(self, title: str, sources: Sequence[TimelineSource]) -> None:
        if not sources:
            raise ValueError("a timeline needs at least one device")
        self.title = title
        self.sources = tuple(sources)

    def to_html(self) -> str:
        """A whole page: one file, which needs no network."""
        return document(self.title, self.sources)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the page; `path` then holds all of it, or what it held before. Raises OSError."""
        replace_file(path, lambda file: file.write(self.to_html().encode()))

    @quiet()
    def to_png(self) -> tuple[bytes, int, int]:
        """The still picture, its width and its height in pixels."""
        from gpumem_magic.timeline_page.figure import png

        return png(self.title, self.sources)

    def __repr__(self) -> str:
        first = self.sources[0]
        highest = first.view.peak[0]
        others = "" if len(self.sources) == 1 else f", and {len(self.sources) - 1} more"
        return f"<Timeline of {first.name}: {first.view.end:,} events, peak {human(highest)} allocated{others}>"

    def _repr_mimebundle_(
        self, include: Container[str] | None = None, exclude: Container[str] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        wanted = asked_for(include, exclude)
        data: dict[str, Any] = {PLAIN: repr(self)} if PLAIN in wanted else {}
        metadata: dict[str, Any] = {}
        if in_terminal() or not wanted & {HTML, PNG}:
            return data, metadata
        still = self._still()
        if HTML in wanted:
            data[HTML] = self._element(still)
        if PNG in wanted and still:
            data[PNG] = base64.b64encode(still[0]).decode("ascii")
            metadata[PNG] = {"width": still[1], "height": still[2], "alt": repr(self)}
        return data, metadata

    def _still(self) -> tuple[bytes, int, int] | None:
        try:
            return self.to_png()
        except Exception as error:
            warnings.warn(f"gpumem_magic could not draw the timeline: {swallowed(error)}", stacklevel=2)
            return None

    def _element(self, still: tuple[bytes, int, int] | None) -> str:
        """The page in a frame of its own, over the picture: where frames are taken out (GitHub, a notebook that is not
        trusted), the picture is what is left. The height is the frame's own, so that it goes with it."""
        over = "grid-area:1/1;"
        picture = ""
        if still:
            image = base64.b64encode(still[0]).decode("ascii")
            picture = (
                f'<img alt="{escape(repr(self), quote=True)}" width="{still[1]}" style="{over}max-width:100%;height:auto" '
                f'src="data:image/png;base64,{image}">'
            )
        tell = _TELL_THEME % (", ".join(DARK_PAGES), ", ".join(LIGHT_PAGES))
        frame = (
            f'<iframe title="{escape(f"GPU memory timeline: {self.title}", quote=True)}" sandbox="allow-scripts" '
            f'style="{over}width:100%;height:100%;min-height:{HEIGHT}px;box-sizing:border-box;border:1px solid #D5D9DE;'
            f'border-radius:8px;background:#FFFFFF" onload="{escape(tell, quote=True)}" '
            f'srcdoc="{escape(self.to_html(), quote=True)}"></iframe>'
        )
        ground = "display:grid;background:#FFFFFF;border-radius:8px;overflow:hidden"
        return f'<div style="{ground}">{picture}{frame}</div>'


def timeline_of_files(files: Sequence[Sequence[DeviceView]], opens_at: int | None = None) -> TimelineView:
    """The devices of one or several files (one for each rank). opens_at: the position at which the first one opens."""
    return _of_files([[(view, "") for view in views] for views in files], opens_at)


def timeline_of_reports(reports: Sequence[ReportData], opens_at: int | None = None) -> TimelineView:
    """The same with what each report says first. Raises ValueError for a report that has no recording."""
    files = [[(one.source, answer(one)) for one in (each, *each.devices) if one.source is not None] for each in reports]
    if not all(files):
        raise ValueError(
            "this report has no recording, and so no allocations: a report of a measured cell or of a snapshot file "
            "(gpumem_magic.load) has one, a report read from JSON does not"
        )
    if _file(files[0][0][0]):
        return _of_files(files, opens_at)
    sources = [
        replace(source_of(view, f"{view.log.facts.name} (cuda:{view.device})"), answer=words)
        for views in files
        for view, words in views
    ]
    return TimelineView(f"GPU memory: {reports[0].device.name}", sources)


def _of_files(files: Sequence[Sequence[tuple[DeviceView, str]]], opens_at: int | None) -> TimelineView:
    """The timeline of each file's devices, each with its answer."""
    sources = []
    for views in files:
        for view, words in views:
            device = f"GPU {view.device}"
            of_several = f"{_file(view)}, {device}" if len(views) > 1 else _file(view)
            sources.append(replace(source_of(view, of_several if len(files) > 1 else device), answer=words))
    sources[0] = replace(sources[0], opens_at=opens_at)
    names = [_file(views[0][0]) for views in files]
    return TimelineView(names[0] if len(names) == 1 else f"{len(names)} recordings: {', '.join(names)}", sources)


def _file(view: DeviceView) -> str:
    """The name of the file that it is from."""
    return os.path.basename(view.recording.file.path) if view.recording.file is not None else ""
