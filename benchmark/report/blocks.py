"""What a report consists of, as data: contents makes blocks, figures and page show them."""

from dataclasses import dataclass, field

import pandas as pd


@dataclass(frozen=True)
class Heading:
    """A section's heading."""

    text: str


@dataclass(frozen=True)
class Paragraph:
    """Text."""

    text: str


@dataclass(frozen=True)
class Warning:
    """Text that must not be missed: it is also printed on the terminal."""

    text: str


@dataclass(frozen=True)
class Table:
    """A table of texts; a line break in a cell stays one.

    kind says how wide its columns are. "numbers": all but the first are short; "numbers noted": all
    but the first and the last; "runs": the table of every run; "words": a few columns of text.
    """

    header: tuple
    rows: list
    kind: str


@dataclass(frozen=True)
class Curves:
    """Returns against steps or against wall time, of one environment.

    data has x ("steps", or "wall_time" in seconds), variant, series (a run's name, a published
    score's label, "iqm" or "mean"), kind ("finished" run, "unfinished" run, "center" of the
    finished ones, "published"), value, and low and high, the bounds of a center's interval.
    """

    data: pd.DataFrame
    x: str


@dataclass(frozen=True)
class Overview:
    """A small panel for each environment: data is that of Curves against steps, and env_id."""

    data: pd.DataFrame


@dataclass(frozen=True)
class Intervals:
    """A value and its interval in each row: data has name, variant, value, low, high.

    bars: the value is a bar from 0, not a point; reference is where a vertical line is drawn,
    limits are those of the horizontal axis.
    """

    data: pd.DataFrame
    label: str
    bars: bool = False
    reference: float | None = None
    limits: tuple | None = None


@dataclass(frozen=True)
class Profile:
    """Performance profiles: data has tau, variant, value (share of runs above tau), low, high."""

    data: pd.DataFrame
    label: str


@dataclass(frozen=True)
class Figure:
    """A figure; name is the stem of its files and its id in the page."""

    name: str
    title: str
    caption: str
    plot: Curves | Overview | Intervals | Profile


@dataclass
class Report:
    """A report's title, its blocks in their order, and its variants in the order of their looks."""

    title: str
    variants: list
    blocks: list = field(default_factory=list)

    def all(self, kind):
        """The blocks of a kind, in their order."""
        return [block for block in self.blocks if isinstance(block, kind)]
