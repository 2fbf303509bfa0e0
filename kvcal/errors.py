"""Everything kvcal raises on purpose, and the exit code a shell sees for it.

    KvcalError                    1   (never raised itself)
    ├── UsageError                2   an option or argument that cannot be meant
    │   └── RecipeError           2   a recipe with faults, all of them listed
    ├── PlanRefused               3   this model, format and engine do not go together
    ├── InputError                4   what was read is not usable
    │   ├── ModelError            4   weights, config or tokenizer
    │   ├── DataError             4   calibration or evaluation text
    │   └── StatisticsError       4   a layer unseen, or NaN or infinity in its K, V or Q
    ├── GateFailed                5   measured, and worse than a gate of the recipe allows
    ├── CheckFailed               6   the written files break the engine's loader contract
    ├── OutputError               7   the output folder cannot be written
    ├── RankFailed                8   another process of a run that several share
    └── Interrupted             130   Ctrl-C, or ended by a launcher, with statistics left to go on from

Exit code 1 is left for a bug in kvcal and 130 for Ctrl-C.
"""

from __future__ import annotations


def in_one_line(error: Exception) -> str:
    """What a library raised, without its line breaks and not without end."""
    text = " ".join(str(error).split())
    text = text if len(text) <= 300 else text[:297] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class KvcalError(Exception):
    """Base of the tree. ``str(error)`` is one line that says what to do about it."""

    exit_code = 1


class UsageError(KvcalError):
    """A command-line option or argument that cannot be meant."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe that is not valid; ``faults`` lists every fault found, one line each."""

    def __init__(self, source: str, faults: list[str]):
        self.faults = faults
        super().__init__(f"{source}: " + "; ".join(faults))


class PlanRefused(KvcalError):
    """Model, format, granularity and engine do not go together; ``reasons`` lists why."""

    exit_code = 3

    def __init__(self, reasons: list[str]):
        self.reasons = reasons
        super().__init__("; ".join(reasons))


class InputError(KvcalError):
    """What was read is not usable."""

    exit_code = 4


class ModelError(InputError):
    """Weights, config or tokenizer are missing, broken or of a refused kind."""


class DataError(InputError):
    """The calibration or evaluation text is empty, too short or not where it was said to be."""


class StatisticsError(InputError):
    """A layer was never observed, or its K, V or Q holds NaN or infinity."""


class GateFailed(KvcalError):
    """A measured value is worse than a gate of the recipe allows."""

    exit_code = 5


class CheckFailed(KvcalError):
    """The written files break the loader contract of the target engine."""

    exit_code = 6


class OutputError(KvcalError):
    """The output folder exists, is in use, is not writable, or the disk is full."""

    exit_code = 7


class RankFailed(KvcalError):
    """Another process of the run failed, died or cannot be reached."""

    exit_code = 8

    def __init__(self, what: str):
        super().__init__(f"{what}; the same command with --resume goes on from the last saved statistics")


class Interrupted(KvcalError):
    """The run was told to end, and its statistics are left for another one to go on from."""

    exit_code = 130


EXIT_CODES: tuple[tuple[int, str], ...] = (
    (0, "passed"),
    (1, "a bug in kvcal"),
    (2, "bad usage or recipe"),
    (3, "plan refused: model, format, granularity and engine do not go together"),
    (4, "model or data cannot be used"),
    (5, "a gate failed"),
    (6, "a check failed"),
    (7, "output cannot be written"),
    (8, "another process of the run failed"),
    (130, "interrupted"),
)
