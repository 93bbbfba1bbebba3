"""The parts of a report, as data: contents makes blocks, figures and page show them."""

import re
from dataclasses import dataclass, field

import pandas as pd


def slug(text):
    """text as a part of a file's name and of an id in the page."""
    return re.sub(r"[^\w.-]+", "-", text)


# Styles of a table's columns, which are CSS classes in the page
NAME = "name"
NUMBER = "number"
SHORT = "short"
NOTE = "note"
LONG = "long"


@dataclass(frozen=True)
class Heading:
    """A section's heading."""

    text: str


@dataclass(frozen=True)
class Paragraph:
    """Text."""

    text: str


@dataclass(frozen=True)
class Caution:
    """Text that must not be missed, a warning: it is also printed on the terminal."""

    text: str


@dataclass(frozen=True)
class Table:
    """A table of texts, in which line breaks within a cell stay.

    styles: one for each column: NAME (what the row is), NUMBER (on the right), SHORT, NOTE or LONG,
    texts of a few words, of a sentence, or longer; small: in smaller letters.
    """

    header: tuple
    rows: list
    styles: tuple
    small: bool = False


@dataclass(frozen=True)
class Curves:
    """Returns against steps or against wall time, of one environment.

    data has x ("steps", or "wall_time" in seconds), variant, series (a run's name, a published
    score's label, "iqm" or "mean"), kind, value, and low and high, the bounds of a center's
    interval. Kinds are "finished" (a run with a score), "uncounted" (a run without), "center" (of
    the finished ones) and "published".
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
    """A figure. name: the stem of its files and its id in the page.

    shows_gains: it shows what a script's variants gain over all environments.
    """

    name: str
    title: str
    caption: str
    plot: Curves | Overview | Intervals | Profile
    shows_gains: bool = False


@dataclass
class Report:
    """A report: its title, its variants in the order in which they get their looks, its blocks."""

    title: str
    variants: list
    blocks: list = field(default_factory=list)

    def all(self, kind):
        """The blocks of a kind (a class), in their order."""
        return [block for block in self.blocks if isinstance(block, kind)]
