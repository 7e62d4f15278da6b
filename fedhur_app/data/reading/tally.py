"""What became of each line: nothing that is read may vanish without being counted."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from fedhur_app.data.errors import DataError

SHOWN = 5


class Tally:
    """Counts the lines of one file.

    Attributes:
        place: Name of the file, for messages.
        unit: What is counted: line or row.
        read: Lines read so far.
        header: Of these the lines of the header (0 or 1).
        blank: Of these blank.
        without: Of these lines that name a user and no item.
        continued: Of these the further lines of records that go over several lines.
        rows: Of these rows that were taken.
        bad: Number of damaged lines by what is wrong.
        first_bad: Where and what the first damaged lines are, in words.
    """

    def __init__(self, place: str, on_bad_line: Literal["error", "skip"] = "error", unit: str = "line") -> None:
        self.place = place
        self.unit = unit
        self.read = self.header = self.blank = self.without = self.continued = self.rows = 0
        self.bad: Counter[str] = Counter()
        self.first_bad: list[str] = []
        self._noted: list[tuple[int, str, str]] = []
        self._skip = on_bad_line == "skip"

    @property
    def n_bad(self) -> int:
        """Number of damaged lines."""
        return sum(self.bad.values())

    def note(self, problems: Iterable[tuple[int, str, str]]) -> None:
        """Remember damaged lines until :meth:`settle`: the first one of a batch is not known before its end.

        Args:
            problems: Line, column ("" for the line as a whole) and what is wrong.
        """
        self._noted += problems

    def settle(self) -> None:
        """Count the damaged lines that were noted, each once.

        Raises:
            DataError: There is one, and damaged lines are errors.
        """
        noted, self._noted = self._noted, []
        seen = set()
        # Sorted by line only: of two problems of one line the one that was found first counts.
        for line, column, what in sorted(noted, key=lambda problem: problem[0]):
            if line in seen:
                continue
            seen.add(line)
            where = f"{self.unit} {line}" + (f", column '{column}'" if column else "")
            if not self._skip:
                raise DataError(
                    f"{self.place}, {where}: {what}; correct it, or leave such {self.unit}s out with --on-bad-line skip"
                )
            self.bad[f"{column}: {what}" if column else what] += 1
            if len(self.first_bad) < SHOWN:
                self.first_bad.append(f"{where}: {what}")

    def finish(self) -> None:
        """Check that every line was counted and that the file is no other format.

        Raises:
            DataError: More than half of the lines are damaged.
        """
        counted = self.header + self.blank + self.without + self.continued + self.rows + self.n_bad
        if counted != self.read:
            raise AssertionError(f"{self.place}: {self.read} lines were read and {counted} counted")
        if self.n_bad > self.rows:
            raise DataError(
                f"{self.place}: {self.n_bad} of {self.n_bad + self.rows} {self.unit}s are damaged (first "
                f"{self.first_bad[0]}); this looks like another format: see --format"
            )

    def lines(self) -> list[str]:
        """For people: what was left out, and where."""
        if not self.bad:
            return []
        text = [f"{self.place}: {self.n_bad} damaged {self.unit}{'s' * (self.n_bad > 1)} left out"]
        text += [f"  {count} x {what}" for what, count in self.bad.most_common()]
        return [*text, *(f"  {each}" for each in self.first_bad)]

    def as_card(self) -> dict[str, Any]:
        """The counts, ready for JSON."""
        counts = {key: getattr(self, key) for key in ("read", "header", "blank", "without", "continued", "rows")}
        return counts | {"bad": dict(self.bad), "first_bad": self.first_bad}
